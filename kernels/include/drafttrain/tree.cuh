// Draft trees on the device: depth and links from the parents, and the best candidates. One block per row.
#pragma once

#include "select.cuh"
#include "tree.h"

namespace drafttrain {

__global__ void __launch_bounds__(kMostNodes) link_trees(const int64_t* parent, int nodes, int64_t* depth, int64_t* bits) {
    __shared__ int64_t above[kMostNodes];
    const int i = threadIdx.x;
    const int64_t at = int64_t(blockIdx.x) * nodes + i;
    if (i < nodes) above[i] = parent[at];
    __syncthreads();
    if (i >= nodes) return;
    const Links links = links_of(above, i);
    depth[at] = links.depth, bits[at] = links.bits;
}

__global__ void __launch_bounds__(kSelectThreads)
    build_trees(const int64_t* parent, const float* score, int candidates, int nodes, BuiltRow built) {
    __shared__ int64_t chosen[kMostNodes], above[kMostNodes];
    const int i = threadIdx.x;
    const int64_t first = int64_t(blockIdx.x) * candidates;
    const auto key = [=](int c) { return candidate_key(score + first, c); };
    const auto write = [](int rank, uint64_t key) { chosen[rank] = index_of(key); };
    select(Dealt<decltype(key)>{candidates, key}, nodes, dynamic_shared<uint64_t>(), write);
    __syncthreads();
    const BuiltRow row = built.at(blockIdx.x, nodes);
    if (i < nodes) row.place(chosen, nodes, i, parent + first, above);
    __syncthreads();
    if (i < nodes) row.link(above, nodes, i);
}

}  // namespace drafttrain
