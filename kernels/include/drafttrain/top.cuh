// The k greatest values of rows, or their log-probabilities. Long rows: first of slices, then of the slices' winners.
#pragma once

#include "select.cuh"

namespace drafttrain {

// The greatest of some values, and the sum of exp(x - top) over them.
struct LogSum {
    float top, sum;

    // The sum with one more value. NaN inside a row makes the sum NaN; outside it is nothing.
    __device__ float with(float x, bool inside) const {
        if (x != x) return inside ? NAN : sum;
        if (x == -INFINITY) return sum;
        const float e = expf(-fabsf(x - top));
        return x > top ? sum * e + 1.0f : sum + e;
    }
    // The sum as one of exp(x - other), where other >= top.
    __device__ float below(float other) const { return top == other ? sum : sum * expf(top - other); }
    // log(exp(x) / sum), at most 0; NaN without a finite greatest value.
    __device__ float log_of(float x) const {
        const float y = top > -INFINITY && top < INFINITY ? x - top - logf(sum) : x - top;
        return y > 0.0f ? 0.0f : y;
    }
};

// Joins the sums of a block's threads; every thread gets the result. room: shared, one per warp.
__device__ inline LogSum block_join(const LogSum& own, float* room) {
    const float top = block_reduce(own.top, [](float a, float b) { return fmaxf(a, b); }, room);
    return {top, block_reduce(own.below(top), [](float a, float b) { return a + b; }, room)};
}

// Packs [first, last) of a row that need not start at 16 bytes: pack p begins `lead` elements before element p * kCount.
// log: `greatest` also writes the sum of this thread's values.
template <typename T, bool log>
struct Slice {
    static constexpr int kCount = Pack<T>::kCount, kHeld = 16 / kCount;

    const T* row;
    int width, lead, first, last;
    LogSum* sum;

    // Slice `number` of `packs` packs, of a row of `width` values.
    __device__ Slice(const T* row, int width, int number, int packs, LogSum* sum)
        : row(row),
          width(width),
          lead(int(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T))),
          first(number * packs),
          last((lead + width + kCount - 1) / kCount),
          sum(sum) {
        if (first + packs < last) last = first + packs;
    }

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
        LogSum all = {-INFINITY, 0.0f};
        int at = -1;
        const int apart = int(blockDim.x);
        for (int p = first + int(threadIdx.x); p < last; p += kHeld * apart) {
            Pack<T> held[kHeld];
            if (whole(p) && whole(p + (kHeld - 1) * apart))  // no branch between the loads, so that all are in flight at once
                for (int h = 0; h < kHeld; h++) held[h] = load(p + h * apart);
            else
                for (int h = 0; h < kHeld; h++) held[h] = load_some(p + h * apart);
            for (int h = 0; h < kHeld; h++)
                for (int j = 0; j < kCount; j++) {
                    const float x = to_float(held[h].at[j]);
                    const int i = (p + h * apart) * kCount - lead + j;
                    if constexpr (log) all.sum = all.with(x, p + h * apart < last && i >= 0 && i < width);
                    if (x > all.top) all.top = x, at = i;
                }
        }
        if constexpr (log) *sum = all;
        if (at >= 0) return top_key(all.top, uint32_t(at));
        uint64_t top = 0;  // only NaN and minus infinity, or no values
        each([&](uint64_t key) { top = key > top ? key : top; });
        return top;
    }
};

// Where a row's choices go. ids renames their indices; null: they stay.
struct Choices {
    const int64_t* ids;
    float* value;
    int64_t* index;

    __device__ void put(int64_t at, uint64_t key, float x) const {
        value[at] = x;
        index[at] = ids == nullptr ? index_of(key) : ids[index_of(key)];
    }
};

// Rows of one slice each.
template <typename T, bool log>
__global__ void __launch_bounds__(kSelectThreads) top_of_rows(const T* logits, int width, int packs, int k, Choices choices) {
    enter_kernel();
    __shared__ uint64_t best[kMostTop];
    __shared__ float room[kWarp];
    LogSum sum;
    const Slice<T, log> slice(logits + int64_t(blockIdx.x) * width, width, 0, packs, &sum);
    const auto write = [&](int rank, uint64_t key) { best[rank] = key; };
    select(slice, k, dynamic_shared<uint64_t>(), write);
    __syncthreads();
    if constexpr (log) sum = block_join(sum, room);
    for (int rank = threadIdx.x; rank < k; rank += blockDim.x) {
        const float x = value_of(best[rank]);
        choices.put(int64_t(blockIdx.x) * k + rank, best[rank], log ? sum.log_of(x) : x);
    }
}

// part [rows, slices, k]: the greatest keys of each slice of `packs` packs. sums [rows, slices]. Block x: row, y: slice.
template <typename T, bool log>
__global__ void __launch_bounds__(kSelectThreads)
    top_of_slices(const T* logits, int width, int packs, int k, uint64_t* part, LogSum* sums) {
    enter_kernel();
    __shared__ float room[kWarp];
    LogSum sum;
    const Slice<T, log> slice(logits + int64_t(blockIdx.x) * width, width, int(blockIdx.y), packs, &sum);
    const int64_t place = int64_t(blockIdx.x) * gridDim.y + blockIdx.y;
    const auto write = [&](int rank, uint64_t key) { part[place * k + rank] = key; };
    select(slice, k, dynamic_shared<uint64_t>(), write);
    if constexpr (log) sum = block_join(sum, room);
    if (log && threadIdx.x == 0) sums[place] = sum;
}

// The k greatest of a row's `count` keys. sums: of its `slices`.
template <bool log>
__global__ void __launch_bounds__(kSelectThreads)
    top_of_parts(const uint64_t* part, int count, int k, const LogSum* sums, int slices, Choices choices) {
    enter_kernel();
    __shared__ float room[kWarp];
    const uint64_t* keys = part + int64_t(blockIdx.x) * count;
    LogSum row = {-INFINITY, 0.0f};
    if constexpr (log) {
        sums += int64_t(blockIdx.x) * slices;
        for (int s = threadIdx.x; s < slices; s += blockDim.x) row.top = fmaxf(row.top, sums[s].top);
        row.top = block_reduce(row.top, [](float a, float b) { return fmaxf(a, b); }, room);
        for (int s = threadIdx.x; s < slices; s += blockDim.x) row.sum += sums[s].below(row.top);
        row.sum = block_reduce(row.sum, [](float a, float b) { return a + b; }, room);
    }
    const auto key = [=](int i) { return keys[i]; };
    const auto write = [=](int rank, uint64_t key) {
        const float x = value_of(key);
        choices.put(int64_t(blockIdx.x) * k + rank, key, log ? row.log_of(x) : x);
    };
    select(Dealt<decltype(key)>{count, key}, k, dynamic_shared<uint64_t>(), write);
}

}  // namespace drafttrain
