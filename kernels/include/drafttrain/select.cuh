// The k greatest keys among those of a block, gathered without sorting the rest.
#pragma once

#include "device.cuh"
#include "top.h"

namespace drafttrain {

constexpr int kSelectThreads = 256;
constexpr int kMostEach = 32;  // elements of a thread: bounds the shared memory

// Threads that compete as one group: about 2k groups or more where k is small, so that few besides the k greatest pass the
// groups' bound. With fewer than k groups there would be no bound.
DRAFTTRAIN_BOTH int group_lanes(int k) { return k <= 16 ? 8 : k <= 32 ? 4 : k <= 128 ? 2 : 1; }

// Keys of shared memory that `select` needs where a thread has at most `each` elements.
DRAFTTRAIN_BOTH int select_room(int k, int each) {
    const int lanes = group_lanes(k);
    return kSelectThreads / lanes + k * lanes * each;
}

// write(rank, key) for the block's k greatest keys in descending order, key 0 where there are fewer. All keys differ.
//
// The k-th greatest of the groups' greatest keys bounds the k-th greatest key from below, and at most k groups reach it:
// their elements from that bound on are gathered and ranked by counting. Source: greatest(), this thread's greatest key or
// 0, and each(f), f(key) for all of its elements.
template <typename Source, typename Write>
__device__ void select(const Source& source, int k, uint64_t* room, Write write) {
    __shared__ uint64_t bound;
    __shared__ int found;
    const int lanes = group_lanes(k), groups = blockDim.x / lanes, part = threadIdx.x % lanes;
    const auto more = [](uint64_t a, uint64_t b) { return a > b ? a : b; };
    const uint64_t mine = source.greatest();
    uint64_t top = mine;
    for (int offset = lanes / 2; offset > 0; offset /= 2) top = more(top, __shfl_xor_sync(kAllLanes, top, offset));
    if (part == 0) room[threadIdx.x / lanes] = top;
    if (threadIdx.x == 0) bound = 0, found = 0;
    __syncthreads();
    int above = 0;
    for (int g = part; g < groups; g += lanes) above += room[g] > top;
    for (int offset = lanes / 2; offset > 0; offset /= 2) above += __shfl_xor_sync(kAllLanes, above, offset);
    if (part == 0 && above == k - 1 && top != 0) bound = top;
    __syncthreads();
    uint64_t* passed = room + groups;
    const uint64_t least = bound;
    if (mine >= least)
        source.each([&](uint64_t key) {
            if (key >= least) passed[atomicAdd(&found, 1)] = key;
        });
    __syncthreads();
    const int count = found;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const uint64_t key = passed[i];
        int rank = 0;
        for (int j = 0; j < count; j++) rank += passed[j] > key;
        if (rank < k) write(rank, key);
    }
    for (int rank = count + threadIdx.x; rank < k; rank += blockDim.x) write(rank, uint64_t(0));
}

// `count` elements whose keys are computed one by one, dealt out to the block's threads.
template <typename Key>
struct Dealt {
    int count;
    Key key;

    template <typename F>
    __device__ void each(F f) const {
        for (int i = threadIdx.x; i < count; i += blockDim.x) f(key(i));
    }
    __device__ uint64_t greatest() const {
        uint64_t top = 0;
        each([&](uint64_t key) { top = key > top ? key : top; });
        return top;
    }
};

}  // namespace drafttrain
