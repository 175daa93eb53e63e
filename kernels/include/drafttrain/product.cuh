// The product of one row with a weight, whose time is that of reading the weight.
#pragma once

#include "device.cuh"

namespace drafttrain {

constexpr int kProductThreads = 256;

// out = x W^T + bias: a warp for each kRows rows of W, of `packs` packs, of which a lane reads kAhead at once. bias may be null.
// The first reads of W do not wait for the kernels before this one: none of those on their way may write W.
template <typename T, int kRows, int kAhead>
__global__ void __launch_bounds__(kProductThreads)
    product_of_row(const uint4* x, const uint4* weight, const T* bias, int outputs, int packs, T* out) {
    const int lane = threadIdx.x % kWarp;
    const int64_t first = (int64_t(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp) * kRows;
    // whole, because elements of 16 bits by themselves would take twice the registers
    uint4 held[kRows][kAhead], by[kAhead];
    const auto at = [&](int start, int j) { return start + j * kWarp + lane; };
    const auto weights = [&](int start) {
        for (int r = 0; r < kRows; r++)
            for (int j = 0; j < kAhead; j++) {
                const bool real = first + r < outputs && at(start, j) < packs;
                held[r][j] = real ? __ldcs(weight + (first + r) * packs + at(start, j)) : uint4{0, 0, 0, 0};
            }
    };
    weights(0);
    enter_kernel();
    float sum[kRows] = {};
    for (int start = 0; start < packs; start += kAhead * kWarp) {
        if (start > 0) weights(start);
        for (int j = 0; j < kAhead; j++) by[j] = at(start, j) < packs ? x[at(start, j)] : uint4{0, 0, 0, 0};
        for (int j = 0; j < kAhead; j++)
            for (int r = 0; r < kRows; r++) {
                const auto &w = reinterpret_cast<const Pack<T>&>(held[r][j]), &v = reinterpret_cast<const Pack<T>&>(by[j]);
                for (int i = 0; i < Pack<T>::kCount; i++) sum[r] += to_float(w.at[i]) * to_float(v.at[i]);
            }
    }
    for (int r = 0; r < kRows; r++) {
        const float total = warp_reduce(sum[r], [](float a, float b) { return a + b; });
        const int64_t row = first + r;
        if (lane == 0 && row < outputs) from_float(bias == nullptr ? total : total + to_float(bias[row]), &out[row]);
    }
}

}  // namespace drafttrain
