// Distributions on the device: one block computes the share of each split; one block samples from a row and scans one split.
#pragma once

#include <climits>

#include "device.cuh"
#include "distribution.h"
#include "top.h"

namespace drafttrain {

constexpr int kShareThreads = 256;
constexpr int kShareEach = kSplit / kShareThreads;  // values a thread
constexpr int kDrawThreads = 512;                   // of 1024 each would have too few registers for the walk
constexpr int kDrawEach = kSplit / kDrawThreads;

// Count consecutive elements, in loads of 16 bytes where alignment allows.
template <typename T, int count>
struct alignas(count * sizeof(T) < 16 ? count * sizeof(T) : 16) Piece {
    T at[count];
};

template <typename T, bool packed>
constexpr int kPiece = packed ? Pack<T>::kCount : 1;

// This thread's values of a split, minus infinity after the row's end. All loads are issued before the first is used.
// index(j): the index of value j in the row.
template <typename T, bool packed>
struct SplitValues {
    static constexpr int kWide = kPiece<T, packed>;
    int64_t start;
    float x[kShareEach];

    __device__ SplitValues(const T* row, int64_t split, int64_t vocab) : start(split * kSplit) {
        Piece<T, kWide> piece[kShareEach / kWide];
#pragma unroll
        for (int j = 0; j < kShareEach / kWide; j++)
            if (index(j * kWide) < vocab) piece[j] = *reinterpret_cast<const Piece<T, kWide>*>(row + index(j * kWide));
#pragma unroll
        for (int j = 0; j < kShareEach; j++) x[j] = index(j) < vocab ? to_float(piece[j / kWide].at[j % kWide]) : -INFINITY;
    }

    __device__ int64_t index(int j) const { return start + (j / kWide * kShareThreads + threadIdx.x) * kWide + j % kWide; }
};

// Whether a row of logits belongs to a padding node. count may be null: then there is no padding.
__device__ inline bool is_padding(const int64_t* count, int64_t nodes, int64_t row) {
    return count != nullptr && row % nodes >= count[row / nodes];
}

// best[row, split]: top_key of the split's maximum. Grid (rows, splits).
template <typename T, bool packed>
__global__ void __launch_bounds__(kShareThreads)
    argmax_shares(const T* logits, const int64_t* count, int64_t nodes, int64_t vocab, uint64_t* best) {
    __shared__ uint64_t room[kWarp];
    const int64_t row = blockIdx.x, split = blockIdx.y;
    if (is_padding(count, nodes, row)) return;
    const SplitValues<T, packed> values(logits + row * vocab, split, vocab);
    uint64_t mine = 0;
#pragma unroll
    for (int j = 0; j < kShareEach; j++) {
        const uint64_t key = values.index(j) < vocab ? top_key(values.x[j], uint32_t(values.index(j))) : 0;
        mine = key > mine ? key : mine;
    }
    const uint64_t found = block_reduce(mine, [](uint64_t a, uint64_t b) { return a > b ? a : b; }, room);
    if (threadIdx.x == 0) best[row * gridDim.y + split] = found;
}

// The index of a row's maximum, by a warp; every lane gets it.
__device__ inline int64_t warp_argmax(const uint64_t* best, int splits) {
    uint64_t mine = 0;
    for (int s = threadIdx.x % kWarp; s < splits; s += kWarp) mine = best[s] > mine ? best[s] : mine;
    return index_of(warp_reduce(mine, [](uint64_t a, uint64_t b) { return a > b ? a : b; }));
}

// shares[row, split] of the distributions at temperature[row / nodes]; dot only where `dots`. Grid (rows, splits).
template <typename T, bool packed, bool dots>
__global__ void __launch_bounds__(kShareThreads)
    split_shares(const T* logits, const float* temperature, const int64_t* count, int64_t nodes, int64_t vocab, Share* shares) {
    __shared__ float tops[kWarp];
    __shared__ double sums[kWarp];
    const int64_t row = blockIdx.x, split = blockIdx.y;
    if (is_padding(count, nodes, row)) return;
    const auto add = [](double a, double b) { return a + b; };
    const float inverse = inverse_of(temperature[row / nodes]);
    const SplitValues<T, packed> values(logits + row * vocab, split, vocab);
    Share share = {0.0, 0.0, -INFINITY};
#pragma unroll
    for (int j = 0; j < kShareEach; j++) share.top = fmaxf(share.top, values.x[j]);
    share.top = block_reduce(share.top, [](float a, float b) { return fmaxf(a, b); }, tops);
#pragma unroll
    for (int j = 0; j < kShareEach; j++) {
        const float e = weight(values.x[j], share.top, inverse);
        share.mass += e;
        if (dots && e > 0.0f) share.dot += e * ((values.x[j] - share.top) * inverse);
    }
    share.mass = block_reduce(share.mass, add, sums);
    if (dots) share.dot = block_reduce(share.dot, add, sums);
    if (threadIdx.x == 0) shares[row * gridDim.y + split] = share;
}

// A row's share from its splits', by a warp; every lane gets it.
__device__ inline Share warp_join(const Share* shares, int splits, float inverse) {
    const auto add = [](double a, double b) { return a + b; };
    Share row = {0.0, 0.0, -INFINITY};
    for (int s = threadIdx.x % kWarp; s < splits; s += kWarp) row.top = fmaxf(row.top, shares[s].top);
    row.top = warp_reduce(row.top, [](float a, float b) { return fmaxf(a, b); });
    for (int s = threadIdx.x % kWarp; s < splits; s += kWarp) join(shares[s], inverse, &row);
    row.mass = warp_reduce(row.mass, add), row.dot = warp_reduce(row.dot, add);
    return row;
}

// Shared memory for finding a place in a split.
struct Finder {
    alignas(16) float weight[kSplit];
    double sum[kWarp];
    int index[kWarp];
};

// The index at which the cumulative sum of finder.weight exceeds `rest`; the last with a weight where rounding leads past the
// end; -1 without any weight. All kDrawThreads threads get it; the weights must be visible to all of them.
__device__ inline int block_find(Finder& finder, double rest) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, first = threadIdx.x * kDrawEach;
    const auto weight = *reinterpret_cast<const Piece<float, kDrawEach>*>(finder.weight + first);
    double own = 0.0;
    for (int j = 0; j < kDrawEach; j++) own += weight.at[j];
    double through = own;  // inclusive sum over the warp
    for (int offset = 1; offset < kWarp; offset *= 2) {
        const double other = __shfl_up_sync(kAllLanes, through, offset);
        if (lane >= offset) through += other;
    }
    if (lane == kWarp - 1) finder.sum[warp] = through;
    __syncthreads();
    double before = through - own;
    for (int w = 0; w < warp; w++) before += finder.sum[w];
    int found = INT_MAX, last = -1;
    for (int j = 0; j < kDrawEach; j++) {
        if (!(weight.at[j] > 0.0f)) continue;
        last = first + j, before += weight.at[j];
        if (before > rest && found == INT_MAX) found = last;
    }
    found = block_reduce(found, [](int a, int b) { return a < b ? a : b; }, finder.index);
    if (found != INT_MAX) return found;
    return block_reduce(last, [](int a, int b) { return a > b ? a : b; }, finder.index);
}

// A row of logits with its distribution, from which a block samples. sums: shared, one for each split.
template <typename T>
struct BlockDistribution {
    const T* x;
    const Share* shares;
    int64_t vocab;
    float inverse;
    Share row;
    double* sums;
    Finder& finder;

    __device__ double factor(int64_t split) const { return weight(shares[split].top, row.top, inverse); }

    // Computes the splits' sums for all threads.
    __device__ void fill() const {
        __syncthreads();
        for (int64_t s = threadIdx.x; s < splits_of(vocab); s += blockDim.x) sums[s] = shares[s].mass * factor(s);
        __syncthreads();
    }

    // The token at which the cumulative sum exceeds `at`: by `sums` to find the split, by of(v, top) within it. scale(split):
    // converts from the unit of the sums to that of `of`. strike(start, end): removes tokens' weights. -1 if nothing is left.
    template <typename Of, typename Scale, typename Strike>
    __device__ int64_t find(double at, Of of, Scale scale, Strike strike) const {
        const Place place = locate(splits_of(vocab), at, [&](int64_t s) { return sums[s]; });
        if (place.split < 0) return -1;
        const int64_t start = place.split * kSplit, end = start + kSplit < vocab ? start + kSplit : vocab;
        __syncthreads();  // an earlier use of the finder is over
        for (int64_t v = start + threadIdx.x; v < start + kSplit; v += blockDim.x)
            finder.weight[v - start] = v < end ? of(v, shares[place.split].top) : 0.0f;
        __syncthreads();
        strike(start, end);
        const int found = block_find(finder, place.rest * scale(place.split));
        return found < 0 ? -1 : start + found;
    }

    // The token of the distribution at this number in [0, 1).
    __device__ int64_t draw(double number) const {
        fill();
        const auto of = [&](int64_t v, float top) { return weight(to_float(x[v]), top, inverse); };
        const int64_t token = find(number * row.mass, of, [&](int64_t s) { return 1.0 / factor(s); }, [](int64_t, int64_t) {});
        return token < 0 ? 0 : token;
    }
};

}  // namespace drafttrain
