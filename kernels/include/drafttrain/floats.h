// The element types of tensors, as one load and one rounding each, for host and device alike; no torch or CUDA headers.
#pragma once

#include <cstdint>
#include <cstring>

#include "both.h"

namespace drafttrain {

// bfloat16 as its upper sixteen bits, rounded to nearest even.
struct BFloat16 {
    uint16_t bits;
};

DRAFTTRAIN_BOTH float to_float(float x) { return x; }

DRAFTTRAIN_BOTH float to_float(BFloat16 x) {
    const uint32_t wide = uint32_t(x.bits) << 16;
    float y;
    memcpy(&y, &wide, sizeof(y));
    return y;
}

DRAFTTRAIN_BOTH void from_float(float x, float* to) { *to = x; }

DRAFTTRAIN_BOTH void from_float(float x, BFloat16* to) {
    uint32_t wide;
    memcpy(&wide, &x, sizeof(wide));
    to->bits = x != x ? 0x7fc0 : uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

// The value that T holds of a float.
template <typename T>
DRAFTTRAIN_BOTH float rounded(float x) {
    T narrow;
    from_float(x, &narrow);
    return to_float(narrow);
}

}  // namespace drafttrain
