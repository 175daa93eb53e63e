// The acceptance operators' tensors as `Trees`, for CPU and CUDA alike.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "../include/drafttrain/accept.h"

namespace drafttrain {

inline Trees trees_of(const torch::stable::Tensor& token, const torch::stable::Tensor& parent,
                      const torch::stable::Tensor& count, const torch::stable::Tensor& path,
                      const torch::stable::Tensor& accepted, const torch::stable::Tensor& bonus) {
    const auto ints = [](const torch::stable::Tensor& x) { return static_cast<int64_t*>(x.data_ptr()); };
    Trees trees = {};
    trees.nodes = token.size(1);
    trees.token = ints(token), trees.parent = ints(parent), trees.count = ints(count);
    trees.path = ints(path), trees.accepted = ints(accepted), trees.bonus = ints(bonus);
    return trees;
}

// The same with the inputs of sampling.
inline Trees sampled_trees(Trees trees, int64_t vocab, const torch::stable::Tensor& position,
                           const torch::stable::Tensor& temperature, const torch::stable::Tensor& key,
                           const torch::stable::Tensor& seed) {
    trees.vocab = vocab;
    trees.temperature = static_cast<float*>(temperature.data_ptr());
    trees.position = static_cast<int64_t*>(position.data_ptr());
    trees.key = static_cast<int64_t*>(key.data_ptr()), trees.seed = static_cast<int64_t*>(seed.data_ptr());
    return trees;
}

}  // namespace drafttrain
