// The k greatest values of long rows: first of slices, then of the slices' winners.
#pragma once

#include "select.cuh"

namespace drafttrain {

// Packs [first, last) of a row that need not start at 16 bytes: pack p begins `lead` elements before element p * kCount.
template <typename T>
struct Slice {
    static constexpr int kCount = Pack<T>::kCount, kHeld = 16 / kCount;

    const T* row;
    int width, lead, first, last;

    __device__ bool whole(int p) const { return p < last && p * kCount >= lead && (p + 1) * kCount - lead <= width; }
    __device__ Pack<T> load(int p) const { return *reinterpret_cast<const Pack<T>*>(row + (p * kCount - lead)); }

    // NaN outside the row.
    __device__ Pack<T> load_some(int p) const {
        const int start = p * kCount - lead;
        Pack<T> pack;
        for (int j = 0; j < kCount; j++) {
            const bool inside = p < last && start + j >= 0 && start + j < width;
            if (inside) pack.at[j] = row[start + j];
            if (!inside) from_float(NAN, &pack.at[j]);
        }
        return pack;
    }
    template <typename F>
    __device__ void each(F f) const {
        for (int p = first + int(threadIdx.x); p < last; p += blockDim.x) {
            const Pack<T> pack = whole(p) ? load(p) : load_some(p);
            for (int j = 0, i = p * kCount - lead; j < kCount; j++, i++)
                if (i >= 0 && i < width) f(top_key(to_float(pack.at[j]), uint32_t(i)));
        }
    }
    __device__ uint64_t greatest() const {
        float best = -INFINITY;
        int at = -1;
        const int apart = int(blockDim.x);
        for (int p = first + int(threadIdx.x); p < last; p += kHeld * apart) {
            Pack<T> held[kHeld];
            if (whole(p) && whole(p + (kHeld - 1) * apart))  // no branch between the loads, so that all are in flight at once
                for (int h = 0; h < kHeld; h++) held[h] = load(p + h * apart);
            else
                for (int h = 0; h < kHeld; h++) held[h] = load_some(p + h * apart);
            for (int h = 0; h < kHeld; h++)
                for (int j = 0; j < kCount; j++)
                    if (to_float(held[h].at[j]) > best)
                        best = to_float(held[h].at[j]), at = (p + h * apart) * kCount - lead + j;
        }
        if (at >= 0) return top_key(best, uint32_t(at));
        uint64_t top = 0;  // only NaN and minus infinity, or no values
        each([&](uint64_t key) { top = key > top ? key : top; });
        return top;
    }
};

// part [rows, slices, k]: the greatest keys of each slice of `packs` packs. Block x: row, y: slice.
template <typename T>
__global__ void __launch_bounds__(kSelectThreads) top_of_slices(const T* logits, int width, int packs, int k, uint64_t* part) {
    const T* row = logits + int64_t(blockIdx.x) * width;
    const int lead = int(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T)), first = int(blockIdx.y) * packs;
    const int whole = (lead + width + Pack<T>::kCount - 1) / Pack<T>::kCount,
              last = first + packs < whole ? first + packs : whole;
    uint64_t* out = part + (int64_t(blockIdx.x) * gridDim.y + blockIdx.y) * k;
    const auto write = [&](int rank, uint64_t key) { out[rank] = key; };
    select(Slice<T>{row, width, lead, first, last}, k, dynamic_shared<uint64_t>(), write);
}

// The k greatest of a row's `count` keys. ids renames their indices; null: they stay.
__global__ void __launch_bounds__(kSelectThreads)
    top_of_parts(const uint64_t* part, int count, int k, const int64_t* ids, float* value, int64_t* index) {
    const uint64_t* keys = part + int64_t(blockIdx.x) * count;
    const int64_t row = int64_t(blockIdx.x) * k;
    const auto key = [=](int i) { return keys[i]; };
    const auto write = [=](int rank, uint64_t key) {
        value[row + rank] = value_of(key);
        index[row + rank] = ids == nullptr ? index_of(key) : ids[index_of(key)];
    };
    select(Dealt<decltype(key)>{count, key}, k, dynamic_shared<uint64_t>(), write);
}

}  // namespace drafttrain
