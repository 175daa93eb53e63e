// The commit operator's tensors as `Commits`, for CPU and CUDA alike.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include "../include/drafttrain/commit.h"
#include "types.h"

namespace drafttrain {

inline Commits commits_of(const torch::stable::Tensor& token, const torch::stable::Tensor& parent,
                          const torch::stable::Tensor& real, const torch::stable::Tensor& path,
                          const torch::stable::Tensor& count, const torch::stable::Tensor& bonus,
                          const torch::stable::Tensor& slot, const torch::stable::Tensor& stop,
                          const torch::stable::Tensor& limit, bool skips, bool counts, const torch::stable::Tensor& root,
                          const torch::stable::Tensor& made, const torch::stable::Tensor& done,
                          const torch::stable::Tensor& taken, const torch::stable::Tensor& next,
                          const torch::stable::Tensor& kept, const torch::stable::Tensor& record) {
    Commits c = {token.size(1), taken.size(1), path.stride(0), stop.size(1), skips, counts};
    c.token = data<int64_t>(token), c.parent = data<int64_t>(parent), c.real = data<int64_t>(real);
    c.path = data<int64_t>(path), c.count = data<int64_t>(count), c.bonus = data<int64_t>(bonus);
    c.slot = data<int64_t>(slot), c.stop = data<int64_t>(stop), c.limit = data<int64_t>(limit);
    c.root = data<int64_t>(root), c.made = data<int64_t>(made), c.done = data<bool>(done);
    c.taken = data<int64_t>(taken), c.next = data<int64_t>(next), c.kept = data<int64_t>(kept);
    c.record = data<int64_t>(record);
    return c;
}

// Bytes of an entry of `values` [B, A, ...], as of one of `rows` copies of them in `to`.
inline int64_t entry_bytes(const torch::stable::Tensor& values, const torch::stable::Tensor& to, int64_t rows) {
    const int64_t entries = values.size(0) * values.size(1), width = entries > 0 ? values.numel() / entries : 0;
    STD_TORCH_CHECK(to.numel() == rows * width && values.scalar_type() == to.scalar_type(),
                    "what is stored has another shape or element type");
    return width * int64_t(to.element_size());
}

}  // namespace drafttrain
