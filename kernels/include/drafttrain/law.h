// Laws of rows of logits, softmax(x / T), without their probabilities: what is kept of each split of a row, how shares of
// splits join to a row's, and where a uniform number falls. For host and device.
#pragma once

#include <cmath>
#include <cstdint>

#include "both.h"

namespace drafttrain {

constexpr int64_t kSplit = 4096;  // tokens

DRAFTTRAIN_BOTH int64_t splits_of(int64_t vocab) { return (vocab + kSplit - 1) / kSplit; }

// What is kept of a split, or of a row. Sums are double: what is left of them once refused tokens are taken away again
// still holds when little is left.
struct Share {
    double mass;  // sum of e = exp((x - top) / T)
    double dot;   // sum of e (x - top) / T, for the entropy
    float top;    // the greatest x
};

// 1 / T; finite for T = 0, at which only the greatest are left.
DRAFTTRAIN_BOTH float inverse_of(float temperature) { return 1.0f / (temperature > 1e-20f ? temperature : 1e-20f); }

// exp((x - top) / T) of one value; what is masked by minus infinity weighs nothing, in a row of nothing else too.
DRAFTTRAIN_BOTH float weight(float x, float top, float inverse) { return x == -INFINITY ? 0.0f : expf((x - top) * inverse); }

// Count `share` into the sums of a row whose greatest is row->top.
DRAFTTRAIN_BOTH void join(const Share& share, float inverse, Share* row) {
    const double factor = weight(share.top, row->top, inverse);
    if (factor == 0.0) return;
    row->mass += factor * share.mass;
    row->dot += factor * (share.dot + share.mass * double((share.top - row->top) * inverse));
}

DRAFTTRAIN_BOTH double entropy(const Share& row) { return log(row.mass) - row.dot / row.mass; }

// The split in which the splits' cumulative sum exceeds a number, and how far into it that is. The last split that holds
// anything where rounding leads beyond all; -1 where none does.
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

// A law after refusals of draws from q: max(p - q, 0) renormalised for each, q without the refused in between. Step j takes
// take[j] q(v) away and scales what is left by give[j]. Refused tokens have no p left, so q need not forget them.
struct Residual {
    float *take, *give;
    int64_t steps = 0;

    DRAFTTRAIN_BOTH float operator()(float p, float q) const {
        for (int64_t j = 0; j < steps; j++) p = fmaxf(p - q * take[j], 0.0f) * give[j];
        return p;
    }
};

}  // namespace drafttrain
