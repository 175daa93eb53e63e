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

constexpr int kPart = 8192;  // values of a row that a block of kPartThreads reads
constexpr int kPartThreads = 256;
constexpr int kPartEach = kPart / kPartThreads;
constexpr int kEndThreads = 512;
constexpr int kBins = kWarp;
constexpr float kPerUnit = 2.0f;  // bins of a temperature's width in the first histogram

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

// This thread's values of a part of a row, NaN after the row's end. packed: rows start and end at 16 bytes. Either way a thread
// has the same values in the same order.
template <typename T, bool packed>
struct Part {
    static constexpr int kCount = Pack<T>::kCount, kPacks = kPartEach / kCount;
    Pack<T> pack[kPacks];

    __device__ static int start(int h) { return int(blockIdx.y) * kPart + (h * kPartThreads + int(threadIdx.x)) * kCount; }

    __device__ Part(const T* row, int width) {
#pragma unroll
        for (int h = 0; h < kPacks; h++) {
#pragma unroll
            for (int j = 0; j < kCount; j++) {
                from_float(NAN, &pack[h].at[j]);
                if (!packed && start(h) + j < width) pack[h].at[j] = row[start(h) + j];
            }
            if (packed && start(h) < width) pack[h] = *reinterpret_cast<const Pack<T>*>(row + start(h));
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
            if (packed && start(h) < width) *reinterpret_cast<Pack<T>*>(row + start(h)) = pack[h];
#pragma unroll  // constant indices keep the pack in registers
            for (int j = 0; j < kCount; j++)
                if (!packed && start(h) + j < width) row[start(h) + j] = pack[h].at[j];
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
    __device__ float below_top(float x) const { return (top - x) * inverse; }
    // What a value adds to the sum.
    template <bool counted>
    __device__ float weigh(float x) const {
        return counted ? 1.0f : weight(x, top, inverse);
    }
};

// The values of one bin of the first histogram, and a few around them for its rounding.
template <typename T>
__device__ Interval interval_of(const Scale& scale, int bin) {
    const float middle = float(bin) / kPerUnit * scale.unit;
    const float slack = fabsf(scale.top) * 0x1p-22f + 0.52f / kPerUnit * scale.unit;
    const uint32_t least = order_of_rounded<T>(-INFINITY), most = order_of_rounded<T>(scale.top);
    const uint32_t low = order_of_rounded<T>(scale.top - (middle + slack));
    const uint32_t high = order_of_rounded<T>(scale.top - (middle - slack));
    return {bin == kBins - 1 || low <= least ? least : low - 1, high >= most ? most : high + 1};
}

// A histogram of a block; each thread has its own bins.
template <int threads>
struct Bins {
    static constexpr int kRoom = kBins * threads * int(sizeof(float));
    float* room;  // shared

    __device__ void clear() const {
#pragma unroll
        for (int bin = 0; bin < kBins; bin++) room[bin * threads + threadIdx.x] = 0.0f;
    }
    __device__ void add(int bin, float w) const { room[bin * threads + threadIdx.x] += w; }
    // The sum over the threads, bin b for lane b of every warp.
    __device__ float sum() const {
        __shared__ float sums[kBins];
        const int lane = threadIdx.x % kWarp;
        __syncthreads();
        for (int bin = threadIdx.x / kWarp; bin < kBins; bin += threads / kWarp) {
            float mine = 0.0f;
#pragma unroll
            for (int t = 0; t < threads; t += kWarp) mine += room[bin * threads + t + lane];
            mine = warp_reduce(mine, [](float a, float b) { return a + b; });
            if (lane == 0) sums[bin] = mine;
        }
        __syncthreads();
        return sums[lane];
    }
};

// The sum over the histograms of a row's parts, bin b for lane b of every warp.
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

// Makes the first histogram, of the values from `least` on.
template <bool counted, int threads, typename Source>
__device__ void fill(Bins<threads> bins, const Source& source, const Scale& scale, float least) {
    bins.clear();
    source.each([&](auto v) {
        const float x = to_float(v);
        if (!(x >= least)) return;
        const float place = fminf(scale.below_top(x) * kPerUnit, kBins - 1) + 0x1p23f;  // a whole number, in the lowest bits
        bins.add(int(bits_of(place) & (kBins - 1)), scale.weigh<counted>(x));
    });
}

// Where the first histogram has the threshold. own: its bin for each lane. amount: a number of values, or a share of their
// mass.
template <bool counted, typename T>
__device__ Crossing crossing_of(const Scale& scale, float amount, float own) {
    const float through = warp_through(own), all = __shfl_sync(kAllLanes, through, kBins - 1);
    const float target = counted ? amount : amount * all;
    const unsigned reached = __ballot_sync(kAllLanes, own > 0.0f && through >= target);  // sums of empty bins may round up
    return {interval_of<T>(scale, reached == 0 ? kBins - 1 : __ffs(reached) - 1), target};
}

// The least value to keep of those from `least` on. source: has the values of the interval. base: the sum over values above it
// that are not in the source.
template <bool counted, typename T, int threads>
__device__ float threshold(Bins<threads> bins, const Gathered<T>& source, const Scale& scale, Crossing crossing, float base,
                           float least) {
    __shared__ float room[kWarp];
    Interval at = crossing.at;
    float mass = INFINITY;  // of the interval
    // two values or more weigh at least twice as much as the lowest
    while (at.low < at.high && !(mass < 1.9f * scale.weigh<counted>(value_at<T>(at.low)))) {
        const float low = fmaxf(value_at<T>(at.low), least);
        int shift = 0;
        while ((at.high - at.low) >> shift >= kBins) shift++;
        float above = 0.0f;
        bins.clear();
        source.each([&](T v) {
            const float x = to_float(v);
            if (!(x >= low)) return;
            const float w = scale.weigh<counted>(x);
            if (order_of(v) > at.high)
                above += w;
            else
                bins.add(int((at.high - order_of(v)) >> shift), w);
        });
        above = base + block_reduce(above, [](float a, float b) { return a + b; }, room);
        const float own = bins.sum(), through = above + warp_through(own);
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

template <typename T, bool packed, bool counted>
__global__ void __launch_bounds__(kPartThreads)
    weigh_parts(const T* logits, const float* temperature, int64_t nodes, int width, Found found) {
    enter_kernel();
    const Bins<kPartThreads> bins = {dynamic_shared<float>()};
    const int64_t row = blockIdx.x, first = row * found.parts;
    const Part<T, packed> part(logits + row * width, width);
    const Scale scale(temperature[row / nodes], found.top + first, found.parts);
    fill<counted>(bins, part, scale, -INFINITY);
    const float own = bins.sum();
    if (threadIdx.x < kBins) found.bins[(first + blockIdx.y) * kBins + threadIdx.x] = own;
}

// out: receives the gathered values. With top-k and top-p both, these are all from the interval on, since top-p takes its share
// of the mass that top-k leaves.
template <typename T, bool packed, bool counted>
__global__ void __launch_bounds__(kPartThreads, 3)
    gather_parts(const T* logits, const float* temperature, int64_t nodes, int width, Filter filter, Found found, T* out) {
    enter_kernel();
    static_assert(kPartEach <= 32, "a bit for each value");
    __shared__ float room[kWarp];
    __shared__ int sums[kPartThreads / kWarp];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int64_t row = blockIdx.x, first = row * found.parts;
    const Part<T, packed> part(logits + row * width, width);
    const Scale scale(temperature[row / nodes], found.top + first, found.parts);
    const float own = join_bins(found.bins + first * kBins, found.parts);
    const Crossing crossing = crossing_of<counted, T>(scale, counted ? float(filter.k) : filter.p, own);
    const float low = scale.finite() ? value_at<T>(crossing.at.low) : NAN;  // NaN: nothing is gathered
    const float high = counted && filter.by_mass() ? INFINITY : value_at<T>(crossing.at.high);
    float above = 0.0f;
    unsigned mine = 0, bit = 1;  // a bit for each value: whether it is gathered
    part.each([&](T v) {
        const float x = to_float(v);
        if (x >= low && x <= high) mine |= bit;
        if (x > high) above += scale.weigh<counted>(x);
        bit <<= 1;
    });
    const int through = warp_through(__popc(mine));
    if (lane == kWarp - 1) sums[warp] = through;
    above = block_reduce(above, [](float a, float b) { return a + b; }, room);  // also the barrier for `sums`
    int before = 0, all = 0;
    for (int w = 0; w < kPartThreads / kWarp; w++) before += w < warp ? sums[w] : 0, all += sums[w];
    T* to = out + row * width + int64_t(blockIdx.y) * kPart + before + through - __popc(mine);
    bit = 1;
    part.each([&](T v) {
        if (mine & bit) *to++ = v;
        bit <<= 1;
    });
    if (threadIdx.x > 0) return;
    found.above[first + blockIdx.y] = above, found.gathered[first + blockIdx.y] = all;
    if (blockIdx.y == 0) found.crossing[row] = crossing;
}

// A block for each row.
template <typename T, bool counted>
__global__ void __launch_bounds__(kEndThreads, 1)
    end_search(const T* gathered, const float* temperature, int64_t nodes, int width, Filter filter, Found found) {
    enter_kernel();
    __shared__ float room[kWarp];
    const Bins<kEndThreads> bins = {dynamic_shared<float>()};
    const int64_t row = blockIdx.x, first = row * found.parts;
    const Gathered<T> source = {gathered + row * width, found.gathered + first, found.parts};
    const Scale scale(temperature[row / nodes], found.top + first, found.parts);
    float least = -INFINITY;
    if (filter.by_sum() && scale.finite()) {
        float above = 0.0f;
        for (int part = threadIdx.x; part < found.parts; part += kEndThreads) above += found.above[first + part];
        above = block_reduce(above, [](float a, float b) { return a + b; }, room);
        least = threshold<counted>(bins, source, scale, found.crossing[row], above, least);
        if (counted && filter.by_mass()) {
            fill<false>(bins, source, scale, least);
            const Crossing crossing = crossing_of<false, T>(scale, filter.p, bins.sum());
            least = threshold<false>(bins, source, scale, crossing, 0.0f, least);
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
