// Top-k, top-p and min-p without sorting: one block finds the least value that a row of logits keeps.
//
// All three keep every value from a threshold on, so equal logits stay or go together. A threshold is the greatest value at
// which the sum over all values from it on (of ones for top-k, of exp((x - top) / T) for top-p) reaches a target. It is found
// by histograms of the sum, each over the bin of the one before. Every thread has its own bins: nothing is atomic, no data make
// it slow, and a row's result depends neither on the other rows nor on its place in memory.
#pragma once

#include "device.cuh"
#include "distribution.h"

namespace drafttrain {

constexpr int kShapedThreads = 768;  // bins of 1024 would not fit the shared memory of every processor
constexpr int kBins = kWarp;
constexpr int kBinsRoom = kBins * kShapedThreads * int(sizeof(float));
constexpr float kPerUnit = 2.0f;  // bins of a temperature's width in the first histogram
constexpr float kFar = 128.0f;    // temperatures below the greatest logit at which a weight is 0

// Integers in the order of the values, of as many bits. Both zeros are equal.
DRAFTTRAIN_BOTH uint32_t order_of(float x) {
    const uint32_t bits = bits_of(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

template <typename T>
DRAFTTRAIN_BOTH uint32_t order_of(T x) {
    const uint32_t bits = x.bits == 0x8000u ? 0u : x.bits;
    return bits >> 15 ? ~bits & 0xffffu : bits | 0x8000u;
}

// The value of an order.
template <typename T>
DRAFTTRAIN_BOTH float value_at(uint32_t order) {
    if constexpr (sizeof(T) == sizeof(float))
        return float_of(order >> 31 ? order & 0x7fffffffu : ~order);
    else
        return to_float(T{uint16_t(order >> 15 ? order & 0x7fffu : ~order)});
}

template <typename T>
DRAFTTRAIN_BOTH uint32_t order_of_rounded(float x) {
    T narrow;
    from_float(x, &narrow);
    return order_of(narrow);
}

// A row of logits. packed: it starts at 16 bytes. Either way a thread has the same values in the same order.
template <typename T, bool packed>
struct ShapedRow {
    static constexpr int kCount = Pack<T>::kCount, kHeld = packed ? 2 : 1;  // packs that a thread loads at once
    const T* x;
    int width;
    float unit, inverse;  // the temperature
    float top;            // the greatest value

    __device__ Pack<T> load(int at) const {
        Pack<T> pack;
        if constexpr (packed)
            pack = reinterpret_cast<const Pack<T>*>(x)[at];
        else {
#pragma unroll
            for (int j = 0; j < kCount; j++) pack.at[j] = x[at * kCount + j];
        }
        return pack;
    }

    // f(pack, its number, how many of its values belong to the row).
    template <typename F>
    __device__ void each_pack(F f) const {
        const int whole = width / kCount, rest = width % kCount;
        for (int first = threadIdx.x; first < whole; first += kHeld * kShapedThreads) {
            Pack<T> held[kHeld];
#pragma unroll
            for (int h = 0; h < kHeld; h++)
                if (first + h * kShapedThreads < whole) held[h] = load(first + h * kShapedThreads);
#pragma unroll
            for (int h = 0; h < kHeld; h++)
                if (first + h * kShapedThreads < whole) f(held[h], first + h * kShapedThreads, kCount);
        }
        if (rest == 0 || threadIdx.x != whole % kShapedThreads) return;
        Pack<T> last;
#pragma unroll
        for (int j = 0; j < kCount; j++) last.at[j] = x[whole * kCount + (j < rest ? j : 0)];
        f(last, whole, rest);
    }
    template <typename F>
    __device__ void each(F f) const {
        each_pack([&](const Pack<T>& pack, int, int count) {
#pragma unroll
            for (int j = 0; j < kCount; j++)
                if (j < count) f(pack.at[j]);
        });
    }

    // (top - x) / T; far for minus infinity and for NaN.
    __device__ float below_top(float value) const { return fminf((top - value) * inverse, kFar); }
};

// Values as orders: the threshold is one of [low, high].
struct Interval {
    uint32_t low, high;
};

// The values of one bin of the first histogram, and a few around them for its rounding.
template <typename T, bool packed>
__device__ Interval interval_of(const ShapedRow<T, packed>& row, int bin) {
    const float middle = float(bin) / kPerUnit * row.unit, slack = fabsf(row.top) * 0x1p-22f + 0.52f / kPerUnit * row.unit;
    const uint32_t least = order_of_rounded<T>(-INFINITY), most = order_of_rounded<T>(row.top);
    const uint32_t low = order_of_rounded<T>(row.top - (middle + slack));
    const uint32_t high = order_of_rounded<T>(row.top - (middle - slack));
    return {bin == kBins - 1 || low <= least ? least : low - 1, high >= most ? most : high + 1};
}

// The sum of all threads' bins, bin b for lane b of every warp. The bins are zero afterwards.
__device__ inline float sum_bins(float* bins) {
    __shared__ float sum[kBins];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    __syncthreads();
    for (int bin = warp; bin < kBins; bin += kShapedThreads / kWarp) {
        float mine = 0.0f;
        for (int t = lane; t < kShapedThreads; t += kWarp) mine += bins[bin * kShapedThreads + t];
        mine = warp_reduce(mine, [](float a, float b) { return a + b; });
        if (lane == 0) sum[bin] = mine;
    }
    __syncthreads();
    for (int bin = 0; bin < kBins; bin++) bins[bin * kShapedThreads + threadIdx.x] = 0.0f;
    return sum[lane];
}

// The sum of this lane's value and of those of the lanes before it.
__device__ inline float warp_through(float value) {
    const int lane = threadIdx.x % kWarp;
    for (int offset = 1; offset < kWarp; offset *= 2) {
        const float other = __shfl_up_sync(kAllLanes, value, offset);
        if (lane >= offset) value += other;
    }
    return value;
}

// The least value to keep of those from `least` on. counted: the amount is a number of values, else a share of their mass.
template <bool counted, typename T, bool packed>
__device__ float threshold(const ShapedRow<T, packed>& row, float* bins, float amount, float least) {
    __shared__ float room[kShapedThreads / kWarp];
    const auto weigh = [](float below) { return counted ? 1.0f : __expf(-below); };
    float* mine = bins + threadIdx.x;
    row.each([&](T v) {
        const float x = to_float(v), below = row.below_top(x);
        if (x < least) return;
        const float place = fminf(below * kPerUnit, kBins - 1) + 0x1p23f;  // rounds to a whole number, in the lowest bits
        mine[(bits_of(place) & (kBins - 1)) * kShapedThreads] += weigh(below);
    });
    float own = sum_bins(bins), through = warp_through(own);
    const float target = counted ? amount : amount * __shfl_sync(kAllLanes, through, kBins - 1);
    unsigned reached = __ballot_sync(kAllLanes, own > 0.0f && through >= target);  // the sums of empty bins may round up
    Interval at = interval_of(row, reached == 0 ? kBins - 1 : __ffs(reached) - 1);
    float mass = INFINITY;  // of the interval
    // two values or more weigh at least twice as much as the lowest
    while (at.low < at.high && !(mass < 1.9f * weigh(row.below_top(value_at<T>(at.low))))) {
        const float low = fmaxf(value_at<T>(at.low), least);
        int shift = 0;
        while ((at.high - at.low) >> shift >= kBins) shift++;
        float above = 0.0f;
        row.each([&](T v) {
            const float x = to_float(v);
            if (!(x >= low)) return;
            const float w = weigh(row.below_top(x));
            if (order_of(v) > at.high)
                above += w;
            else
                mine[((at.high - order_of(v)) >> shift) * kShapedThreads] += w;
        });
        above = block_reduce(above, [](float a, float b) { return a + b; }, room);
        own = sum_bins(bins), through = above + warp_through(own);
        if (above >= target) return value_at<T>(at.high + 1);  // only by rounding, as the next line
        reached = __ballot_sync(kAllLanes, own > 0.0f && through >= target);
        if (reached == 0) return low;
        const int bin = __ffs(reached) - 1;
        mass = __shfl_sync(kAllLanes, own, bin);
        at.high -= uint32_t(bin) << shift;
        const uint32_t others = (1u << shift) - 1;
        if (at.high - at.low > others) at.low = at.high - others;
    }
    return fmaxf(value_at<T>(at.low), least);
}

// out: the logits, with minus infinity for those that top-k (0: off), top-p (1: off) or min-p drop. reach: how many
// temperatures below the greatest logit min-p keeps. `nodes` rows after one another have one temperature. A block per row. A
// row whose greatest value is infinite stays as it is, and so does NaN.
template <typename T, bool packed>
__global__ void __launch_bounds__(kShapedThreads, 1)
    shape_rows(const T* logits, const float* temperature, int64_t nodes, int width, int k, float p, float reach, T* out) {
    enter_kernel();
    __shared__ float room[kShapedThreads / kWarp];
    float* bins = dynamic_shared<float>();
    const int64_t start = int64_t(blockIdx.x) * width;
    const float inverse = inverse_of(temperature[blockIdx.x / nodes]);
    ShapedRow<T, packed> row = {logits + start, width, 1.0f / inverse, inverse, -INFINITY};
    for (int bin = 0; bin < kBins; bin++) bins[bin * kShapedThreads + threadIdx.x] = 0.0f;
    float top = -INFINITY, least = -INFINITY;
    row.each([&](T v) { top = fmaxf(top, to_float(v)); });
    row.top = block_reduce(top, [](float a, float b) { return fmaxf(a, b); }, room);
    if (fabsf(row.top) < INFINITY) {
        if (k > 0) least = threshold<true>(row, bins, float(k), least);
        if (p < 1.0f) least = threshold<false>(row, bins, p, least);
        least = fmaxf(least, row.top - reach * row.unit);
    }
    T* to = out + start;
    row.each_pack([&](Pack<T>& pack, int at, int count) {
#pragma unroll
        for (int j = 0; j < Pack<T>::kCount; j++)
            if (to_float(pack.at[j]) < least) from_float(-INFINITY, &pack.at[j]);
        if (packed && count == Pack<T>::kCount) {
            reinterpret_cast<Pack<T>*>(to)[at] = pack;
            return;
        }
#pragma unroll  // constant indices keep the pack in registers
        for (int j = 0; j < Pack<T>::kCount; j++)
            if (j < count) to[at * Pack<T>::kCount + j] = pack.at[j];
    });
}

}  // namespace drafttrain
