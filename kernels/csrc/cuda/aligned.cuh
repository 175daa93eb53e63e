// Whether tensors can be read sixteen bytes at a time.
#pragma once

#include <cstdint>

namespace drafttrain {

// Whether all of these start at 16 bytes (null does) and rows of so many bytes keep to that.
template <typename... P>
bool aligned(int64_t bytes, P... pointers) {
    return bytes % 16 == 0 && ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

}  // namespace drafttrain
