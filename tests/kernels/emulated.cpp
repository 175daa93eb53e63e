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

namespace drafttrain {
namespace {

__global__ void warp_shares(const BFloat16* row, int64_t vocab, float inverse, Share* shares) {
    const Share share = warp_share(row, blockIdx.x, vocab, inverse);
    if (threadIdx.x == 0) shares[blockIdx.x] = share;
}

}  // namespace
}  // namespace drafttrain

// Splits of a row whose share by a warp differs in any bit from the share by a block.
extern "C" int64_t differing_shares(const drafttrain::BFloat16* row, int64_t vocab, float temperature) {
    using namespace drafttrain;
    std::vector<Share> eager(splits_of(vocab)), lazy(eager.size());
    const unsigned splits = unsigned(eager.size());
    launch(nullptr, split_shares<BFloat16, true, false>, dim3(1, splits), dim3(kShareThreads), 0, row, &temperature, nullptr, 1,
           vocab, eager.data());
    launch(nullptr, warp_shares, dim3(splits), dim3(kWarp), 0, row, vocab, inverse_of(temperature), lazy.data());
    int64_t found = 0;
    for (size_t s = 0; s < eager.size(); s++) found += eager[s].mass != lazy[s].mass || eager[s].top != lazy[s].top;
    return found;
}
