// Whether tensors can be read sixteen bytes at a time.
#pragma once

#include <cstdint>

#include "launch.cuh"

namespace drafttrain {

// Whether all of these start at 16 bytes (null does) and rows of so many bytes keep to that.
template <typename... P>
bool aligned(int64_t bytes, P... pointers) {
    return bytes % 16 == 0 && ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

// f(Unit()) for the widest unit in which entries of so many bytes can be copied.
template <typename F>
void by_unit(int64_t bytes, const Tensor& from, const Tensor& to, F f) {
    if (aligned(bytes, data<char>(from), data<char>(to)))
        f(uint4());
    else
        f(uint16_t());
}

}  // namespace drafttrain
