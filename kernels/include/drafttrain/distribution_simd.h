// Distributions of rows of logits on a CPU: the shares of a row's splits, and sampling from their cumulative sum.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "distribution.h"
#include "simd.h"

namespace drafttrain {

typedef double Doubles __attribute__((vector_size(kLanes * sizeof(double)), aligned(8)));

// The next kLanes of `count` values, then minus infinity.
template <typename T>
Floats load_masked(const T* x, int64_t count) {
    if (count >= kLanes) return load(x);
    Floats v = all(-INFINITY);
    for (int64_t i = 0; i < count; i++) v[i] = to_float(x[i]);
    return v;
}

// `weight` of distribution.h for each lane; 0 where `exp` would underflow, as for masked values.
inline Floats weights(Floats x, float top, float inverse) {
    const Floats y = (x - top) * inverse;
    return y > all(-87.0f) ? exp(y) : Floats{};
}

template <typename T>
Share share_of(const T* x, int64_t count, float inverse, bool dots) {
    Floats top = all(-INFINITY);
    for (int64_t i = 0; i < count; i += kLanes) top = max(load_masked(x + i, count - i), top);
    Share share = {0.0, 0.0, greatest(top)};
    if (share.top == -INFINITY) return share;
    Doubles mass{}, dot{};
    for (int64_t i = 0; i < count; i += kLanes) {
        const Floats v = load_masked(x + i, count - i), e = weights(v, share.top, inverse);
        mass += __builtin_convertvector(e, Doubles);
        if (dots) dot += __builtin_convertvector(e > Floats{} ? e * ((v - share.top) * inverse) : Floats{}, Doubles);
    }
    for (int j = 0; j < kLanes; j++) share.mass += mass[j], share.dot += dot[j];
    return share;
}

// A row of logits with its distribution.
template <typename T>
struct RowDistribution {
    const T* x = nullptr;
    int64_t vocab = 0;
    float inverse = 1.0f;
    Share row = {};
    std::vector<Share> shares;
    std::vector<double> sums;  // of the splits, for `find`

    void read(const T* logits, int64_t width, float one_over_temperature, bool dots) {
        x = logits, vocab = width, inverse = one_over_temperature, row = {0.0, 0.0, -INFINITY};
        shares.resize(size_t(splits_of(vocab))), sums.resize(shares.size());
        for (int64_t s = 0; s < splits_of(vocab); s++) {
            shares[s] = share_of(x + s * kSplit, size_of(s), inverse, dots);
            row.top = std::max(row.top, shares[s].top);
        }
        for (const Share& share : shares) join(share, inverse, &row);
    }

    int64_t size_of(int64_t split) const { return std::min(kSplit, vocab - split * kSplit); }
    double factor(int64_t split) const { return weight(shares[split].top, row.top, inverse); }

    // A token's share of row.mass.
    double weight_of(int64_t token) const {
        const Share& share = shares[token / kSplit];
        if (share.top == -INFINITY) return 0.0;
        return double(weights(all(to_float(x[token])), share.top, inverse)[0]) * factor(token / kSplit);
    }

    void fill() {
        for (size_t s = 0; s < sums.size(); s++) sums[s] = shares[s].mass * factor(int64_t(s));
    }

    // The weights of a split's tokens, relative to its own greatest.
    void lay(int64_t split, float* out) const {
        for (int64_t i = 0; i < size_of(split); i += kLanes)
            store(out + i, weights(load_masked(x + split * kSplit + i, size_of(split) - i), shares[split].top, inverse));
    }

    // The token at which the cumulative sum exceeds `at`: by `sums` to find the split, by the values that of(split, out) writes
    // within it. scale(split): converts from the unit of the sums to that of `of`. The last token with a weight where rounding
    // leads past the end; -1 without any weight.
    template <typename Of, typename Scale>
    int64_t find(double at, Of of, Scale scale) const {
        const Place place = locate(splits_of(vocab), at, [&](int64_t s) { return sums[size_t(s)]; });
        if (place.split < 0) return -1;
        float out[kSplit];
        of(place.split, out);
        const double rest = place.rest * scale(place.split);
        double before = 0.0;
        int64_t found = -1;
        for (int64_t i = 0; i < size_of(place.split) && before <= rest; i++)
            if (out[i] > 0.0f) found = i, before += out[i];
        return found < 0 ? -1 : place.split * kSplit + found;
    }

    // The token of the distribution at this number in [0, 1).
    int64_t draw(double number) {
        fill();
        const auto of = [&](int64_t split, float* out) { lay(split, out); };
        const int64_t token = find(number * row.mass, of, [&](int64_t s) { return 1.0 / factor(s); });
        return token < 0 ? 0 : token;
    }
};

}  // namespace drafttrain
