// Row-wise parts of a decoder block on a CPU: RMS norm with the residual's addition, and the gated activation.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "simd.h"

namespace drafttrain {

// The first `count` of kLanes values, then zeros.
template <typename T>
Floats load_some(const T* p, int64_t count) {
    Floats v{};
    for (int64_t i = 0; i < count; i++) v[i] = to_float(p[i]);
    return v;
}

template <typename T>
void store_some(T* p, Floats v, int64_t count) {
    for (int64_t i = 0; i < count; i++) from_float(v[i], &p[i]);
}

// Calls f(i, whole) over a row in steps of kLanes; the last step may be partial.
template <typename F>
void steps(int64_t width, F f) {
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) f(i, true);
    if (i < width) f(i, false);
}

// out = norm(x + delta) * weight, and summed = x + delta; `delta` may be null, then `summed` is not written.
// As transformers does it: the mean of squares in float32, the normed row rounded to T before the weight.
template <typename T>
void rms_norm_row(const T* x, const T* delta, const T* weight, int64_t width, float eps, T* summed, T* out) {
    Floats squares{};
    steps(width, [&](int64_t i, bool whole) {
        Floats v = whole ? load(x + i) : load_some(x + i, width - i);
        if (delta != nullptr) {
            v = rounded<T>(v + (whole ? load(delta + i) : load_some(delta + i, width - i)));
            whole ? store(summed + i, v) : store_some(summed + i, v, width - i);
        }
        squares += v * v;
    });
    if (delta != nullptr) x = summed;
    const float scale = 1.0f / std::sqrt(sum(squares) / float(width) + eps);
    steps(width, [&](int64_t i, bool whole) {
        const Floats v = rounded<T>((whole ? load(x + i) : load_some(x + i, width - i)) * scale);
        const Floats y = v * (whole ? load(weight + i) : load_some(weight + i, width - i));
        whole ? store(out + i, y) : store_some(out + i, y, width - i);
    });
}

// out = SiLU(gate) * up, the halves of one row of 2 * width.
template <typename T>
void gated_row(const T* gate_up, int64_t width, T* out) {
    const T *gate = gate_up, *up = gate_up + width;
    steps(width, [&](int64_t i, bool whole) {
        const Floats g = whole ? load(gate + i) : load_some(gate + i, width - i);
        const Floats u = whole ? load(up + i) : load_some(up + i, width - i);
        const Floats y = rounded<T>(g / (1.0f + exp(-g))) * u;
        whole ? store(out + i, y) : store_some(out + i, y, width - i);
    });
}

// y[r] = w[r] . x for some rows of a matrix, eight rows side by side: the sum of one would wait for itself.
inline void products(const float* w, const float* x, int64_t width, int64_t rows, float* y) {
    constexpr int64_t kSide = 8;
    const int64_t whole = width - width % kRegister;
    for (int64_t r = 0; r < rows; r += kSide) {
        const float* row[kSide];
        for (int64_t j = 0; j < kSide; j++) row[j] = w + std::min(r + j, rows - 1) * width;
        Register sums[kSide]{};
        for (int64_t i = 0; i < whole; i += kRegister) {
            const Register v = load_register(x + i);
            for (int64_t j = 0; j < kSide; j++) sums[j] += load_register(row[j] + i) * v;
        }
        for (int64_t j = 0; j < std::min(kSide, rows - r); j++) {
            float total = 0.0f;
            for (int i = 0; i < kRegister; i++) total += sums[j][i];
            for (int64_t i = whole; i < width; i++) total += row[j][i] * x[i];
            y[r + j] = total;
        }
    }
}

// The lowest index of a row's maximum, as torch's argmax.
template <typename T>
int64_t argmax(const T* x, int64_t width) {
    Floats top = all(-INFINITY);
    steps(width, [&](int64_t i, bool whole) {
        if (whole)
            top = max(top, load(x + i));
        else
            for (int64_t j = i; j < width; j++) top[j - i] = to_float(x[j]) > top[j - i] ? to_float(x[j]) : top[j - i];
    });
    const float best = greatest(top);
    int64_t where = 0;
    while (where < width && to_float(x[where]) != best) where++;
    return where < width ? where : 0;
}

}  // namespace drafttrain
