// Operations on rows of a residual stream: RMS norm with the addition before it, gated activation.
#pragma once

#include "device.cuh"

namespace drafttrain {

constexpr int kRowThreads = 512;
constexpr int kMostHeld = 4;  // packs of a row that one thread keeps

__device__ inline float row_scale(float squares, int width, float eps) {
    __shared__ float room[kRowThreads / kWarp];
    const float total = block_reduce(squares, [](float a, float b) { return a + b; }, room);
    return rsqrtf(total / float(width) + eps);
}

// summed = x + delta, out = norm(summed) * weight, rounded as transformers rounds: the normed row to T before the weight.
// delta may be null: then summed is x and is not written. A block per row of `packs` packs, which stays in registers.
template <typename T, int kHeld>
__global__ void __launch_bounds__(kRowThreads) rms_norm_packed(const Pack<T>* x, const Pack<T>* delta, const Pack<T>* weight,
                                                               int packs, float eps, Pack<T>* summed, Pack<T>* out) {
    enter_kernel();
    constexpr int kCount = Pack<T>::kCount;
    const int64_t row = int64_t(blockIdx.x) * packs;
    const auto at = [](int h) { return int(threadIdx.x + h * blockDim.x); };
    Pack<T> held[kHeld], added[kHeld], by[kHeld];
    for (int h = 0; h < kHeld; h++) {
        if (at(h) >= packs) continue;
        held[h] = x[row + at(h)], by[h] = weight[at(h)];  // load the weight too before waiting for the sum
        if (delta != nullptr) added[h] = delta[row + at(h)];
    }
    float squares = 0.0f;
    for (int h = 0; h < kHeld; h++) {
        if (at(h) >= packs) continue;
        if (delta != nullptr) {
            for (int j = 0; j < kCount; j++) from_float(to_float(held[h].at[j]) + to_float(added[h].at[j]), &held[h].at[j]);
            summed[row + at(h)] = held[h];
        }
        for (int j = 0; j < kCount; j++) squares += to_float(held[h].at[j]) * to_float(held[h].at[j]);
    }
    const float scale = row_scale(squares, packs * kCount, eps);
    for (int h = 0; h < kHeld; h++) {
        if (at(h) >= packs) continue;
        for (int j = 0; j < kCount; j++)
            from_float(rounded<T>(to_float(held[h].at[j]) * scale) * to_float(by[h].at[j]), &held[h].at[j]);
        out[row + at(h)] = held[h];
    }
}

// The same element by element, for rows of any width and alignment.
template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    rms_norm_any(const T* x, const T* delta, const T* weight, int width, float eps, T* summed, T* out) {
    enter_kernel();
    const int64_t row = int64_t(blockIdx.x) * width;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float v = to_float(x[row + i]);
        if (delta != nullptr) {
            v = rounded<T>(v + to_float(delta[row + i]));
            from_float(v, &summed[row + i]);
        }
        squares += v * v;
    }
    const float scale = row_scale(squares, width, eps);
    const T* from = delta != nullptr ? summed : x;  // each thread reads back what it wrote itself
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        from_float(rounded<T>(to_float(from[row + i]) * scale) * to_float(weight[i]), &out[row + i]);
}

constexpr int kGatedThreads = 128;
constexpr int kGatedHeld = 2;  // pieces of a thread

// With bfloat16 a correct exponential and division would take longer than the memory.
template <typename T>
__device__ float silu(float x) {
    if constexpr (sizeof(T) == sizeof(float))
        return x / (1.0f + expf(-x));
    else
        return __fdividef(x, 1.0f + __expf(-x));
}

// out = SiLU(gate) * up: row x of 2 * width, its halves in blocks y of kGatedThreads * kGatedHeld pieces of kStep elements.
template <typename T, int kStep>
__global__ void __launch_bounds__(kGatedThreads) gated_rows(const T* gate_up, int width, T* out) {
    enter_kernel();
    struct alignas(kStep * sizeof(T)) Piece {
        T at[kStep];
    };
    const T* gate = gate_up + 2 * int64_t(blockIdx.x) * width;
    T* to = out + int64_t(blockIdx.x) * width;
    Piece g[kGatedHeld], u[kGatedHeld];
    const auto start = [](int h) { return int((blockIdx.y * kGatedHeld + h) * kGatedThreads + threadIdx.x) * kStep; };
    for (int h = 0; h < kGatedHeld; h++) {
        if (start(h) >= width) continue;
        g[h] = *reinterpret_cast<const Piece*>(gate + start(h));
        u[h] = *reinterpret_cast<const Piece*>(gate + width + start(h));
    }
    for (int h = 0; h < kGatedHeld; h++) {
        if (start(h) >= width) continue;
        for (int j = 0; j < kStep; j++)
            from_float(rounded<T>(silu<T>(to_float(g[h].at[j]))) * to_float(u[h].at[j]), &g[h].at[j]);
        *reinterpret_cast<Piece*>(to + start(h)) = g[h];
    }
}

}  // namespace drafttrain
