// The CUDA sources with the emulator in place of CUDA, all in one unit: torch's headers take most of the time to compile.
#include "../../kernels/csrc/cuda/accept.cu"
#include "../../kernels/csrc/cuda/append.cu"
#include "../../kernels/csrc/cuda/commit.cu"
#include "../../kernels/csrc/cuda/keep.cu"
#include "../../kernels/csrc/cuda/rows.cu"
#include "../../kernels/csrc/cuda/shaped.cu"
#include "../../kernels/csrc/cuda/top.cu"
#include "../../kernels/csrc/cuda/trees.cu"
#include "../../kernels/csrc/schema.h"
#include "../../kernels/include/drafttrain/noise.h"

STABLE_TORCH_LIBRARY(drafttrain_emulated, m) { drafttrain::define(m); }

// The number of all samplers, for the test that compares it with the one in Python.
extern "C" double keyed_number(int64_t seed, int64_t key, int64_t position, int64_t lane, int64_t draw) {
    return drafttrain::uniform(seed, key, position, lane, draw);
}
