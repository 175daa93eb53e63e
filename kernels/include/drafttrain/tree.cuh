// Draft trees on the device: depth and links from the parents, and the best candidates. One block per row.
#pragma once

#include <climits>

#include "device.cuh"
#include "select.cuh"
#include "tree.h"

namespace drafttrain {

constexpr int kBuildThreads = 256;

// A node's line to the root, found by pointer jumping: in each round a node takes over what its `above` has found, and goes on
// from where that one stopped. log2(depth) rounds, where a walk along the line waits for each of its nodes.
template <int Words>
struct Lines {
    uint64_t bits[2][Words * kWord][Words];  // two copies: one is read while the other is written
    int above[2][Words * kWord];

    // The bits of node threadIdx.x. Its parent is below 0 for a root; one after the node is ignored, as by links_of. All
    // threads of the block must call it, with parent -1 where there is no node.
    __device__ Links<Words> of(int64_t parent) {
        const int i = threadIdx.x;
        Links<Words> links = {0, {1}};
        for (int w = 0; w < Words; w++)
            if (Words == 1 || i / kWord == w) links.bits[w] |= uint64_t(1) << (i % kWord);
        int up = parent > 0 && parent < i ? int(parent) : 0;
        for (int copy = 0;; copy ^= 1) {
            if (i < Words * kWord) {
                for (int w = 0; w < Words; w++) bits[copy][i][w] = links.bits[w];
                above[copy][i] = up;
            }
            if (!__syncthreads_or(up > 0)) break;
            if (up == 0) continue;
            for (int w = 0; w < Words; w++) links.bits[w] |= bits[copy][up][w];
            up = above[copy][up];
        }
        for (int w = 0; w < Words; w++) links.depth += __popcll(links.bits[w]);
        links.depth--;
        return links;
    }
};

// A thread for each node: Words * kWord of them.
template <int Words>
__global__ void __launch_bounds__(Words* kWord) link_trees(const int64_t* parent, int nodes, int64_t* depth, int64_t* bits) {
    enter_kernel();
    __shared__ Lines<Words> lines;
    const int i = threadIdx.x;
    const int64_t at = int64_t(blockIdx.x) * nodes + i;
    const Links links = lines.of(i < nodes ? parent[at] : -1);
    if (i >= nodes) return;
    depth[at] = links.depth;
    links.store_bits(bits + at * Words);
}

// The chosen candidates: those above `least`, and of those equal to it the first `ties`.
struct Bound {
    uint32_t least;
    int ties;
};

// A radix search for the k greatest of a row's values, from the highest digit on.
struct Search {
    static constexpr int kBits = 8, kDigits = 32 / kBits, kBins = 1 << kBits, kEach = kBins / kWarp;
    struct Bin {
        int digit, greater, inside;  // greater: the number of values in greater bins
    };

    alignas(16) int bins[kDigits][kBins];

    __device__ void clear() {
        for (int j = threadIdx.x; j < kDigits * kBins; j += blockDim.x) (&bins[0][0])[j] = 0;
    }

    // The bin of the k-th greatest value. Every warp finds it; its lanes go down from the greatest bin.
    __device__ static Bin bin_of(const int* count, int k) {
        const int lane = threadIdx.x % kWarp, lowest = kBins - (lane + 1) * kEach;
        const auto mine = *reinterpret_cast<const Pieces*>(count + lowest);
        int own = 0;
        for (int j = 0; j < kEach; j++) own += mine.at[j / 4].at[j % 4];
        int through = own;
        for (int offset = 1; offset < kWarp; offset *= 2) {
            const int other = __shfl_up_sync(kAllLanes, through, offset);
            if (lane >= offset) through += other;
        }
        int digit = lowest, greater = through - own, inside = 0;
        bool found = false;
#pragma unroll
        for (int j = kEach - 1; j >= 0; j--) {
            const int here = mine.at[j / 4].at[j % 4];
            if (!found) found = greater + here >= k, digit = lowest + j, inside = here;
            if (!found) greater += here;
        }
        const int with = __ffs(__ballot_sync(kAllLanes, found)) - 1;
        const auto from = [&](int x) { return __shfl_sync(kAllLanes, x, with); };
        return {from(digit), from(greater), from(inside)};
    }

    // All threads of the block must call it, after a barrier behind `clear`. value: [count], shared.
    __device__ Bound greatest(const uint32_t* value, int count, int k) {
        uint32_t found = 0;  // the digits so far
        for (int digit = 0; digit < kDigits; digit++) {
            const int shift = 32 - kBits * (digit + 1);
            for (int c = threadIdx.x; c < count; c += blockDim.x)
                if (digit == 0 || value[c] >> (shift + kBits) == found)
                    atomicAdd(&bins[digit][value[c] >> shift & (kBins - 1)], 1);
            __syncthreads();
            const Bin bin = bin_of(bins[digit], k);
            k -= bin.greater, found = found << kBits | uint32_t(bin.digit);
            if (bin.inside == k) return {found << shift, INT_MAX};  // all of the bin are chosen
        }
        return {found, k};
    }

  private:
    struct Pieces {
        Pack<int> at[kEach / 4];
    };
};

// Marks of nodes by parent: bit i of row p + 1 is node i, a child of node p. Of 32 bits, whose atomics the hardware has.
template <int Words>
struct Children {
    static constexpr int kBits = 32, kRow = Words * kWord / kBits;
    uint32_t mark[Words * kWord + 1][kRow];

    __device__ void clear() {
        for (int j = threadIdx.x; j < (Words * kWord + 1) * kRow; j += blockDim.x) (&mark[0][0])[j] = 0;
    }
    __device__ void add(int parent, int i) { atomicOr(&mark[parent + 1][i / kBits], uint32_t(1) << (i % kBits)); }

    // The first child after node i, or -1.
    __device__ int after(int i, int parent) const {
        const int next = i + 1;
        for (int w = next / kBits; w < kRow; w++) {
            const uint32_t left = mark[parent + 1][w] & (w == next / kBits ? ~uint32_t(0) << (next % kBits) : ~uint32_t(0));
            if (left != 0) return w * kBits + __ffs(int(left)) - 1;
        }
        return -1;
    }
};

// The candidates of a row, in dynamic shared memory: their order, their parents, and how many candidates up to each are chosen.
struct Candidates {
    uint32_t* value;
    int16_t *parent, *chosen;
    int count;

    __device__ Candidates(int count)
        : value(dynamic_shared<uint32_t>()),
          parent(reinterpret_cast<int16_t*>(value + count)),
          chosen(parent + count),
          count(count) {}

    // All loads of kBatch candidates are issued before the first is used.
    __device__ void load(const float* score, const int64_t* from) const {
        constexpr int kBatch = 4;
        for (int start = threadIdx.x; start < count; start += kBatch * kBuildThreads) {
            float its_score[kBatch];
            int64_t above[kBatch];
#pragma unroll
            for (int j = 0; j < kBatch; j++) {
                const int c = start + j * kBuildThreads, at = c < count ? c : start;
                its_score[j] = score[at], above[j] = from[at];
            }
#pragma unroll
            for (int j = 0; j < kBatch; j++) {
                const int c = start + j * kBuildThreads;
                if (c >= count) break;
                value[c] = uint32_t(candidate_key(its_score[j], c) >> 32);
                parent[c] = int16_t(above[j] < 0 ? -1 : above[j] < count ? above[j] : count - 1);
            }
        }
    }

    // Fills `chosen`, and kept: the chosen candidates in order. Each warp counts a run of candidates. sums: shared, one for
    // each warp. The caller's barrier comes before the results are read.
    __device__ void choose(Bound bound, uint32_t* sums, int* kept) const {
        const int warps = kBuildThreads / kWarp, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
        const int run = (count + kBuildThreads - 1) / kBuildThreads * kWarp, first = warp * run;
        const uint32_t earlier = (uint32_t(1) << lane) - 1;
        const auto vote = [&](int c, uint32_t* above, uint32_t* equal) {
            *above = __ballot_sync(kAllLanes, c < count && value[c] > bound.least);
            *equal = __ballot_sync(kAllLanes, c < count && value[c] == bound.least);
        };
        uint32_t above, equal, before = 0;  // counts: above in the lower half, equal in the upper one
        for (int start = 0; start < run; start += kWarp) {
            vote(first + start + lane, &above, &equal);
            before += uint32_t(__popc(above) | __popc(equal) << 16);
        }
        if (lane == 0) sums[warp] = before;
        __syncthreads();
        before = 0;
        for (int w = 0; w < warps; w++) before += w < warp ? sums[w] : 0;
        for (int start = 0; start < run; start += kWarp) {
            const int c = first + start + lane;
            vote(c, &above, &equal);
            const int ties = int(before >> 16) + __popc(equal & earlier), taken = ties < bound.ties ? ties : bound.ties;
            const int at = int(before & 0xffff) + __popc(above & earlier) + taken;
            const bool mine = (above >> lane & 1) || ((equal >> lane & 1) && ties < bound.ties);
            if (mine) kept[at] = c;
            if (c < count) chosen[c] = int16_t(at + mine);
            before += uint32_t(__popc(above) | __popc(equal) << 16);
        }
    }

    // The place of a candidate's parent among the chosen, or, where that is not one of them, of the last chosen before it.
    __device__ int parent_of(int c) const { return parent[c] < 0 ? -1 : chosen[parent[c]] - 1; }
};

constexpr size_t candidates_room(int candidates) { return candidates * (sizeof(uint32_t) + 2 * sizeof(int16_t)); }

template <int Words>
size_t build_room(int candidates) {
    return candidates_room(candidates) > sizeof(Lines<Words>) ? candidates_room(candidates) : sizeof(Lines<Words>);
}

template <int Words>
__global__ void __launch_bounds__(kBuildThreads)
    build_trees(const int64_t* parent, const float* score, int candidates, int nodes, BuiltRow built) {
    enter_kernel();
    static_assert(Words * kWord <= kBuildThreads, "a thread for each node");
    static_assert(sizeof(Lines<Words>) <= candidates_room(kMostCandidates), "the candidates need more than the lines");
    static_assert(sizeof(Search) + sizeof(Children<Words>) + Words * kWord * 4 + 64 + candidates_room(kMostCandidates) <=
                  48 << 10);
    __shared__ Search search;
    __shared__ Children<Words> children;
    __shared__ int kept[Words * kWord];
    __shared__ uint32_t sums[kBuildThreads / kWarp];
    const int i = threadIdx.x;
    const int64_t first = int64_t(blockIdx.x) * candidates;
    const Candidates all(candidates);
    search.clear(), children.clear();
    all.load(score + first, parent + first);
    __syncthreads();
    all.choose(search.greatest(all.value, candidates, nodes), sums, kept);
    __syncthreads();
    const int above = i < nodes ? all.parent_of(kept[i]) : -1;
    if (i < nodes) children.add(above, i);
    __syncthreads();  // the lines take the candidates' memory
    const Links links = dynamic_shared<Lines<Words>>()->of(above);
    if (i >= nodes) return;
    const BuiltRow row = built.at(blockIdx.x, nodes);
    row.kept[i] = kept[i], row.parent[i] = above, row.depth[i] = links.depth;
    links.store_bits(row.bits + i * Words);
    row.child[i] = children.after(i, i), row.sibling[i] = children.after(i, above);
}

// Block (w, b) copies the state of node w of row b's next generation. Each finds all of these: that is faster than to wait for
// one that does. The first of a row also writes its candidates.
template <typename Unit>
__global__ void __launch_bounds__(kSelectThreads) grow_rows(Grow g, const Unit* state, Unit* best_state, int64_t units) {
    enter_kernel();
    __shared__ uint64_t best[kMostTop];
    const int64_t w = blockIdx.x, b = blockIdx.y;
    const auto key = [&](int c) { return top_key(g.sum(b, c), uint32_t(c)); };
    select(Dealt<decltype(key)>{g.candidates(), key}, int(g.width), dynamic_shared<uint64_t>(),
           [&](int rank, uint64_t found) { best[rank] = found; });
    for (int c = threadIdx.x; w == 0 && c < g.candidates(); c += blockDim.x) g.candidate(b, c);
    __syncthreads();
    const int64_t chosen = index_of(best[w]);
    if (threadIdx.x == 0) g.node(b, w, chosen);
    const Unit* from = state + g.row_of(b, chosen) * units;
    Unit* to = best_state + (b * g.width + w) * units;
    for (int64_t i = threadIdx.x; i < units; i += blockDim.x) to[i] = from[i];
}

}  // namespace drafttrain
