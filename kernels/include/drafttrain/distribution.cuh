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

// The values of a split that thread `thread` of kShareThreads takes, minus infinity after the row's end. All loads are issued
// before the first is used. index(j): the index of value j in the row.
template <typename T, bool packed>
struct SplitValues {
    static constexpr int kWide = kPiece<T, packed>;
    int64_t start;  // of this thread
    float x[kShareEach];

    __device__ SplitValues(const T* row, int64_t split, int64_t vocab, int thread) : start(split * kSplit + thread * kWide) {
        const T* mine = row + start;
        const int64_t end = (split + 1) * kSplit < vocab ? (split + 1) * kSplit : vocab;
        const int left = int(end - start);
        Piece<T, kWide> piece[kShareEach / kWide];
#pragma unroll
        for (int j = 0; j < kShareEach / kWide; j++) {
            for (int i = 0; i < kWide; i++) from_float(-INFINITY, &piece[j].at[i]);
            if (apart(j * kWide) < left) piece[j] = *reinterpret_cast<const Piece<T, kWide>*>(mine + apart(j * kWide));
        }
#pragma unroll
        for (int j = 0; j < kShareEach; j++) x[j] = to_float(piece[j / kWide].at[j % kWide]);
    }

    // From this thread's first value to value j.
    __device__ static constexpr int apart(int j) { return j / kWide * kShareThreads * kWide + j % kWide; }
    __device__ int64_t index(int j) const { return start + apart(j); }
};

// The row of the batch of a row of logits. A division of 64 bits would cost as much as the work on several values.
__device__ inline int64_t batch_of(int64_t row, int64_t nodes) { return uint32_t(row) / uint32_t(nodes); }

// Whether a row of logits belongs to a padding node. count may be null: then there is no padding.
__device__ inline bool is_padding(const int64_t* count, int64_t nodes, int64_t row) {
    return count != nullptr && row - batch_of(row, nodes) * nodes >= count[batch_of(row, nodes)];
}

// best[row, split]: top_key of the split's maximum. Grid (rows, splits).
template <typename T, bool packed>
__global__ void __launch_bounds__(kShareThreads)
    argmax_shares(const T* logits, const int64_t* count, int64_t nodes, int64_t vocab, uint64_t* best) {
    enter_kernel();
    __shared__ uint64_t room[kWarp];
    const int64_t row = blockIdx.x, split = blockIdx.y;
    if (is_padding(count, nodes, row)) return;
    const SplitValues<T, packed> values(logits + row * vocab, split, vocab, int(threadIdx.x));
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

// The sum of up to sixteen values in [0, 1] in floats, yet as precise as in doubles, whose conversions cost more than the
// exponentials. `high` adds multiples of 2^-19 without rounding, `low` what is left of each value, at most 2^-20.
struct ShortSum {
    float high = 0.0f, low = 0.0f;

    __device__ void add(float x) {
        const float part = (x + 24.0f) - 24.0f;  // floats from 16 to 32 are multiples of 2^-19
        high += part, low += x - part;
    }
    __device__ double value() const { return double(high) + double(low); }
};

// shares[row, split] of the distributions at temperature[row / nodes]; dot only where `dots`. Grid (rows, splits).
template <typename T, bool packed, bool dots>
__global__ void __launch_bounds__(kShareThreads)
    split_shares(const T* logits, const float* temperature, const int64_t* count, int64_t nodes, int64_t vocab, Share* shares) {
    enter_kernel();
    static_assert(kShareEach <= 16, "a short sum for each thread");
    constexpr int kWarps = kShareThreads / kWarp;
    __shared__ float top_of[kWarps];  // of warps; no array is used twice, so each needs one barrier
    __shared__ double mass_of[kWarps], dot_of[kWarps];
    const bool first = threadIdx.x % kWarp == 0;
    const int warp = threadIdx.x / kWarp;
    const int64_t row = blockIdx.x, split = blockIdx.y;
    if (is_padding(count, nodes, row)) return;
    const auto add = [](double a, double b) { return a + b; };
    const float inverse = inverse_of(temperature[batch_of(row, nodes)]);
    const SplitValues<T, packed> values(logits + row * vocab, split, vocab, int(threadIdx.x));
    Share share = {0.0, 0.0, -INFINITY};
#pragma unroll
    for (int j = 0; j < kShareEach; j++) share.top = fmaxf(share.top, values.x[j]);
    share.top = warp_reduce(share.top, [](float a, float b) { return fmaxf(a, b); });
    if (first) top_of[warp] = share.top;
    __syncthreads();
    for (int w = 0; w < kWarps; w++) share.top = fmaxf(share.top, top_of[w]);
    ShortSum mass;
    float dot = 0.0f;
#pragma unroll
    for (int j = 0; j < kShareEach; j++) {
        const float e = weight(values.x[j], share.top, inverse);
        mass.add(e);
        if (dots && e > 0.0f) dot += e * ((values.x[j] - share.top) * inverse);
    }
    const double own = warp_reduce(mass.value(), add), own_dot = dots ? warp_reduce(double(dot), add) : 0.0;
    if (first) mass_of[warp] = own, dot_of[warp] = own_dot;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int w = 0; w < kWarps; w++) share.mass += mass_of[w], share.dot += dot_of[w];
    shares[row * gridDim.y + split] = share;
}

// What split_shares computes for one split of a row, to the last bit, by a warp: its lanes take the places of each of that
// kernel's warps in turn. The values are read twice, from memory and then from L1, as all of them would not fit registers. Rows
// are whole pieces.
template <typename T>
__device__ inline Share warp_share(const T* row, int64_t split, int64_t vocab, float inverse) {
    constexpr int kAhead = 8, kWide = kPiece<T, true>;
    const int lane = threadIdx.x % kWarp;
    const int64_t start = split * kSplit + lane * kWide, end = (split + 1) * kSplit < vocab ? (split + 1) * kSplit : vocab;
    Share share = {0.0, 0.0, -INFINITY};
#pragma unroll 1
    for (int64_t v = start; v < end; v += kAhead * kWarp * kWide) {
        Piece<T, kWide> piece[kAhead];  // all loads are issued before the first is used
#pragma unroll
        for (int j = 0; j < kAhead; j++) {
            const int64_t at = v + j * kWarp * kWide;
            piece[j] = *reinterpret_cast<const Piece<T, kWide>*>(row + (at < end ? at : v));
        }
#pragma unroll
        for (int j = 0; j < kAhead * kWide; j++) share.top = fmaxf(share.top, to_float(piece[j / kWide].at[j % kWide]));
    }
    share.top = warp_reduce(share.top, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll 1
    for (int thread = lane; thread < kShareThreads; thread += kWarp) {
        const SplitValues<T, true> values(row, split, vocab, thread);
        ShortSum mass;
#pragma unroll
        for (int j = 0; j < kShareEach; j++) mass.add(weight(values.x[j], share.top, inverse));
        share.mass += warp_reduce(mass.value(), [](double a, double b) { return a + b; });
    }
    return share;
}

// The shares of several rows from their splits', by a warp; every lane gets them. of(r): the splits' shares of row r; null: no
// such row. The rows' loads and exchanges alternate, so that they wait together.
template <int rows, bool dots, typename Of>
__device__ inline void warp_join(Of of, int splits, float inverse, Share (&row)[rows]) {
#pragma unroll
    for (int r = 0; r < rows; r++) row[r] = {0.0, 0.0, -INFINITY};
    for (int s = threadIdx.x % kWarp; s < splits; s += kWarp)
#pragma unroll
        for (int r = 0; r < rows; r++)
            if (of(r) != nullptr) row[r].top = fmaxf(row[r].top, of(r)[s].top);
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
#pragma unroll
        for (int r = 0; r < rows; r++) row[r].top = fmaxf(row[r].top, __shfl_xor_sync(kAllLanes, row[r].top, offset));
    for (int s = threadIdx.x % kWarp; s < splits; s += kWarp)
#pragma unroll
        for (int r = 0; r < rows; r++)
            if (of(r) != nullptr) join(of(r)[s], inverse, &row[r]);
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
#pragma unroll
        for (int r = 0; r < rows; r++) {
            row[r].mass += __shfl_xor_sync(kAllLanes, row[r].mass, offset);
            if (dots) row[r].dot += __shfl_xor_sync(kAllLanes, row[r].dot, offset);
        }
}

// `locate` by a warp; every lane gets the place.
__device__ inline Place warp_locate(int64_t splits, double number, const double* sums) {
    const int lane = threadIdx.x % kWarp;
    Place found = {-1, 0.0};
    double before = 0.0;
    for (int64_t start = 0; start < splits && before <= number; start += kWarp) {
        const double here = start + lane < splits && sums[start + lane] > 0.0 ? sums[start + lane] : 0.0;
        double through = here;  // inclusive sum over the warp
        for (int offset = 1; offset < kWarp; offset *= 2) {
            const double other = __shfl_up_sync(kAllLanes, through, offset);
            if (lane >= offset) through += other;
        }
        const double begin = before + (through - here);
        const unsigned passed = __ballot_sync(kAllLanes, here > 0.0 && begin <= number);
        const int last = passed == 0 ? 0 : kWarp - 1 - __clz(int(passed));
        const double rest = number - __shfl_sync(kAllLanes, begin, last);
        if (passed != 0) found = {start + last, rest};
        before += __shfl_sync(kAllLanes, through, kWarp - 1);
    }
    return found;
}

// Shared memory for finding a place in a split.
struct Finder {
    alignas(16) float weight[kSplit];
    double sum[kDrawThreads / kWarp];
    int first, last;

    // Before a barrier that comes before `block_find`.
    __device__ void clear() {
        if (threadIdx.x == 0) first = INT_MAX, last = -1;
    }
};

// The index at which the cumulative sum of finder.weight exceeds `rest`; the last with a weight where rounding leads past the
// end; -1 without any weight. All kDrawThreads threads get it; the cleared finder and the weights must be visible to all.
__device__ inline int block_find(Finder& finder, double rest) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, start = threadIdx.x * kDrawEach;
    const auto weight = *reinterpret_cast<const Piece<float, kDrawEach>*>(finder.weight + start);
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
    for (int w = 0; w < kDrawThreads / kWarp; w++) before += w < warp ? finder.sum[w] : 0.0;
    int found = INT_MAX, last = -1;
    for (int j = 0; j < kDrawEach; j++) {
        if (!(weight.at[j] > 0.0f)) continue;
        last = start + j, before += weight.at[j];
        if (before > rest && found == INT_MAX) found = last;
    }
    const unsigned passed = __ballot_sync(kAllLanes, found != INT_MAX), some = __ballot_sync(kAllLanes, last >= 0);
    if (passed != 0 && lane == __ffs(int(passed)) - 1) atomicMin(&finder.first, found);
    if (some != 0 && lane == kWarp - 1 - __clz(int(some))) atomicMax(&finder.last, last);
    __syncthreads();
    return finder.first != INT_MAX ? finder.first : finder.last;
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

    // The token at which the cumulative sum exceeds `at`: by `sums` to find the split, by of(load(v), top) within it.
    // scale(split): converts from the unit of the sums to that of `of`. strike(start, end): removes tokens' weights. -1 if
    // nothing is left.
    template <typename Load, typename Of, typename Scale, typename Strike>
    __device__ int64_t find(double at, Load load, Of of, Scale scale, Strike strike) const {
        const Place place = warp_locate(splits_of(vocab), at, sums);
        if (place.split < 0) return -1;
        const int64_t start = place.split * kSplit, end = start + kSplit < vocab ? start + kSplit : vocab;
        const auto token = [&](int j) { return start + j * kDrawThreads + threadIdx.x; };
        const float top = shares[place.split].top;
        decltype(load(start)) own[kDrawEach];  // all loads are issued before the first is used
#pragma unroll
        for (int j = 0; j < kDrawEach; j++) own[j] = load(token(j) < end ? token(j) : start);
        __syncthreads();  // an earlier use of the finder is over
        finder.clear();
#pragma unroll
        for (int j = 0; j < kDrawEach; j++) finder.weight[token(j) - start] = token(j) < end ? of(own[j], top) : 0.0f;
        __syncthreads();
        strike(start, end);
        const int found = block_find(finder, place.rest * scale(place.split));
        return found < 0 ? -1 : start + found;
    }

    // The token of the distribution at this number in [0, 1).
    __device__ int64_t draw(double number) const {
        fill();
        const auto load = [&](int64_t v) { return x[v]; };
        const auto of = [&](T logit, float top) { return weight(to_float(logit), top, inverse); };
        const auto scale = [&](int64_t s) { return 1.0 / factor(s); };
        const int64_t token = find(number * row.mass, load, of, scale, [](int64_t, int64_t) {});
        return token < 0 ? 0 : token;
    }
};

}  // namespace drafttrain
