// The divergence of a row of the drafter's logits from the target's on a CPU: loss, gradient, top-1 agreement and overlap.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "distribution_simd.h"
#include "rows.h"

namespace drafttrain {

enum class Divergence : int64_t { kKl = 0, kCe = 1, kTvd = 2 };

struct Agreement {
    float loss, mass;
    bool hit;
};

constexpr int64_t kBlock = 1024;  // values whose sums are float32; blocks are summed in double

// Sums f(i, left) over a row in steps of kLanes; left: values until the row's end. f returns the lanes' part of the sum.
template <typename F>
double summed(int64_t width, F f) {
    double whole = 0.0;
    for (int64_t start = 0; start < width; start += kBlock) {
        Floats part{};
        for (int64_t i = start; i < std::min(start + kBlock, width); i += kLanes) part += f(i, width - i);
        whole += sum(part);
    }
    return whole;
}

struct Sums {
    double own, target, apart;
};

// The sums of both rows' weights e^(x - greatest x), and of the target's weights times the logits' difference, in one pass.
inline Sums weigh(const float* x, float x_top, const float* y, float y_top, int64_t width, bool apart) {
    Sums whole{};
    for (int64_t start = 0; start < width; start += kBlock) {
        Floats own_part{}, target_part{}, apart_part{};
        for (int64_t i = start; i < std::min(start + kBlock, width); i += kLanes) {
            const Floats own = load_masked(x + i, width - i) - x_top, target = load_masked(y + i, width - i) - y_top;
            const Floats weight = weights(target, 0.0f, 1.0f);
            own_part += weights(own, 0.0f, 1.0f), target_part += weight;
            if (apart) apart_part += weight > Floats{} ? weight * (target - own) : Floats{};
        }
        whole.own += sum(own_part), whole.target += sum(target_part), whole.apart += sum(apart_part);
    }
    return whole;
}

// A row's greatest value; NaN if any value is NaN.
inline float greatest_of(const float* x, int64_t width) {
    Floats top = all(-INFINITY), odd{};
    for (int64_t i = 0; i < width; i += kLanes) {
        const Floats v = load_masked(x + i, width - i);
        top = max(v, top);
        odd = v == v ? odd : all(1.0f);
    }
    return sum(odd) > 0.0f ? std::numeric_limits<float>::quiet_NaN() : greatest(top);
}

// Whether any of the first `count` values equals this one.
inline bool holds(const float* x, int64_t count, float value) {
    bool found = false;
    for (int64_t i = 0; i < count; i++) found |= x[i] == value;
    return found;
}

// The lowest index of a value that the row contains.
inline int64_t place_of(const float* x, int64_t width, float value) {
    int64_t i = 0;
    while (i + 4 * kLanes < width && !holds(x + i, 4 * kLanes, value)) i += 4 * kLanes;
    while (x[i] != value) i++;
    return i;
}

// x: the drafter's logits. y: the target's logits, which may be -inf. slope: receives d loss / d x; null, or x itself.
inline Agreement diverge_row(const float* x, const float* y, int64_t width, int64_t label, Divergence name, float* slope) {
    const float x_top = greatest_of(x, width), y_top = greatest_of(y, width);
    if (!std::isfinite(x_top) || !std::isfinite(y_top)) {  // NaN, as the softmax of such a row
        const float nothing = std::numeric_limits<float>::quiet_NaN();
        if (slope != nullptr) std::fill(slope, slope + width, nothing);
        return {nothing, nothing, false};
    }
    const int64_t best = place_of(y, width, y_top);
    const bool hit = x[best] == x_top && !holds(x, best, x_top);
    const auto own = [&](int64_t i, int64_t left) { return load_masked(x + i, left) - x_top; };
    const auto target = [&](int64_t i, int64_t left) { return load_masked(y + i, left) - y_top; };
    const auto [x_sum, y_sum, y_apart] = weigh(x, x_top, y, y_top, width, name == Divergence::kKl);
    const float x_scale = float(1.0 / x_sum), y_scale = float(1.0 / y_sum);
    const auto q = [&](int64_t i, int64_t left) { return weights(own(i, left), 0.0f, 1.0f) * x_scale; };
    const auto p = [&](int64_t i, int64_t left) { return weights(target(i, left), 0.0f, 1.0f) * y_scale; };
    const auto put = [&](int64_t i, Floats v) {
        width - i < kLanes ? store_some(slope + i, v, width - i) : store(slope + i, v);
    };

    const float label_logit = label >= 0 ? x[label] : 0.0f;  // read before the slope may overwrite it
    const bool at_once = slope != nullptr && name != Divergence::kTvd;
    const double mass = summed(width, [&](int64_t i, int64_t left) {
        const Floats q_i = q(i, left), p_i = p(i, left);
        if (at_once) put(i, name == Divergence::kKl ? q_i - p_i : q_i);
        return min(q_i, p_i);
    });
    double loss = 0.0;
    if (name == Divergence::kKl) {
        loss = y_apart / y_sum - std::log(y_sum) + std::log(x_sum);
    } else if (name == Divergence::kCe) {
        loss = std::log(x_sum) - double(label_logit - x_top);
        if (slope != nullptr) slope[label] -= 1.0f;
    } else {
        loss = summed(width, [&](int64_t i, int64_t left) { return max(p(i, left) - q(i, left), Floats{}); });
        if (slope != nullptr) {
            const double below = summed(width, [&](int64_t i, int64_t left) {
                const Floats q_i = q(i, left), p_i = p(i, left);
                return q_i < p_i ? q_i : Floats{};
            });
            for (int64_t i = 0; i < width; i += kLanes) {
                const Floats q_i = q(i, width - i), p_i = p(i, width - i);
                put(i, q_i * float(below) - (q_i < p_i ? q_i : Floats{}));
            }
        }
    }
    return {float(loss), float(mass), hit};
}

}  // namespace drafttrain
