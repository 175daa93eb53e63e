// Moves an accepted path to the end of the committed prefix, in the keys and values of all layers at once.
#pragma once

#include "device.cuh"

namespace drafttrain {

constexpr int kKeepThreads = 128;
constexpr int kKeepHeld = 4;  // positions of a column in flight

struct Keep {
    int layers;         // each a store of keys or of values
    int columns, page;  // units of a position, positions of a page
    int most, pages;    // entries of a row of `path` and of `table`
    int64_t slots;      // positions of a layer
    const int64_t *table, *length, *path, *count;

    __device__ int64_t slot(int row, int64_t position) const {
        return table[int64_t(row) * pages + position / page] * page + position % page;
    }
};

// The first entry of a row's path that differs from its index; all later ones differ too, because a path ascends.
__device__ inline int first_moved(const int64_t* path, int count) {
    const int lane = threadIdx.x % kWarp;
    for (int start = 0; start < count; start += kWarp) {
        const int i = start + lane;
        const unsigned moved = __ballot_sync(kAllLanes, i < count && path[i] != i);
        if (moved != 0) return start + __ffs(int(moved)) - 1;
    }
    return count;
}

// Block y: a row of the batch. A thread owns one unit of every position of one layer and follows the path in its order. It
// never reads a position before the last one that it wrote, so threads need no barrier. A warp's lanes look up one place each.
template <typename Unit>
__global__ void __launch_bounds__(kKeepThreads) keep_path(Unit* store, Keep k) {
    enter_kernel();
    const int row = blockIdx.y, lane = threadIdx.x % kWarp, count = int(k.count[row]);
    const int64_t* path = k.path + int64_t(row) * k.most;
    const int64_t column = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, length = k.length[row];
    const bool real = column < int64_t(k.layers) * k.columns;
    Unit* at = store + column / k.columns * k.slots * k.columns + column % k.columns;
    for (int start = first_moved(path, count); start < count; start += kWarp) {
        const int here = count - start < kWarp ? count - start : kWarp;
        int64_t from = 0, to = 0;
        if (lane < here) from = k.slot(row, length + path[start + lane]), to = k.slot(row, length + start + lane);
        for (int i = 0; i < here; i += kKeepHeld) {
            Unit held[kKeepHeld];
            for (int h = 0; h < kKeepHeld; h++) {
                const int64_t source = __shfl_sync(kAllLanes, from, i + h);
                if (real && i + h < here) held[h] = at[source * k.columns];
            }
            for (int h = 0; h < kKeepHeld; h++) {
                const int64_t target = __shfl_sync(kAllLanes, to, i + h);
                if (real && i + h < here) at[target * k.columns] = held[h];
            }
        }
    }
}

}  // namespace drafttrain
