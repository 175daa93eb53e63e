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

// float16 (IEEE 754 binary16), rounded to nearest even; beyond 65,504 it is infinite.
struct Float16 {
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

DRAFTTRAIN_BOTH uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

DRAFTTRAIN_BOTH float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

// The product changes the exponent's offset from 15 to 127, subnormal numbers included. Infinity and NaN are set after it.
DRAFTTRAIN_BOTH float to_float(Float16 x) {
#ifdef __CUDA_ARCH__
    float y;  // from 32-bit registers: with those of 16 bits ptxas spills
    asm("{.reg .b16 half, rest; mov.b32 {half, rest}, %1; cvt.f32.f16 %0, half;}" : "=f"(y) : "r"(uint32_t(x.bits)));
    return y;
#else
    const uint32_t wide = uint32_t(x.bits & 0x7fff) << 13, sign = uint32_t(x.bits & 0x8000) << 16;
    const uint32_t finite = bits_of(float_of(wide) * 5.192296858534828e33f);  // 2^112
    return float_of((wide < 0x0f800000 ? finite : wide | 0x7f800000) | sign);
#endif
}

// Three ranges: normal numbers; subnormal numbers, which adding 0.5 rounds to multiples of 2^-24; numbers that are too large.
DRAFTTRAIN_BOTH void from_float(float x, Float16* to) {
#ifdef __CUDA_ARCH__
    uint32_t wide;
    asm("{.reg .b16 half; cvt.rn.f16.f32 half, %1; mov.b32 %0, {half, half};}" : "=r"(wide) : "f"(x));
    to->bits = uint16_t(wide);
#else
    const uint32_t wide = bits_of(x) & 0x7fffffff, sign = bits_of(x) >> 16 & 0x8000;
    const uint32_t normal = (wide - 0x38000000 + 0xfff + (wide >> 13 & 1)) >> 13;
    const uint32_t small = bits_of(float_of(wide) + 0.5f) - 0x3f000000;
    const uint32_t large = wide > 0x7f800000 ? 0x7e00 : 0x7c00;  // NaN or infinity
    to->bits = uint16_t((wide < 0x38800000 ? small : wide < 0x477ff000 ? normal : large) | sign);
#endif
}

// A float rounded to T.
template <typename T>
DRAFTTRAIN_BOTH float rounded(float x) {
    T narrow;
    from_float(x, &narrow);
    return to_float(narrow);
}

}  // namespace drafttrain
