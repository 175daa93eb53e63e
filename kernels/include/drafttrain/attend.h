// Attention of a few new positions over a paged KV cache on a CPU: q/k norm, rotary embedding, KV append and
// attention under the tree's ancestor mask, for one KV head of one sequence at a time.
//
// A page holds `page` positions, each [kv_heads, D]. Position p of a sequence lies in page table[p / page]. Node i of the
// tree is written at position length + i, whatever its depth, and sees the `length` positions before the tree and its
// ancestors (itself included), within `window` rotary positions where one is given.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "simd.h"

namespace drafttrain {

constexpr int kKeys = 64;  // positions attended to at a time

template <typename T>
struct Attend {
    int64_t nodes, heads, kv_heads, width;  // N, query heads, KV heads, D (even, at most 256)
    int64_t page, pages;                    // positions of a page, entries of a row of `table`
    int64_t window;                         // 0: none
    float scale, eps;
    const T *qkv, *cos, *sin;      // [B, N, heads + 2 kv_heads, D]; [positions, D], sines signed for the half they meet
    const T *q_weight, *k_weight;  // [D] or null
    const int64_t *position, *table, *length;  // [B, N], [B, pages], [B]
    const bool* ancestor;                      // [B, N, N]; null: causal
    T *keys, *values;                          // [all pages, page, kv_heads, D]
    T* out;                                    // [B, N, heads, D]

    T* at(T* pool, int64_t b, int64_t p, int64_t head) const {
        return pool + ((table[b * pages + p / page] * page + p % page) * kv_heads + head) * width;
    }
    bool sees(int64_t b, int64_t n, int64_t i) const { return ancestor ? ancestor[(b * nodes + n) * nodes + i] : i <= n; }
};

// One head's vector, normed and turned to its position; rounded to T where transformers rounds.
template <typename T>
void turn(const Attend<T>& a, const T* x, const T* weight, int64_t position, float* y) {
    float plain[256];
    for (int64_t d = 0; d < a.width; d++) plain[d] = to_float(x[d]);
    if (weight != nullptr) {
        float squares = 0.0f;
        for (int64_t d = 0; d < a.width; d++) squares += plain[d] * plain[d];
        const float scale = 1.0f / std::sqrt(squares / float(a.width) + a.eps);
        for (int64_t d = 0; d < a.width; d++) {
            T rounded;
            from_float(plain[d] * scale, &rounded);
            from_float(to_float(rounded) * to_float(weight[d]), &rounded);
            plain[d] = to_float(rounded);
        }
    }
    const T *cos = a.cos + position * a.width, *sin = a.sin + position * a.width;
    const int64_t half = a.width / 2;
    for (int64_t d = 0; d < half; d++) {
        y[d] = plain[d] * to_float(cos[d]) + plain[d + half] * to_float(sin[d]);
        y[d + half] = plain[d + half] * to_float(cos[d + half]) + plain[d] * to_float(sin[d + half]);
    }
}

// Write the new positions' keys and values of one KV head.
template <typename T>
void append(const Attend<T>& a, int64_t b, int64_t head) {
    const int64_t row = (a.heads + 2 * a.kv_heads) * a.width;
    float turned[256];
    for (int64_t n = 0; n < a.nodes; n++) {
        const T* x = a.qkv + (b * a.nodes + n) * row + (a.heads + head) * a.width;
        T *key = a.at(a.keys, b, a.length[b] + n, head), *value = a.at(a.values, b, a.length[b] + n, head);
        turn(a, x, a.k_weight, a.position[b * a.nodes + n], turned);
        for (int64_t d = 0; d < a.width; d++) from_float(turned[d], &key[d]);
        for (int64_t d = 0; d < a.width; d++) value[d] = x[a.kv_heads * a.width + d];
    }
}

// [rows, kKeys] scores of `Rows` queries; `kt` is the block's keys transposed, [D, kKeys].
template <int Rows>
inline void score(const float* q, int64_t stride, int64_t width, const float* kt, float* s) {
    constexpr int kParts = kKeys / kLanes;
    Floats acc[Rows][kParts] = {};
    for (int64_t d = 0; d < width; d++) {
        Floats k[kParts];
        for (int j = 0; j < kParts; j++) k[j] = load(kt + d * kKeys + j * kLanes);
        for (int r = 0; r < Rows; r++) {
            const float x = q[r * stride + d];
            for (int j = 0; j < kParts; j++) acc[r][j] += x * k[j];
        }
    }
    for (int r = 0; r < Rows; r++)
        for (int j = 0; j < kParts; j++) store(s + r * kKeys + j * kLanes, acc[r][j]);
}

// out = out * keep + p v for `Rows` rows; v is the block's values, [kKeys, Parts * kLanes].
template <int Rows, int Parts>
inline void mix(const float* p, const float* keep, int count, const float* v, float* out) {
    Floats acc[Rows][Parts];
    for (int r = 0; r < Rows; r++)
        for (int j = 0; j < Parts; j++) acc[r][j] = load(out + (r * Parts + j) * kLanes) * keep[r];
    for (int i = 0; i < count; i++) {
        Floats x[Parts];
        for (int j = 0; j < Parts; j++) x[j] = load(v + (i * Parts + j) * kLanes);
        for (int r = 0; r < Rows; r++)
            for (int j = 0; j < Parts; j++) acc[r][j] += p[r * kKeys + i] * x[j];
    }
    for (int r = 0; r < Rows; r++)
        for (int j = 0; j < Parts; j++) store(out + (r * Parts + j) * kLanes, acc[r][j]);
}

// A block's worth of online softmax (Milakov & Gimelshein 2018) for `Rows` rows. bias: by row, null where all is seen.
template <int Rows, int Parts>
inline void block(const float* q, int64_t width, const float* kt, const float* v, int count, const float* const* bias,
                  float* top, float* mass, float* out) {
    alignas(64) float s[Rows * kKeys];
    float keep[Rows];
    score<Rows>(q, Parts * kLanes, width, kt, s);
    for (int r = 0; r < Rows; r++) {
        Floats best = all(top[r]), total{};
        for (int i = 0; i < kKeys; i += kLanes) {
            Floats x = load(s + r * kKeys + i);
            if (bias != nullptr) store(s + r * kKeys + i, x = x + load(bias[r] + i));
            best = max(best, x);
        }
        const float now = greatest(best);
        for (int i = 0; i < kKeys; i += kLanes) {
            const Floats e = exp(load(s + r * kKeys + i) - now);
            store(s + r * kKeys + i, e);
            total += e;
        }
        keep[r] = exp(all(top[r] - now))[0];
        mass[r] = mass[r] * keep[r] + sum(total);
        top[r] = now;
    }
    mix<Rows, Parts>(s, keep, count, v, out);
}

// Attend from nodes [first, last) with all query heads of one KV head. Parts * kLanes >= D.
template <int Parts, typename T>
void attend_head(const Attend<T>& a, int64_t b, int64_t head, int64_t first, int64_t last) {
    constexpr int kRows = Parts <= 2 ? 4 : Parts <= 8 ? 2 : 1;
    constexpr int64_t kWide = Parts * kLanes;
    const int64_t groups = a.heads / a.kv_heads, rows = (last - first) * groups, whole = a.length[b] + a.nodes;
    const int64_t padded = (rows + kRows - 1) / kRows * kRows;
    // every array starts at a cache line: a vector across two of them is read at half speed
    static thread_local std::vector<float> room;
    const int64_t nodes = last - first, sizes[] = {padded * kWide,      padded * kWide, kKeys * a.width, kKeys * kWide,
                                                   (nodes + 1) * kKeys, padded,         padded};
    float* part[7];
    int64_t total = kLanes;
    for (int64_t size : sizes) total += (size + kLanes - 1) / kLanes * kLanes;
    if (int64_t(room.size()) < total) room.resize(size_t(total));
    float* next = room.data() + (64 - reinterpret_cast<uintptr_t>(room.data()) % 64) % 64 / sizeof(float);
    for (int i = 0; i < 7; i++) {
        part[i] = next;
        next += (sizes[i] + kLanes - 1) / kLanes * kLanes;
    }
    float *q = part[0], *out = part[1], *kt = part[2], *v = part[3], *bias = part[4], *top = part[5], *mass = part[6];
    for (int64_t i = 0; i < padded * kWide; i++) q[i] = out[i] = 0.0f;
    for (int64_t r = 0; r < padded; r++) top[r] = -1e30f, mass[r] = 0.0f;
    int64_t least = whole;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t n = first + r / groups, h = head * groups + r % groups, at = a.position[b * a.nodes + n];
        turn(a, a.qkv + ((b * a.nodes + n) * (a.heads + 2 * a.kv_heads) + h) * a.width, a.q_weight, at, q + r * kWide);
        for (int64_t d = 0; d < a.width; d++) {
            T rounded;
            from_float(q[r * kWide + d], &rounded);
            q[r * kWide + d] = to_float(rounded) * a.scale;
        }
        least = at < least ? at : least;
    }
    const int64_t from = a.window > 0 && least - a.window + 1 > 0 ? (least - a.window + 1) / kKeys * kKeys : 0;
    for (int64_t start = from; start < whole; start += kKeys) {
        const int count = whole - start < kKeys ? int(whole - start) : kKeys;
        for (int i = 0; i < kKeys; i++) {
            if (i >= count) {
                for (int64_t d = 0; d < a.width; d++) kt[d * kKeys + i] = 0.0f;
                continue;
            }
            const T *key = a.at(a.keys, b, start + i, head), *value = a.at(a.values, b, start + i, head);
            for (int64_t d = 0; d < a.width; d++) kt[d * kKeys + i] = to_float(key[d]);
            for (int64_t d = 0; d < a.width; d++) v[i * kWide + d] = to_float(value[d]);
            for (int64_t d = a.width; d < kWide; d++) v[i * kWide + d] = 0.0f;
        }
        const bool partly = start + kKeys > a.length[b] || a.window > 0;
        if (partly) {
            // columns of the block: the prefix up to `prefix`, then nodes up to `count`, then nothing
            const int prefix = int(std::clamp<int64_t>(a.length[b] - start, 0, count));
            const int64_t node = start + prefix - a.length[b];
            for (int64_t n = first; n < last; n++) {
                float* row = bias + (n - first) * kKeys;
                for (int i = 0; i < prefix; i++) row[i] = 0.0f;
                for (int i = prefix; i < count; i++) row[i] = a.sees(b, n, node + i - prefix) ? 0.0f : -INFINITY;
                for (int i = count; i < kKeys; i++) row[i] = -INFINITY;
                if (a.window == 0) continue;
                const int64_t* at = a.position + b * a.nodes;
                for (int i = 0; i < count; i++)
                    if (at[n] - (i < prefix ? start + i : at[node + i - prefix]) >= a.window) row[i] = -INFINITY;
            }
            for (int i = 0; i < kKeys; i++) bias[nodes * kKeys + i] = 0.0f;
        }
        for (int64_t r = 0; r < padded; r += kRows) {
            const float* of[kRows];
            for (int i = 0; i < kRows; i++) of[i] = bias + (r + i < rows ? (r + i) / groups : nodes) * kKeys;
            block<kRows, Parts>(q + r * kWide, a.width, kt, v, count, partly ? of : nullptr, top + r, mass + r,
                                out + r * kWide);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        T* to = a.out + ((b * a.nodes + first + r / groups) * a.heads + head * groups + r % groups) * a.width;
        const float one = 1.0f / mass[r];
        for (int64_t d = 0; d < a.width; d++) from_float(out[r * kWide + d] * one, &to[d]);
    }
}

}  // namespace drafttrain
