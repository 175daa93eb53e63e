// One integer for a value and its index, in the order of top-k: the greater value first, the lower index among equals.
#pragma once

#include "floats.h"

namespace drafttrain {

constexpr int kMostTop = 64;

// Greater than the keys of all later values; 0 is no key. NaN is the smallest; both zeros are equal.
DRAFTTRAIN_BOTH uint64_t top_key(float x, uint32_t index) {
    uint32_t bits = 0;
    if (x == x) {
        const float plain = x + 0.0f;  // -0 becomes 0
        memcpy(&bits, &plain, sizeof(bits));
        bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    }
    return uint64_t(bits) << 32 | uint32_t(~index);
}

DRAFTTRAIN_BOTH uint32_t index_of(uint64_t key) { return ~uint32_t(key); }

DRAFTTRAIN_BOTH float value_of(uint64_t key) {
    uint32_t bits = uint32_t(key >> 32);
    bits = bits == 0 ? 0x7fc00000u : bits >> 31 ? bits & 0x7fffffffu : ~bits;
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

}  // namespace drafttrain
