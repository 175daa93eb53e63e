// CUDA's execution model on one CPU thread, for tests: blocks one after the other, the threads of a block as fibers.
//
// A fiber runs until it waits at a barrier or a warp's exchange. The order of threads is shuffled from launch to launch,
// dynamic shared memory starts as NaN, and a block whose threads wait for each other for ever ends the process with a message:
// a missing or divergent __syncthreads shows as a wrong result or as that message.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __shared__ static
#define __align__(n) alignas(n)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct uint4 {
    unsigned x, y, z, w;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

namespace emulator {

constexpr size_t kStack = 1 << 17, kThreads = 1024;
constexpr size_t kGuard = 8 << 10;        // bytes after a block's dynamic shared memory that must stay as they are
constexpr size_t kMostShared = 98 << 10;  // that a block gets on every processor from sm_80 on, less its static memory

struct Fiber {
    jmp_buf place;            // where it goes on: unlike swapcontext, a jump asks the operating system nothing
    std::vector<char> stack;  // empty: it has never run
    dim3 index;
    bool done;
    long barriers, exchanges;  // passed or waited at
    uint64_t value;            // for its warp to read
    long Fiber::* waits;       // null, or which of the two it waits at, with the threads [first, last)
    size_t first, last;
};

struct Block {
    std::vector<Fiber> fibers{kThreads};  // the first `threads` of them run
    size_t threads, current;
    std::vector<unsigned char> shared;
    jmp_buf scheduler;
    std::function<void()> body;
};

inline Block& block() {
    static Block one;
    return one;
}

inline void* dynamic_shared() { return block().shared.data(); }

inline void yield() {
    if (!_setjmp(block().fibers[block().current].place)) _longjmp(block().scheduler, 1);
}

// A fiber serves one block after another.
inline void enter() {
    for (;;) {
        block().body();
        block().fibers[block().current].done = true;
        yield();
    }
}

// Let a fiber run until it yields.
inline void resume(Fiber& fiber) {
    if (_setjmp(block().scheduler)) return;
    if (!fiber.stack.empty()) _longjmp(fiber.place, 1);
    fiber.stack.resize(kStack);
    static ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = fiber.stack.data(), start.uc_stack.ss_size = kStack;
    makecontext(&start, enter, 0);
    setcontext(&start);
}

// Whether another thread that still runs has not come as far as this one, which waits.
inline bool ahead(const Fiber& fiber) {
    const auto& fibers = block().fibers;
    for (size_t i = fiber.first; i < fiber.last; i++)
        if (!fibers[i].done && fibers[i].*fiber.waits < fiber.*fiber.waits) return true;
    return false;
}

// Wait until every other thread of [first, last) that still runs has come this far.
inline void meet(long Fiber::* count, size_t first, size_t last) {
    Fiber& self = block().fibers[block().current];
    ++(self.*count);
    self.waits = count, self.first = first, self.last = last;
    if (ahead(self)) yield();  // `run_block` resumes those that need not wait
    self.waits = nullptr;
}

inline size_t warp_start() { return block().current / warpSize * warpSize; }
inline size_t warp_end() { return std::min(warp_start() + warpSize, block().threads); }

// This lane's value seen by the warp; then, once all have read, the exchange ends.
template <typename T, typename F>
auto exchange(T value, F read) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    Fiber& self = block().fibers[block().current];
    self.value = 0;
    std::memcpy(&self.value, &value, sizeof(T));
    meet(&Fiber::exchanges, warp_start(), warp_end());
    auto result = read([first = warp_start()](unsigned lane) {
        T other;
        std::memcpy(&other, &block().fibers[first + lane].value, sizeof(T));
        return other;
    });
    meet(&Fiber::exchanges, warp_start(), warp_end());
    return result;
}

inline void run_block(const std::vector<size_t>& order) {
    Block& b = block();
    size_t left = b.threads;
    while (left > 0) {
        bool stuck = true;
        for (size_t i : order) {
            Fiber& f = b.fibers[i];
            if (f.done || (f.waits && ahead(f))) continue;
            b.current = i, threadIdx = f.index, stuck = false;
            resume(f);
            left -= f.done;
        }
        if (stuck) {
            std::fprintf(stderr, "emulator: the threads of a block wait for each other\n");
            std::abort();
        }
    }
}

template <typename F>
void run(dim3 grid, dim3 size, size_t shared, F body) {
    static std::mt19937 random(0);
    Block& b = block();
    const size_t threads = size_t(size.x) * size.y * size.z;
    if (threads == 0 || threads > kThreads || grid.y > 65535 || grid.z > 65535 || shared > kMostShared) {
        std::fprintf(stderr, "emulator: a launch that CUDA would refuse\n");
        std::abort();
    }
    b.body = body, b.threads = threads, blockDim = size, gridDim = grid;
    std::vector<size_t> order(threads);
    std::iota(order.begin(), order.end(), 0);
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                blockIdx = dim3(x, y, z);
                b.shared.assign(shared + kGuard, 0xff);
                std::shuffle(order.begin(), order.end(), random);
                for (size_t i = 0; i < threads; i++) {
                    Fiber& f = b.fibers[i];
                    f.done = false, f.barriers = f.exchanges = 0, f.waits = nullptr;
                    f.index = dim3(i % size.x, i / size.x % size.y, i / size.x / size.y);
                }
                run_block(order);
                if (std::any_of(b.shared.begin() + shared, b.shared.end(), [](unsigned char byte) { return byte != 0xff; })) {
                    std::fprintf(stderr, "emulator: a block writes past its dynamic shared memory\n");
                    std::abort();
                }
            }
}

}  // namespace emulator

inline void __syncthreads() { emulator::meet(&emulator::Fiber::barriers, 0, emulator::block().threads); }
inline bool __syncthreads_or(bool vote) {
    auto& block = emulator::block();
    block.fibers[block.current].value = vote;
    __syncthreads();
    bool any = false;
    for (size_t i = 0; i < block.threads; i++) any |= !block.fibers[i].done && block.fibers[i].value != 0;
    __syncthreads();
    return any;
}
inline void __syncwarp(unsigned = ~0u) {
    emulator::meet(&emulator::Fiber::exchanges, emulator::warp_start(), emulator::warp_end());
}
inline void __threadfence() {}

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
    return emulator::exchange(value, [&](auto of) { return of(unsigned(lane) % warpSize); });
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    const unsigned self = emulator::block().current % warpSize;
    return emulator::exchange(value, [&](auto of) { return of(self ^ unsigned(mask)); });
}
template <typename T>
T __shfl_up_sync(unsigned, T value, unsigned delta) {
    const unsigned self = emulator::block().current % warpSize;
    return emulator::exchange(value, [&](auto of) { return self < delta ? value : of(self - delta); });
}
template <typename T>
T __shfl_down_sync(unsigned, T value, unsigned delta) {
    const unsigned self = emulator::block().current % warpSize;
    return emulator::exchange(value, [&](auto of) { return self + delta < warpSize ? of(self + delta) : value; });
}
inline unsigned __ballot_sync(unsigned, bool vote) {
    const size_t lanes = emulator::warp_end() - emulator::warp_start();
    return emulator::exchange(vote, [&](auto of) {
        unsigned all = 0;
        for (unsigned i = 0; i < lanes; i++) all |= unsigned(of(i)) << i;
        return all;
    });
}
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }

template <typename T>
T atomicAdd(T* at, T value) {
    const T old = *at;
    *at = old + value;
    return old;
}
template <typename T>
T atomicMin(T* at, T value) {
    const T old = *at;
    *at = std::min(old, value);
    return old;
}
template <typename T>
T atomicMax(T* at, T value) {
    const T old = *at;
    *at = std::max(old, value);
    return old;
}
template <typename T>
T atomicOr(T* at, T value) {
    const T old = *at;
    *at = old | value;
    return old;
}
template <typename T>
T __ldg(const T* at) {
    return *at;
}
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(unsigned(x)) + 1; }
inline int __ffsll(long long x) { return x == 0 ? 0 : std::countr_zero(uint64_t(x)) + 1; }
inline int __clz(int x) { return std::countl_zero(unsigned(x)); }
inline int __clzll(long long x) { return std::countl_zero(uint64_t(x)); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
