// Products of a few rows with a frozen bfloat16 weight that is packed in panels: sixteen outputs side by side, one step after
// another. A step is two inputs, so it has 64 bytes. `ops/linear.py` packs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "simd.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace drafttrain {

constexpr int kPanel = 16;                     // outputs of a panel
constexpr int kParts = kPanel / kRegister;     // registers of a step
constexpr int kAtOnce = kSums == 16 ? 12 : 6;  // rows of which a weight's load serves all
constexpr int kFew = kAtOnce / 2;              // up to so many, twice as many panels side by side
constexpr int kPair = kSums == 16 ? 2 : 1;     // panels side by side

// Two weights of sixteen outputs, and the two inputs that all of these share.
#ifdef __AVX512BF16__
typedef __m512bh PairOfWeights;
typedef uint32_t PairOfInputs;  // the later one in the upper half

inline PairOfWeights weights_of(Register bits) { return (__m512bh)bits; }
inline PairOfInputs inputs_of(BFloat16 first, BFloat16 second) { return first.bits | uint32_t(second.bits) << 16; }
inline void add_products(Register& sum, PairOfWeights w, PairOfInputs x) {
    sum = (Register)_mm512_dpbf16_ps((__m512)sum, w, (__m512bh)_mm512_set1_epi32(int(x)));
}
#else
// Widened in registers, where it costs less than the bytes that it saves.
struct PairOfWeights {
    Register first, second;
};
struct PairOfInputs {
    float first, second;
};

inline PairOfWeights weights_of(Register bits) {
    typedef uint32_t Bits __attribute__((vector_size(sizeof(Register))));
    const Bits both = (Bits)bits;
    return {(Register)(both << 16), (Register)(both & 0xffff0000u)};
}
inline PairOfInputs inputs_of(BFloat16 first, BFloat16 second) { return {to_float(first), to_float(second)}; }
inline void add_products(Register& sum, const PairOfWeights& w, PairOfInputs x) {
    sum += w.first * x.first, sum += w.second * x.second;
}
#endif

// One product of `rows` rows. Rows are taken in chunks of at most kAtOnce; x has chunk after chunk, each [steps, its rows].
struct PanelProduct {
    const float* packed;  // [panels, steps, 16] pairs
    const PairOfInputs* x;
    const BFloat16* bias;  // null: none
    BFloat16* out;         // [rows, outputs]
    int64_t rows, steps, outputs;

    int64_t chunks() const { return (rows + kAtOnce - 1) / kAtOnce; }
    int64_t first_row(int64_t chunk) const { return rows * chunk / chunks(); }
};

// The rows [rows, inputs] in the order of `PanelProduct::x`; where their number is odd, the last input's partner is 0.
inline std::vector<PairOfInputs> paired(const PanelProduct& p, const BFloat16* x, int64_t inputs) {
    std::vector<PairOfInputs> pairs(size_t(p.rows * p.steps));
    for (int64_t c = 0; c < p.chunks(); c++) {
        const int64_t begin = p.first_row(c), rows = p.first_row(c + 1) - begin;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t s = 0; s < p.steps; s++) {
                const BFloat16* at = x + (begin + r) * inputs + 2 * s;
                pairs[size_t(begin * p.steps + s * rows + r)] = inputs_of(at[0], 2 * s + 1 < inputs ? at[1] : BFloat16{0});
            }
    }
    return pairs;
}

// kRows rows from `row` on, with kPanels panels from `panel` on. Meanwhile `lines` steps of weights after `next` come into the
// second cache for each step: loads alone do not keep enough requests under way.
template <int kRows, int kPanels>
void multiply(const PanelProduct& p, int64_t row, int64_t panel, const float* next, int64_t lines) {
    const float* w = p.packed + panel * p.steps * kPanel;
    const PairOfInputs* x = p.x + row * p.steps;
    Register sums[kRows][kPanels * kParts]{};
    for (int64_t s = 0; s < p.steps; s++) {
        for (int64_t i = 0; i < lines; i++) __builtin_prefetch(next + (s * lines + i) * kPanel, 0, 2);
#pragma GCC unroll 8
        for (int j = 0; j < kPanels * kParts; j++) {
            const int64_t at = (j / kParts * p.steps + s) * kPanel + j % kParts * kRegister;
            const PairOfWeights weights = weights_of(load_register(w + at));
#pragma GCC unroll 16
            for (int r = 0; r < kRows; r++) add_products(sums[r][j], weights, x[s * kRows + r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
        for (int k = 0; k < kPanels; k++) {
            float sum[kPanel];
#pragma GCC unroll 2
            for (int j = 0; j < kParts; j++) store_register(sum + j * kRegister, sums[r][k * kParts + j]);
            const int64_t first = (panel + k) * kPanel, count = std::min<int64_t>(kPanel, p.outputs - first);
            BFloat16* to = p.out + (row + r) * p.outputs + first;
            for (int64_t i = 0; i < count; i++) from_float(p.bias ? sum[i] + to_float(p.bias[first + i]) : sum[i], to + i);
        }
}

// `multiply` for a number of rows that is known only now.
template <int kRows, int kPanels>
void multiply_rows(const PanelProduct& p, int64_t row, int64_t rows, int64_t panel, const float* next, int64_t lines) {
    if (rows == kRows)
        multiply<kRows, kPanels>(p, row, panel, next, lines);
    else if constexpr (kRows > 1)
        multiply_rows<kRows - 1, kPanels>(p, row, rows, panel, next, lines);
}

// The panels from `begin` to `end` for all rows: each panel is read from memory once, and for further rows from the cache.
inline void multiply_panels(const PanelProduct& p, int64_t begin, int64_t end) {
    const int64_t side = p.rows <= kFew ? 2 * kPair : kPair, chunks = p.chunks();
    for (int64_t panel = begin; panel < end;) {
        const int64_t panels = end - panel >= side ? side : 1;
        const int64_t lines = panel + panels < end ? (panels + chunks - 1) / chunks : 0;
        const float* next = p.packed + (panel + panels) * p.steps * kPanel;
        for (int64_t c = 0; c < chunks; c++, next += lines * p.steps * kPanel) {
            const int64_t row = p.first_row(c), rows = p.first_row(c + 1) - row;
            if (panels == 1)
                multiply_rows<kAtOnce, 1>(p, row, rows, panel, next, lines);
            else if (panels == kPair)
                multiply_rows<kAtOnce, kPair>(p, row, rows, panel, next, lines);
            else
                multiply_rows<kFew, 2 * kPair>(p, row, rows, panel, next, lines);
        }
        panel += panels;
    }
}

}  // namespace drafttrain
