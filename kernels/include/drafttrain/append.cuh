// The part of a layer between its projection and its attention, for each head's vector: q/k norm, rotary embedding, keys and
// values into their pages, queries into a tensor. On a CPU `turn` and `append` of attend.h do the same.
#pragma once

#include "device.cuh"

namespace drafttrain {

constexpr int kAppendThreads = 128;
constexpr int kWidestHead = 256;

template <typename T>
struct Append {
    int nodes, heads, kv_heads, width;  // N, query heads, KV heads, D (even)
    int page, pages;                    // positions of a page, entries of a row of `table`
    int earlier;                        // nodes of the tree that are in the cache already
    float eps;
    const T *qkv, *cos, *sin;      // [B, N, heads + 2 kv_heads, D]; [positions, D], sines signed for the half they meet
    const T *q_weight, *k_weight;  // [D] or null
    const int64_t *position, *table, *length;  // [B, N], [B, pages], [B]
    T *keys, *values;                          // [all pages, page, kv_heads, D]
    T* query;                                  // [B, N, heads, D]

    // The destination of a vector; null for a node for which the table has no page.
    __device__ T* destination(int node, int head) const {
        if (head < heads) return query + (int64_t(node) * heads + head) * width;
        const int row = node / nodes, at = int(length[row]) + earlier + node % nodes;
        if (at >= page * pages) return nullptr;
        const int kv_head = (head - heads) % kv_heads;
        const int64_t place = table[int64_t(row) * pages + at / page] * page + at % page;
        return (head < heads + kv_heads ? keys : values) + (place * kv_heads + kv_head) * width;
    }
};

// kStep elements of a vector's first half, with their partners in the rotation.
template <typename T, int kStep>
struct Halves {
    struct alignas(kStep * sizeof(T)) Piece {
        T at[kStep];
    } low, high;

    __device__ void load(const T* vector, int d, int half) {
        low = *reinterpret_cast<const Piece*>(vector + d);
        high = *reinterpret_cast<const Piece*>(vector + half + d);
    }
    __device__ void store(T* vector, int d, int half) const {
        *reinterpret_cast<Piece*>(vector + d) = low;
        *reinterpret_cast<Piece*>(vector + half + d) = high;
    }
    __device__ float squares() const {
        float sum = 0.0f;
        for (int j = 0; j < kStep; j++)
            sum += to_float(low.at[j]) * to_float(low.at[j]) + to_float(high.at[j]) * to_float(high.at[j]);
        return sum;
    }
    __device__ void norm(float scale, const Halves& weight) {
        for (int j = 0; j < kStep; j++) {
            from_float(rounded<T>(to_float(low.at[j]) * scale) * to_float(weight.low.at[j]), &low.at[j]);
            from_float(rounded<T>(to_float(high.at[j]) * scale) * to_float(weight.high.at[j]), &high.at[j]);
        }
    }
    __device__ void turn(const Halves& cos, const Halves& sin) {
        for (int j = 0; j < kStep; j++) {
            const float x = to_float(low.at[j]), y = to_float(high.at[j]);
            from_float(x * to_float(cos.low.at[j]) + y * to_float(sin.low.at[j]), &low.at[j]);
            from_float(y * to_float(cos.high.at[j]) + x * to_float(sin.high.at[j]), &high.at[j]);
        }
    }
};

// `lanes` threads of a warp (a power of two) share one of the `vectors` head vectors, kPieces * lanes * kStep >= D / 2.
template <typename T, int kStep, int kPieces>
__global__ void __launch_bounds__(kAppendThreads) append_vectors(Append<T> a, int lanes, int vectors) {
    enter_kernel();
    const int half = a.width / 2, all = a.heads + 2 * a.kv_heads, lane = threadIdx.x % lanes;
    const int vector = int(blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes);
    const bool real = vector < vectors;
    const int node = real ? vector / all : 0, head = real ? vector % all : 0;
    const bool turned = head < a.heads + a.kv_heads;
    const T* weight = !turned ? nullptr : head < a.heads ? a.q_weight : a.k_weight;
    const auto at = [=](int p) { return (p * lanes + lane) * kStep; };

    // loads without dependencies come first, so that the thread waits for memory twice and not four times
    Halves<T, kStep> x[kPieces], cos[kPieces], sin[kPieces], by[kPieces];
    const int64_t angle = turned ? a.position[node] * a.width : 0;
    for (int p = 0; p < kPieces; p++) {
        if (!real || at(p) >= half) continue;
        x[p].load(a.qkv + int64_t(vector) * a.width, at(p), half);
        if (weight != nullptr) by[p].load(weight, at(p), half);
    }
    T* to = real ? a.destination(node, head) : nullptr;
    float squares = 0.0f;
    for (int p = 0; p < kPieces; p++) {
        if (!real || at(p) >= half) continue;
        if (turned) cos[p].load(a.cos + angle, at(p), half), sin[p].load(a.sin + angle, at(p), half);
        squares += x[p].squares();
    }
    for (int offset = lanes / 2; offset > 0; offset /= 2) squares += __shfl_xor_sync(kAllLanes, squares, offset);
    const float scale = rsqrtf(squares / float(a.width) + a.eps);
    for (int p = 0; p < kPieces; p++) {
        if (to == nullptr || at(p) >= half) continue;
        if (weight != nullptr) x[p].norm(scale, by[p]);
        if (turned) x[p].turn(cos[p], sin[p]);
        x[p].store(to, at(p), half);
    }
}

}  // namespace drafttrain
