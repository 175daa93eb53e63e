// Top-k, top-p and min-p without sorting: the least value that each row of logits keeps.
//
// All three keep every value from a threshold on, so equal logits stay or go together. A threshold is the greatest value at
// which the sum over all values from it on (of ones for top-k, of exp((x - top) / T) for top-p) reaches a target. It is found
// by histograms of the sum, each over the bin of the one before. Blocks that share a row make the first one and gather the
// values of its bin, among which one block for each row goes on. Every thread has its own bins: nothing is atomic, no data make
// it slow, and a row's result depends neither on the other rows nor on its place in memory.
#pragma once

#include "device.cuh"
#include "distribution.h"

namespace drafttrain {

constexpr int kPart = 4096;  // values of a row that a block of kPartThreads reads
constexpr int kPartThreads = 256;
constexpr int kPartEach = kPart / kPartThreads;
constexpr int kEndThreads = 512;
constexpr int kBins = kWarp;
constexpr float kPerUnit = 2.0f;  // bins of a temperature's width in the first histogram
constexpr float kFar = 128.0f;    // temperatures below the greatest logit at which a weight is 0

constexpr int bins_room(int threads) { return kBins * threads * int(sizeof(float)); }

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

// What top-k (0: off), top-p (1: off) and min-p keep. reach: how many temperatures below the greatest logit min-p does.
struct Filter {
    int k;
    float p, reach;

    DRAFTTRAIN_BOTH bool by_mass() const { return p < 1.0f; }
    DRAFTTRAIN_BOTH bool by_sum() const { return k > 0 || by_mass(); }
};

// Values as orders: the threshold is one of [low, high].
struct Interval {
    uint32_t low, high;
};

// Where the sum reaches the target.
struct Crossing {
    Interval at;
    float target;
};

// What the kernels leave for the next one.
struct Found {
    int parts;                  // of a row
    float *top, *bins, *above;  // of each part: the greatest value, the histogram, the sum over values above those gathered
    int* gathered;              // of each part: how many
    float* least;               // of each row: the least value that stays
    Crossing* crossing;         // of each row, after the first histogram

    static int64_t room(int64_t rows, int64_t parts) {
        return rows * (parts * ((kBins + 2) * sizeof(float) + sizeof(int)) + sizeof(float) + sizeof(Crossing));
    }
    static Found in(void* room, int64_t rows, int64_t parts) {
        float* top = static_cast<float*>(room);
        float *bins = top + rows * parts, *above = bins + rows * parts * kBins, *least = above + rows * parts;
        int* gathered = reinterpret_cast<int*>(least + rows);
        return {int(parts), top, bins, above, gathered, least, reinterpret_cast<Crossing*>(gathered + rows * parts)};
    }
};

// This thread's values of a part of a row, NaN after the row's end. packed: the row starts at 16 bytes. Either way a thread has
// the same values in the same order.
template <typename T, bool packed>
struct Part {
    static constexpr int kCount = Pack<T>::kCount, kPacks = kPartEach / kCount;
    Pack<T> pack[kPacks];

    __device__ static int start(int h) { return int(blockIdx.y) * kPart + (h * kPartThreads + int(threadIdx.x)) * kCount; }

    __device__ Part(const T* row, int width) {
#pragma unroll
        for (int h = 0; h < kPacks; h++) {
            if (packed && start(h) + kCount <= width) {
                pack[h] = *reinterpret_cast<const Pack<T>*>(row + start(h));
                continue;
            }
#pragma unroll
            for (int j = 0; j < kCount; j++) {
                from_float(NAN, &pack[h].at[j]);
                if (start(h) + j < width) pack[h].at[j] = row[start(h) + j];
            }
        }
    }
    template <typename F>
    __device__ void each(F f) const {
#pragma unroll
        for (int j = 0; j < kPartEach; j++) f(pack[j / kCount].at[j % kCount]);
    }
    // The values from `least` on and NaN, minus infinity for the others.
    __device__ void store(float least, T* row, int width) {
#pragma unroll
        for (int h = 0; h < kPacks; h++) {
#pragma unroll
            for (int j = 0; j < kCount; j++)
                if (to_float(pack[h].at[j]) < least) from_float(-INFINITY, &pack[h].at[j]);
            if (packed && start(h) + kCount <= width) {
                *reinterpret_cast<Pack<T>*>(row + start(h)) = pack[h];
                continue;
            }
#pragma unroll  // constant indices keep the pack in registers
            for (int j = 0; j < kCount; j++)
                if (start(h) + j < width) row[start(h) + j] = pack[h].at[j];
        }
    }
};

// The gathered values of a row, each part's from the part's start on. A warp reads a part.
template <typename T>
struct Gathered {
    static constexpr int kHeld = 8;  // values that a lane loads at once
    const T* row;
    const int* count;
    int parts;

    template <typename F>
    __device__ void each(F f) const {
        const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
        for (int part = warp; part < parts; part += warps) {
            const T* values = row + int64_t(part) * kPart;
            for (int first = lane; first < count[part]; first += kHeld * kWarp) {
                T held[kHeld];
#pragma unroll
                for (int h = 0; h < kHeld; h++)
                    if (first + h * kWarp < count[part]) held[h] = values[first + h * kWarp];
#pragma unroll
                for (int h = 0; h < kHeld; h++)
                    if (first + h * kWarp < count[part]) f(held[h]);
            }
        }
    }
};

// A row's temperature and greatest value.
struct Scale {
    float unit, inverse, top;

    // All threads of the block must call it. tops: of the row's parts.
    __device__ Scale(float temperature, const float* tops, int parts) : inverse(inverse_of(temperature)), top(-INFINITY) {
        __shared__ float room[kWarp];
        unit = 1.0f / inverse;
        for (int part = threadIdx.x; part < parts; part += blockDim.x) top = fmaxf(top, tops[part]);
        top = block_reduce(top, [](float a, float b) { return fmaxf(a, b); }, room);
    }
    // A row whose greatest value is infinite has no probabilities.
    __device__ bool finite() const { return fabsf(top) < INFINITY; }
    // (top - x) / T; far for minus infinity and for NaN.
    __device__ float below_top(float x) const { return fminf((top - x) * inverse, kFar); }
    // What a value adds to the sum.
    __device__ float weigh(bool counted, float x) const { return counted ? 1.0f : __expf(-below_top(x)); }
};

// The values of one bin of the first histogram, and a few around them for its rounding.
template <typename T>
__device__ Interval interval_of(const Scale& scale, int bin) {
    const float middle = float(bin) / kPerUnit * scale.unit,
                slack = fabsf(scale.top) * 0x1p-22f + 0.52f / kPerUnit * scale.unit;
    const uint32_t least = order_of_rounded<T>(-INFINITY), most = order_of_rounded<T>(scale.top);
    const uint32_t low = order_of_rounded<T>(scale.top - (middle + slack));
    const uint32_t high = order_of_rounded<T>(scale.top - (middle - slack));
    return {bin == kBins - 1 || low <= least ? least : low - 1, high >= most ? most : high + 1};
}

// The sum of all threads' bins, bin b for lane b of every warp. The bins are zero afterwards.
__device__ inline float sum_bins(float* bins) {
    __shared__ float sum[kBins];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, threads = blockDim.x;
    __syncthreads();
    for (int bin = warp; bin < kBins; bin += threads / kWarp) {
        float mine = 0.0f;
        for (int t = lane; t < threads; t += kWarp) mine += bins[bin * threads + t];
        mine = warp_reduce(mine, [](float a, float b) { return a + b; });
        if (lane == 0) sum[bin] = mine;
    }
    __syncthreads();
    for (int bin = 0; bin < kBins; bin++) bins[bin * threads + threadIdx.x] = 0.0f;
    return sum[lane];
}

// The same of the histograms of a row's parts.
__device__ inline float join_bins(const float* bins, int parts) {
    __shared__ float sums[kPartThreads / kWarp][kBins];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = kPartThreads / kWarp;
    float own = 0.0f;
    for (int part = warp; part < parts; part += warps) own += bins[part * kBins + lane];
    sums[warp][lane] = own;
    __syncthreads();
    own = 0.0f;
    for (int w = 0; w < warps; w++) own += sums[w][lane];
    return own;
}

// The sum of this lane's value and of those of the lanes before it.
template <typename N>
__device__ N warp_through(N value) {
    const int lane = threadIdx.x % kWarp;
    for (int offset = 1; offset < kWarp; offset *= 2) {
        const N other = __shfl_up_sync(kAllLanes, value, offset);
        if (lane >= offset) value += other;
    }
    return value;
}

// The first histogram, of the values from `least` on, in this thread's bins.
template <typename Source>
__device__ void fill_bins(const Source& source, const Scale& scale, bool counted, float least, float* bins) {
    source.each([&](auto v) {
        const float x = to_float(v);
        if (x < least) return;
        // rounds to a whole number, in the lowest bits
        const float place = fminf(scale.below_top(x) * kPerUnit, kBins - 1) + 0x1p23f;
        bins[(bits_of(place) & (kBins - 1)) * blockDim.x + threadIdx.x] += scale.weigh(counted, x);
    });
}

// Where the first histogram has the threshold. own: its bin for each lane. amount: a number of values, or a share of their
// mass.
template <typename T>
__device__ Crossing crossing_of(const Scale& scale, bool counted, float amount, float own) {
    const float through = warp_through(own), all = __shfl_sync(kAllLanes, through, kBins - 1);
    const float target = counted ? amount : amount * all;
    const unsigned reached = __ballot_sync(kAllLanes, own > 0.0f && through >= target);  // sums of empty bins may round up
    return {interval_of<T>(scale, reached == 0 ? kBins - 1 : __ffs(reached) - 1), target};
}

// The least value to keep of those from `least` on. source: has the values of the interval. base: the sum over values above it
// that are not in the source. bins: zero.
template <typename T, typename Source>
__device__ float threshold(const Source& source, const Scale& scale, bool counted, Crossing crossing, float base, float least,
                           float* bins) {
    __shared__ float room[kWarp];
    Interval at = crossing.at;
    float mass = INFINITY;  // of the interval
    // two values or more weigh at least twice as much as the lowest
    while (at.low < at.high && !(mass < 1.9f * scale.weigh(counted, value_at<T>(at.low)))) {
        const float low = fmaxf(value_at<T>(at.low), least);
        int shift = 0;
        while ((at.high - at.low) >> shift >= kBins) shift++;
        float above = 0.0f;
        source.each([&](T v) {
            const float x = to_float(v);
            if (!(x >= low)) return;
            const float w = scale.weigh(counted, x);
            if (order_of(v) > at.high)
                above += w;
            else
                bins[((at.high - order_of(v)) >> shift) * blockDim.x + threadIdx.x] += w;
        });
        above = base + block_reduce(above, [](float a, float b) { return a + b; }, room);
        const float own = sum_bins(bins), through = above + warp_through(own);
        if (above >= crossing.target) return value_at<T>(at.high + 1);  // only by rounding, as the next line
        const unsigned reached = __ballot_sync(kAllLanes, own > 0.0f && through >= crossing.target);
        if (reached == 0) return low;
        const int bin = __ffs(reached) - 1;
        mass = __shfl_sync(kAllLanes, own, bin);
        at.high -= uint32_t(bin) << shift;
        const uint32_t others = (1u << shift) - 1;
        if (at.high - at.low > others) at.low = at.high - others;
    }
    return fmaxf(value_at<T>(at.low), least);
}

// The kernels in their order; those of parts have grid (rows, parts). `nodes` rows after one another have one temperature.
// Min-p alone needs neither the second nor the third.
template <typename T, bool packed>
__global__ void __launch_bounds__(kPartThreads) top_parts(const T* logits, int width, Found found) {
    enter_kernel();
    __shared__ float room[kWarp];
    const Part<T, packed> part(logits + int64_t(blockIdx.x) * width, width);
    float top = -INFINITY;
    part.each([&](T v) { top = fmaxf(top, to_float(v)); });
    top = block_reduce(top, [](float a, float b) { return fmaxf(a, b); }, room);
    if (threadIdx.x == 0) found.top[int64_t(blockIdx.x) * found.parts + blockIdx.y] = top;
}

template <typename T, bool packed>
__global__ void __launch_bounds__(kPartThreads)
    weigh_parts(const T* logits, const float* temperature, int64_t nodes, int width, Filter filter, Found found) {
    enter_kernel();
    float* bins = dynamic_shared<float>();
    const int64_t row = blockIdx.x, first = row * found.parts;
    const Part<T, packed> part(logits + row * width, width);
    for (int bin = 0; bin < kBins; bin++) bins[bin * kPartThreads + threadIdx.x] = 0.0f;
    const Scale scale(temperature[row / nodes], found.top + first, found.parts);
    fill_bins(part, scale, filter.k > 0, -INFINITY, bins);
    const float own = sum_bins(bins);
    if (threadIdx.x < kBins) found.bins[(first + blockIdx.y) * kBins + threadIdx.x] = own;
}

// out: receives the gathered values. With top-k and top-p both, these are all from the interval on, since top-p takes its share
// of the mass that top-k leaves.
template <typename T, bool packed>
__global__ void __launch_bounds__(kPartThreads)
    gather_parts(const T* logits, const float* temperature, int64_t nodes, int width, Filter filter, Found found, T* out) {
    enter_kernel();
    __shared__ float room[kWarp];
    __shared__ int sums[kPartThreads / kWarp];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int64_t row = blockIdx.x, first = row * found.parts;
    const Part<T, packed> part(logits + row * width, width);
    const Scale scale(temperature[row / nodes], found.top + first, found.parts);
    const bool counted = filter.k > 0, both = counted && filter.by_mass();
    const float own = join_bins(found.bins + first * kBins, found.parts);
    const Crossing crossing = crossing_of<T>(scale, counted, counted ? float(filter.k) : filter.p, own);
    const float low = value_at<T>(crossing.at.low);
    float above = 0.0f;
    const auto inside = [&](T v) { return scale.finite() && to_float(v) >= low && (both || order_of(v) <= crossing.at.high); };
    int mine = 0;
    part.each([&](T v) {
        if (inside(v))
            mine++;
        else if (to_float(v) >= low)
            above += scale.weigh(counted, to_float(v));
    });
    const int through = warp_through(mine);
    if (lane == kWarp - 1) sums[warp] = through;
    above = block_reduce(above, [](float a, float b) { return a + b; }, room);  // also the barrier for `sums`
    int before = 0, all = 0;
    for (int w = 0; w < kPartThreads / kWarp; w++) before += w < warp ? sums[w] : 0, all += sums[w];
    T* to = out + row * width + int64_t(blockIdx.y) * kPart + before + through - mine;
    part.each([&](T v) {
        if (inside(v)) *to++ = v;
    });
    if (threadIdx.x > 0) return;
    found.above[first + blockIdx.y] = above, found.gathered[first + blockIdx.y] = all;
    if (blockIdx.y == 0) found.crossing[row] = crossing;
}

// A block for each row.
template <typename T>
__global__ void __launch_bounds__(kEndThreads, 1)
    end_search(const T* gathered, const float* temperature, int64_t nodes, int width, Filter filter, Found found) {
    enter_kernel();
    __shared__ float room[kWarp];
    float* bins = dynamic_shared<float>();
    const int64_t row = blockIdx.x, first = row * found.parts;
    const Gathered<T> source = {gathered + row * width, found.gathered + first, found.parts};
    const Scale scale(temperature[row / nodes], found.top + first, found.parts);
    float least = -INFINITY;
    if (filter.by_sum() && scale.finite()) {
        float above = 0.0f;
        for (int part = threadIdx.x; part < found.parts; part += kEndThreads) above += found.above[first + part];
        above = block_reduce(above, [](float a, float b) { return a + b; }, room);
        for (int bin = 0; bin < kBins; bin++) bins[bin * kEndThreads + threadIdx.x] = 0.0f;
        least = threshold<T>(source, scale, filter.k > 0, found.crossing[row], above, least, bins);
        if (filter.k > 0 && filter.by_mass()) {
            fill_bins(source, scale, false, least, bins);
            const Crossing crossing = crossing_of<T>(scale, false, filter.p, sum_bins(bins));
            least = threshold<T>(source, scale, false, crossing, 0.0f, least, bins);
        }
    }
    if (scale.finite()) {
        const float lowest = scale.top - filter.reach * scale.unit;  // rounded, where `below_top` of values near the top is not
        least = fmaxf(least, scale.below_top(lowest) > filter.reach ? nextafterf(lowest, INFINITY) : lowest);
    }
    if (threadIdx.x == 0) found.least[row] = least;
}

// A row whose greatest value is infinite stays as it is, and so does NaN.
template <typename T, bool packed>
__global__ void __launch_bounds__(kPartThreads) keep_parts(const T* logits, int width, Found found, T* out) {
    enter_kernel();
    const int64_t start = int64_t(blockIdx.x) * width;
    Part<T, packed> part(logits + start, width);
    part.store(found.least[blockIdx.x], out + start, width);
}

}  // namespace drafttrain
