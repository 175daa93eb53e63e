// The keyed uniform numbers of sampling.uniform, to the bit: SplitMix64 (Steele et al. 2014) over the parts of the key.
#pragma once

#include <cstdint>

#include "both.h"

namespace drafttrain {

// Independent streams, as sampling.Lane.
enum Lane : int64_t { kTargetLane = 1, kAcceptLane = 3 };

DRAFTTRAIN_BOTH uint64_t mix(uint64_t word) {
    word += 0x9E3779B97F4A7C15;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB;
    return word ^ (word >> 31);
}

// In [0, 1), a pure function of its arguments.
DRAFTTRAIN_BOTH double uniform(int64_t seed, int64_t key, int64_t position, int64_t lane, int64_t draw) {
    uint64_t word = uint64_t(seed);
    const int64_t parts[] = {key, position, lane + 16 * draw};
    for (int64_t part : parts) word = mix(word ^ mix(uint64_t(part) + 0x9E3779B97F4A7C15));
    return double(word >> 11) * (1.0 / 9007199254740992.0);  // 2^-53
}

}  // namespace drafttrain
