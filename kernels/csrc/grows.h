// The tensors of a tree's next generation as `Grow`, for CPU and CUDA alike.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include "../include/drafttrain/tree.h"
#include "commits.h"
#include "types.h"

namespace drafttrain {

inline Grow grow_of(const torch::stable::Tensor& score, const torch::stable::Tensor& gain, const torch::stable::Tensor& token,
                    const torch::stable::Tensor& bits, const torch::stable::Tensor& own, const torch::stable::Tensor& total,
                    const torch::stable::Tensor& choice, const torch::stable::Tensor& best,
                    const torch::stable::Tensor& best_score, const torch::stable::Tensor& best_token,
                    const torch::stable::Tensor& best_bits) {
    using torch::headeronly::ScalarType;
    Grow g = {score.size(1), gain.size(2), bits.size(2), gain.size(1)};
    STD_TORCH_CHECK(score.scalar_type() == ScalarType::Float && gain.scalar_type() == ScalarType::Float, "scores are float32");
    STD_TORCH_CHECK(g.width <= kMostTop && g.candidates() <= kMostCandidates && (g.from == 1 || g.from == g.width) &&
                        token.numel() == gain.numel() && own.numel() == g.width * g.words,
                    "a generation has at most 64 nodes and 4096 candidates");
    g.score = data<float>(score), g.gain = data<float>(gain), g.token = data<int64_t>(token);
    g.bits = data<int64_t>(bits), g.own = data<int64_t>(own), g.total = data<float>(total);
    g.choice = data<int64_t>(choice), g.best = data<int64_t>(best), g.best_score = data<float>(best_score);
    g.best_token = data<int64_t>(best_token), g.best_bits = data<int64_t>(best_bits);
    return g;
}

}  // namespace drafttrain
