// Attention of a few new positions over a paged KV cache on a CPU: q/k norm, rotary embedding, KV append and
// attention under the tree's ancestor mask, for one KV head of one sequence at a time.
//
// A page holds `page` positions, each [kv_heads, D]. Position p of a sequence is in page table[p / page]. Node i of the
// tree is written at position length + i, at any depth. It sees the `length` positions before the tree and its ancestors
// (itself included), within `window` rotary positions if a window is given. A tree may come in several calls: then the first
// `earlier` nodes are in the cache already, and the new nodes follow them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "simd.h"

namespace drafttrain {

constexpr int kKeys = 64;       // positions whose keys are transposed at a time
constexpr int64_t kSpan = 512;  // positions whose scores are held at a time

template <typename T>
struct Attend {
    int64_t nodes, heads, kv_heads, width;  // N, query heads, KV heads, D (even, at most 256)
    int64_t page, pages;                    // positions of a page, entries of a row of `table`
    int64_t window;                         // 0: none; earlier nodes are within it
    int64_t earlier;                        // nodes of the tree that are in the cache already
    int64_t words;                          // int64 numbers per node in `bits`
    float scale, eps;
    const T *qkv, *cos, *sin;      // [B, N, heads + 2 kv_heads, D]; [positions, D], sines signed for the half they meet
    const T *q_weight, *k_weight;  // [D] or null
    const int64_t *position, *table, *length;  // [B, N], [B, pages], [B]
    const bool* ancestor;                      // [B, N, earlier + N]; null: `bits`, or causal
    const int64_t* bits;                       // [B, N, words]: bit i is for node i of the whole tree; null: causal
    T *keys, *values;                          // [all pages, page, kv_heads, D]
    T* out;                                    // [B, N, heads, D]

    T* at(T* pool, int64_t b, int64_t p, int64_t head) const {
        return pool + ((table[b * pages + p / page] * page + p % page) * kv_heads + head) * width;
    }
    // Whether new node n sees node i of the whole tree.
    bool sees(int64_t b, int64_t n, int64_t i) const {
        if (ancestor) return ancestor[(b * nodes + n) * (earlier + nodes) + i];
        return bits ? bits[(b * nodes + n) * words + i / 64] >> (i % 64) & 1 : i <= earlier + n;
    }
};

// Norms one head's vector and rotates it to its position; rounds to T where transformers does.
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

// Writes the new positions' keys and values of one KV head.
template <typename T>
void append(const Attend<T>& a, int64_t b, int64_t head) {
    const int64_t row = (a.heads + 2 * a.kv_heads) * a.width;
    float turned[256];
    for (int64_t n = 0; n < a.nodes; n++) {
        const T* x = a.qkv + (b * a.nodes + n) * row + (a.heads + head) * a.width;
        const int64_t p = a.length[b] + a.earlier + n;
        T *key = a.at(a.keys, b, p, head), *value = a.at(a.values, b, p, head);
        turn(a, x, a.k_weight, a.position[b * a.nodes + n], turned);
        for (int64_t d = 0; d < a.width; d++) from_float(turned[d], &key[d]);
        for (int64_t d = 0; d < a.width; d++) value[d] = x[a.kv_heads * a.width + d];
    }
}

// Columns of `rows` rows that are summed at a time, in registers: a divisor of `width`, as both are powers of two.
constexpr int columns(int rows, int width) { return std::min(width, std::max(1, kSums / rows) * kRegister); }

// Scores of `Rows` queries with a block of keys; `kt` is the block transposed, [D, kKeys]. Rows of s are `span` apart.
template <int Rows>
inline void score(const float* q, int64_t stride, int64_t width, const float* kt, float* s, int64_t span) {
    constexpr int kColumns = columns(Rows, kKeys), kParts = kColumns / kRegister;
    for (int first = 0; first < kKeys; first += kColumns) {
        Register acc[Rows][kParts] = {};
        for (int64_t d = 0; d < width; d++) {
            Register k[kParts];
            for (int j = 0; j < kParts; j++) {
                k[j] = load_register(kt + d * kKeys + first + j * kRegister);
                pin(k[j]);
            }
            for (int r = 0; r < Rows; r++) {
                const float x = q[r * stride + d];
                for (int j = 0; j < kParts; j++) acc[r][j] += x * k[j];
            }
        }
        for (int r = 0; r < Rows; r++)
            for (int j = 0; j < kParts; j++) store_register(s + r * span + first + j * kRegister, acc[r][j]);
    }
}

// Online softmax (Milakov & Gimelshein 2018) of one row's next `count` scores, in place; returns the factor for earlier sums.
inline float soften(float* s, int64_t count, float* top, float* mass) {
    constexpr int kParts = kLanes / kRegister;
    Register best[kParts], part[kParts] = {};
    for (int j = 0; j < kParts; j++) best[j] = *top - Register{};
    for (int64_t i = 0; i < count; i += kLanes)
        for (int j = 0; j < kParts; j++) best[j] = max(best[j], load_register(s + i + j * kRegister));
    Floats lanes, total;
    std::memcpy(&lanes, best, sizeof(lanes));
    const float now = greatest(lanes), keep = std::exp(*top - now);
    for (int64_t i = 0; i < count; i += kLanes)
        for (int j = 0; j < kParts; j++) {
            const Register e = exp(load_register(s + i + j * kRegister) - now);
            store_register(s + i + j * kRegister, e);
            part[j] += e;
        }
    std::memcpy(&total, part, sizeof(total));
    *mass = *mass * keep + sum(total);
    *top = now;
    return keep;
}

// out = out * keep + p v for `Rows` rows; values[i] is key i's value, Parts * kLanes floats.
template <int Rows, int Parts>
inline void mix(const float* p, int64_t span, const float* keep, int64_t count, const float* const* values, float* out) {
    constexpr int kWide = Parts * kLanes, kColumns = columns(Rows, kWide), kParts = kColumns / kRegister;
    for (int first = 0; first < kWide; first += kColumns) {
        Register acc[Rows][kParts];
        for (int r = 0; r < Rows; r++)
            for (int j = 0; j < kParts; j++) acc[r][j] = load_register(out + r * kWide + first + j * kRegister) * keep[r];
        for (int64_t i = 0; i < count; i++) {
            Register x[kParts];
            for (int j = 0; j < kParts; j++) {
                x[j] = load_register(values[i] + first + j * kRegister);
                pin(x[j]);
            }
            for (int r = 0; r < Rows; r++)
                for (int j = 0; j < kParts; j++) acc[r][j] += p[r * span + i] * x[j];
        }
        for (int r = 0; r < Rows; r++)
            for (int j = 0; j < kParts; j++) store_register(out + r * kWide + first + j * kRegister, acc[r][j]);
    }
}

// The mask of node n for `count` positions from `start`: 0 or minus infinity, padded to whole blocks.
template <typename T>
void hide(const Attend<T>& a, int64_t b, int64_t n, int64_t start, int64_t count, int64_t padded, float* bias) {
    const int64_t prefix = std::clamp<int64_t>(a.length[b] - start, 0, count), node = start + prefix - a.length[b];
    for (int64_t i = 0; i < prefix; i++) bias[i] = 0.0f;
    for (int64_t i = prefix; i < count; i++) bias[i] = a.sees(b, n, node + i - prefix) ? 0.0f : -INFINITY;
    for (int64_t i = count; i < padded; i++) bias[i] = -INFINITY;
    if (a.window == 0) return;
    const int64_t *at = a.position + b * a.nodes, known = std::clamp<int64_t>(a.length[b] + a.earlier - start, 0, count);
    for (int64_t i = 0; i < count; i++) {
        const int64_t back = at[n] - (i < known ? start + i : at[start + i - a.length[b] - a.earlier]);
        if (back >= a.window) bias[i] = -INFINITY;
    }
}

// Reads a part of each cache line, so that many lines are under way at once: weights have driven them out of the caches, and
// the loop that copies them waits for each. Prefetch instructions in its place gained nothing.
template <typename T>
void touch(const T* key, const T* value, int64_t width) {
    for (int64_t d = 0; d < width; d += 64 / int64_t(sizeof(T)))
        for (const T* row : {key, value}) (void)*reinterpret_cast<const volatile char*>(row + d);
}

// Attention of nodes [first, last) with all query heads of one KV head. Parts * kLanes >= D.
template <int Parts, typename T>
void attend_head(const Attend<T>& a, int64_t b, int64_t head, int64_t first, int64_t last) {
    constexpr int kRows = Parts <= 2 ? 4 : Parts <= 8 ? 2 : 1;
    constexpr int64_t kWide = Parts * kLanes;
    const int64_t nodes = last - first, groups = a.heads / a.kv_heads, rows = nodes * groups,
                  whole = a.length[b] + a.earlier + a.nodes;
    const int64_t padded = (rows + kRows - 1) / kRows * kRows,
                  span = std::min<int64_t>(kSpan, (whole + kKeys - 1) / kKeys * kKeys);
    const bool in_place = sizeof(T) == sizeof(float) && a.width == kWide;  // values are read without a copy
    // every array starts at a cache line, because a vector that crosses a line is read at half speed
    static thread_local std::vector<float> room;
    static thread_local std::vector<const float*> values;
    const int64_t sizes[] = {padded * kWide, padded * kWide, kKeys * a.width, in_place ? 0 : span * kWide, padded * span, span,
                             padded,         padded,         padded};
    constexpr int kArrays = sizeof(sizes) / sizeof(sizes[0]);
    float* part[kArrays];
    int64_t total = kLanes;
    for (int64_t size : sizes) total += (size + kLanes - 1) / kLanes * kLanes;
    if (int64_t(room.size()) < total) room.resize(size_t(total));
    if (int64_t(values.size()) < span) values.resize(size_t(span));
    float* next = room.data() + (64 - reinterpret_cast<uintptr_t>(room.data()) % 64) % 64 / sizeof(float);
    for (int i = 0; i < kArrays; i++) {
        part[i] = next;
        next += (sizes[i] + kLanes - 1) / kLanes * kLanes;
    }
    float *q = part[0], *out = part[1], *kt = part[2], *v = part[3], *s = part[4], *bias = part[5], *top = part[6],
          *mass = part[7], *keep = part[8];
    for (int64_t i = 0; i < padded * kWide; i++) q[i] = out[i] = 0.0f;
    for (int64_t r = 0; r < padded; r++) top[r] = -1e30f, mass[r] = keep[r] = 0.0f;
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
    const int64_t apart = a.kv_heads * a.width;
    for (int64_t start = from; start < whole; start += span) {
        const int64_t count = std::min(span, whole - start), filled = (count + kKeys - 1) / kKeys * kKeys;
        const int64_t used = (count + kLanes - 1) / kLanes * kLanes;  // rounded up to whole vectors
        const T *key = nullptr, *value = nullptr;
        int64_t page_ends = 0;
        for (int64_t p = start; p < start + count; p++) touch(a.at(a.keys, b, p, head), a.at(a.values, b, p, head), a.width);
        for (int64_t block = 0; block < filled; block += kKeys) {
            for (int64_t i = 0; i < kKeys; i++) {
                const int64_t p = block + i;
                if (p >= count) {
                    for (int64_t d = 0; d < a.width; d++) kt[d * kKeys + i] = 0.0f;
                    continue;
                }
                if (p == page_ends) {
                    page_ends = p + a.page - (start + p) % a.page;
                    key = a.at(a.keys, b, start + p, head);
                    value = a.at(a.values, b, start + p, head);
                }
                for (int64_t d = 0; d < a.width; d++) kt[d * kKeys + i] = to_float(key[d]);
                if (in_place) {
                    values[size_t(p)] = reinterpret_cast<const float*>(value);
                } else {
                    for (int64_t d = 0; d < a.width; d++) v[p * kWide + d] = to_float(value[d]);
                    for (int64_t d = a.width; d < kWide; d++) v[p * kWide + d] = 0.0f;
                    values[size_t(p)] = v + p * kWide;
                }
                key += apart, value += apart;
            }
            for (int64_t r = 0; r < padded; r += kRows)
                score<kRows>(q + r * kWide, kWide, a.width, kt, s + r * span + block, span);
        }
        // some nodes do not see the columns from `open` on
        const int64_t open = a.window > 0 ? 0 : std::clamp<int64_t>((a.length[b] - start) / kLanes * kLanes, 0, used);
        for (int64_t n = 0; n < nodes; n++) {
            hide(a, b, first + n, start + open, count - open, used - open, bias);
            for (int64_t r = n * groups; r < (n + 1) * groups; r++) {
                float* row = s + r * span;
                for (int64_t i = open; i < used; i += kLanes) store(row + i, load(row + i) + load(bias + i - open));
                keep[r] = soften(row, used, &top[r], &mass[r]);
            }
        }
        for (int64_t r = 0; r < padded; r += kRows)
            mix<kRows, Parts>(s + r * span, span, keep + r, count, values.data(), out + r * kWide);
    }
    for (int64_t r = 0; r < rows; r++) {
        T* to = a.out + ((b * a.nodes + first + r / groups) * a.heads + head * groups + r % groups) * a.width;
        const float one = 1.0f / mass[r];
        for (int64_t d = 0; d < a.width; d++) from_float(out[r * kWide + d] * one, &to[d]);
    }
}

}  // namespace drafttrain
