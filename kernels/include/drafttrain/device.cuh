// Included by every kernel file: CUDA, or the emulator that runs the same sources on a CPU in tests (DRAFTTRAIN_EMULATE).
// Also the launch, dynamic shared memory and reductions, which kernels share.
#pragma once

#ifdef DRAFTTRAIN_EMULATE
#include "emulator.h"
#else
#include <cuda_runtime.h>
#endif

#include "floats.h"

namespace drafttrain {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr size_t kPlainShared = 48 << 10;  // bytes of shared memory, static ones included, that a kernel need not ask for

// Sixteen bytes of consecutive elements, the widest load. Addresses must be multiples of 16.
template <typename T>
struct alignas(16) Pack {
    static constexpr int kCount = 16 / sizeof(T);
    T at[kCount];
};

#ifdef __CUDACC__
template <typename T>
__device__ T* dynamic_shared() {
    extern __shared__ __align__(16) unsigned char room[];
    return reinterpret_cast<T*>(room);
}

// The first statement of every kernel. From Hopper on a kernel of ours may start while the one before it on the stream still
// runs (programmatic dependent launch, CUDA programming guide). Here it lets the next one start, and waits until what all
// before it have written can be read. Every block waits, so the next kernel's wait covers this one's predecessors too.
__device__ inline void enter_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;" ::: "memory");
#endif
}

// Whether the current device can start a kernel before the one before it has ended. Its kernels were compiled for it
// (`ops/build.py`), so they wait as `enter_kernel` does.
inline bool starts_early() {
    int device = 0, major = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    return major >= 9;
}

template <typename... P, typename... A>
void launch(void* stream, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, A... arguments) {
    if (shared > kPlainShared) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t how{};
    how.gridDim = grid, how.blockDim = block, how.dynamicSmemBytes = shared, how.stream = static_cast<cudaStream_t>(stream);
    how.attrs = &early, how.numAttrs = starts_early() ? 1 : 0;
    cudaLaunchKernelEx(&how, kernel, P(arguments)...);
}

// The error message of the last launch; nullptr without one.
inline const char* launch_error() {
    const cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
#else
template <typename T>
T* dynamic_shared() {
    return reinterpret_cast<T*>(emulator::dynamic_shared());
}

inline void enter_kernel() {}  // kernels run one after the other

template <typename... P, typename... A>
void launch(void*, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, A... arguments) {
    emulator::run(grid, block, shared, [&] { kernel(P(arguments)...); });
}

inline const char* launch_error() { return nullptr; }
#endif

// Reduces the warp's values with f; every lane gets the result.
template <typename T, typename F>
__device__ inline T warp_reduce(T value, F f) {
    for (int offset = kWarp / 2; offset > 0; offset /= 2) value = f(value, __shfl_xor_sync(kAllLanes, value, offset));
    return value;
}

// Reduces the block's values with f; every thread gets the result. room: shared, one T per warp. All threads must call it.
template <typename T, typename F>
__device__ inline T block_reduce(T value, F f, T* room) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = (blockDim.x + kWarp - 1) / kWarp;
    value = warp_reduce(value, f);
    __syncthreads();  // an earlier use of the room is over
    if (lane == 0) room[warp] = value;
    __syncthreads();
    T total = room[0];
    for (int w = 1; w < warps; w++) total = f(total, room[w]);
    return total;
}

}  // namespace drafttrain
