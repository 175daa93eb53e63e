// Draft trees on the device: depth and links from the parents, and the best candidates. One block per row.
#pragma once

#include "select.cuh"
#include "tree.h"

namespace drafttrain {

// A thread for each node: Words * kWord of them.
template <int Words>
__global__ void __launch_bounds__(Words* kWord) link_trees(const int64_t* parent, int nodes, int64_t* depth, int64_t* bits) {
    __shared__ int64_t above[Words * kWord];
    const int i = threadIdx.x;
    const int64_t at = int64_t(blockIdx.x) * nodes + i;
    if (i < nodes) above[i] = parent[at];
    __syncthreads();
    if (i >= nodes) return;
    const Links links = links_of<Words>(above, i);
    depth[at] = links.depth;
    links.store_bits(bits + at * Words);
}

template <int Words>
__global__ void __launch_bounds__(kSelectThreads)
    build_trees(const int64_t* parent, const float* score, int candidates, int nodes, BuiltRow built) {
    static_assert(Words * kWord <= kSelectThreads, "a thread for each node");
    __shared__ int64_t chosen[Words * kWord], above[Words * kWord];
    const int i = threadIdx.x;
    const int64_t first = int64_t(blockIdx.x) * candidates;
    const auto key = [=](int c) { return candidate_key(score + first, c); };
    const auto write = [](int rank, uint64_t key) { chosen[rank] = index_of(key); };
    select(Dealt<decltype(key)>{candidates, key}, nodes, dynamic_shared<uint64_t>(), write);
    __syncthreads();
    const BuiltRow row = built.at(blockIdx.x, nodes);
    if (i < nodes) row.place(chosen, nodes, i, parent + first, above);
    __syncthreads();
    if (i < nodes) row.template link<Words>(above, nodes, i);
}

}  // namespace drafttrain
