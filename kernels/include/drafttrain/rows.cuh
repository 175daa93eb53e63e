// Operations on rows of a residual stream: RMS norm with the addition before it, gated activation. A block per row.
#pragma once

#include "device.cuh"

namespace drafttrain {

constexpr int kRowThreads = 256;

// summed = x + delta, out = norm(summed) * weight, rounded as transformers rounds: the normed row to T before the weight.
// delta may be null: then summed is x and is not written. Packs of 16 bytes where `packed`, else element by element.
template <typename T, bool packed>
__global__ void rms_norm_rows(const T* x, const T* delta, const T* weight, int width, float eps, T* summed, T* out) {
    __shared__ float room[kWarp];
    constexpr int kStep = packed ? Pack<T>::kCount : 1;
    struct alignas(kStep * sizeof(T)) Piece {
        T at[kStep];
    };
    const int64_t row = int64_t(blockIdx.x) * width;
    float squares = 0.0f;
    for (int i = threadIdx.x * kStep; i < width; i += blockDim.x * kStep) {
        Piece piece = *reinterpret_cast<const Piece*>(x + row + i), more;
        if (delta != nullptr) {
            more = *reinterpret_cast<const Piece*>(delta + row + i);
            for (int j = 0; j < kStep; j++) from_float(to_float(piece.at[j]) + to_float(more.at[j]), &piece.at[j]);
            *reinterpret_cast<Piece*>(summed + row + i) = piece;
        }
        for (int j = 0; j < kStep; j++) squares += to_float(piece.at[j]) * to_float(piece.at[j]);
    }
    const float total = block_reduce(squares, [](float a, float b) { return a + b; }, room);
    const float scale = rsqrtf(total / float(width) + eps);
    const T* from = delta != nullptr ? summed : x;  // each thread reads back what it wrote itself
    for (int i = threadIdx.x * kStep; i < width; i += blockDim.x * kStep) {
        Piece piece = *reinterpret_cast<const Piece*>(from + row + i), by = *reinterpret_cast<const Piece*>(weight + i);
        for (int j = 0; j < kStep; j++)
            from_float(rounded<T>(to_float(piece.at[j]) * scale) * to_float(by.at[j]), &piece.at[j]);
        *reinterpret_cast<Piece*>(out + row + i) = piece;
    }
}

}  // namespace drafttrain
