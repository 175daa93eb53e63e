// Marks logic that the CPU operators and the CUDA kernels share.
#pragma once

#if defined(__CUDACC__)
#define DRAFTTRAIN_BOTH __host__ __device__ inline
#else
#define DRAFTTRAIN_BOTH inline
#endif
