// Distributions of rows of logits, softmax(x / T), without storing probabilities: the share of each split of a row, the sum of
// shares for a row, and the place of a uniform number in it. For host and device.
#pragma once

#include <cmath>
#include <cstdint>

#include "both.h"

namespace drafttrain {

constexpr int64_t kSplit = 4096;  // tokens

DRAFTTRAIN_BOTH int64_t splits_of(int64_t vocab) { return (vocab + kSplit - 1) / kSplit; }

// The sums of a split or of a row. They are double, so that little remains precise after rejected tokens are subtracted.
struct Share {
    double mass;  // sum of e = exp((x - top) / T)
    double dot;   // sum of e (x - top) / T, for the entropy
    float top;    // the greatest x
};

// 1 / T; finite for T = 0, where only the greatest logits keep a weight.
DRAFTTRAIN_BOTH float inverse_of(float temperature) { return 1.0f / (temperature > 1e-20f ? temperature : 1e-20f); }

// exp((x - top) / T) of one value; 0 for minus infinity, even in a row of nothing else. The device has 2^x as an instruction
// (relative error 2^-22; results below 2^-126 become 0), for which 1 / T takes the factor log2(e).
DRAFTTRAIN_BOTH float weight(float x, float top, float inverse) {
    const float below = x - (top == -INFINITY ? 0.0f : top);
#if defined(__CUDA_ARCH__)
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(below * (inverse * 1.44269504f)));
    return e;
#elif defined(DRAFTTRAIN_EMULATE)
    return exp2f(below * (inverse * 1.44269504f));
#else
    return expf(below * inverse);
#endif
}

// Adds `share` to the sums of a row whose greatest value is row->top.
DRAFTTRAIN_BOTH void join(const Share& share, float inverse, Share* row) {
    const double factor = weight(share.top, row->top, inverse);
    if (factor == 0.0) return;
    row->mass += factor * share.mass;
    row->dot += factor * (share.dot + share.mass * double((share.top - row->top) * inverse));
}

DRAFTTRAIN_BOTH double entropy(const Share& row) { return log(row.mass) - row.dot / row.mass; }

// The split in which the splits' cumulative sum exceeds a number, and the rest of the number there. The last split with mass
// where rounding leads past the end; -1 without any mass.
struct Place {
    int64_t split;
    double rest;
};

template <typename Mass>
DRAFTTRAIN_BOTH Place locate(int64_t splits, double number, Mass mass) {
    Place found = {-1, 0.0};
    double before = 0.0;
    for (int64_t s = 0; s < splits && before <= number; s++) {
        const double here = mass(s);
        if (!(here > 0.0)) continue;
        found = {s, number - before};
        before += here;
    }
    return found;
}

// A distribution p after rejected samples of q: for each, max(p - q, 0) renormalised, then the token removed from q. Step j
// subtracts take[j] q(v) and scales the rest by give[j]. Rejected tokens have no p left, so q may keep them.
struct Residual {
    float *take, *give;
    int64_t steps = 0;

    DRAFTTRAIN_BOTH float operator()(float p, float q) const {
#pragma unroll 1  // inlined for each value of a thread; steps are few
        for (int64_t j = 0; j < steps; j++) p = fmaxf(p - q * take[j], 0.0f) * give[j];
        return p;
    }
};

}  // namespace drafttrain
