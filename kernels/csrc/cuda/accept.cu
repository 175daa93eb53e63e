// Launchers of distribution.cuh and accept.cuh: shares of all rows by splits, then a block for each tree or row.
#include <algorithm>

#include "../../include/drafttrain/accept.cuh"
#include "../verdicts.h"
#include "aligned.cuh"
#include "launch.cuh"

namespace drafttrain {
namespace {

dim3 shares_grid(int64_t rows, int64_t vocab) {
    STD_TORCH_CHECK(vocab >= 1 && vocab < (int64_t(1) << 27), "a vocabulary has 1 to 2^27 tokens");
    return dim3(rows, splits_of(vocab));
}

// Dynamic shared memory beside a finder: a block has 48 KiB unless a kernel asks for more, of which the splits' sums take
// eight bytes for each 4,096 tokens.
size_t beside_finder(size_t room) {
    constexpr size_t kLimit = (48 << 10) - sizeof(Finder) - 64;
    STD_TORCH_CHECK(room <= kLimit, "sampling needs ", room, " bytes of shared memory for these nodes and tokens, of ", kLimit,
                    ": use fewer nodes or a smaller vocabulary");
    return room;
}

void greedy_accept(const Tensor& logits, const Tensor& token, const Tensor& parent, const Tensor& count, const Tensor& path,
                   const Tensor& accepted, const Tensor& bonus) {
    const Trees trees = trees_of(token, parent, count, path, accepted, bonus);
    const int64_t batch = token.size(0), rows = batch * trees.nodes, vocab = logits.size(2);
    if (batch == 0) return;
    const Launcher run(logits);
    const dim3 grid = shares_grid(rows, vocab);
    const Tensor best = torch::stable::new_empty(token, {rows, grid.y});
    by_type(logits, [&](auto kind) {
        using T = decltype(kind);
        by_flag(aligned(vocab * sizeof(T), data<T>(logits)), [&](auto packed) {
            run(argmax_shares<T, packed()>, grid, dim3(kShareThreads), 0, data<T>(logits), trees.count, trees.nodes, vocab,
                data<uint64_t>(best));
        });
    });
    run(follow_rows, dim3(batch), dim3(kFollowThreads), follow_room(trees.nodes), trees, data<uint64_t>(best), int(grid.y),
        nullptr);
}

void choice_accept(const Tensor& choice, const Tensor& token, const Tensor& parent, const Tensor& count, const Tensor& path,
                   const Tensor& accepted, const Tensor& bonus) {
    const Trees trees = trees_of(token, parent, count, path, accepted, bonus);
    if (token.size(0) == 0) return;
    const Launcher run(choice);
    const dim3 threads(std::min<int64_t>(kFollowThreads, ceil_div(trees.nodes, kWarp) * kWarp));
    run(follow_rows, dim3(token.size(0)), threads, follow_room(trees.nodes), trees, nullptr, 0, data<int64_t>(choice));
}

// The shares of all rows of real nodes, as a tensor of bytes that outlives the launches that read it. count may be null.
template <bool dots>
Tensor shares_of(const Launcher& run, const Tensor& logits, const float* temperature, const int64_t* count, int64_t nodes) {
    const int64_t vocab = logits.size(logits.dim() - 1), rows = logits.numel() / vocab;
    const dim3 grid = shares_grid(rows, vocab);
    const Tensor shares = torch::stable::new_empty(logits, {rows, grid.y, int64_t(sizeof(Share))}, ScalarType::Byte);
    by_type(logits, [&](auto kind) {
        using T = decltype(kind);
        by_flag(aligned(vocab * sizeof(T), data<T>(logits)), [&](auto packed) {
            run(split_shares<T, packed(), dots>, grid, dim3(kShareThreads), 0, data<T>(logits), temperature, count, nodes,
                vocab, data<Share>(shares));
        });
    });
    return shares;
}

void lossless_accept(const Tensor& logits, const std::optional<Tensor>& q, const std::optional<Tensor>& sampled,
                     const Tensor& token, const Tensor& parent, const Tensor& count, const Tensor& position,
                     const Tensor& temperature, const Tensor& key, const Tensor& seed, bool lazy, const Tensor& path,
                     const Tensor& accepted, const Tensor& bonus) {
    const int64_t batch = token.size(0), vocab = logits.size(2);
    const Trees trees =
        sampled_trees(trees_of(token, parent, count, path, accepted, bonus), vocab, position, temperature, key, seed);
    STD_TORCH_CHECK(!q || q->numel() == logits.numel(), "q has a distribution for every node, over the target's vocabulary");
    if (batch == 0) return;
    const Launcher run(logits);
    const size_t room = beside_finder(lossless_room(trees.nodes, splits_of(vocab)));
    const int64_t each = int64_t(logits.element_size());
    const bool packs = aligned(vocab * each, data<char>(logits)) && aligned(vocab * sizeof(float), data<float>(q));
    lazy = lazy && packs && each == 2;  // in float32 the walk would need too many registers
    const Tensor shares =
        lazy ? torch::stable::new_empty(logits, {batch, splits_of(vocab), int64_t(sizeof(Share))}, ScalarType::Byte)
             : shares_of<false>(run, logits, trees.temperature, trees.count, trees.nodes);
    by_type(logits, [&](auto kind) {
        using T = decltype(kind);
        const auto walk = [&](auto kernel) {
            run(kernel, dim3(batch), dim3(kDrawThreads), room, trees, data<T>(logits), data<Share>(shares), data<float>(q),
                data<bool>(sampled));
        };
        if constexpr (sizeof(T) == 2)
            if (lazy) return walk(lossless_rows<T, true, true>);
        packs ? walk(lossless_rows<T, true, false>) : walk(lossless_rows<T, false, false>);
    });
}

void likely_accept(const Tensor& logits, const Tensor& token, const Tensor& parent, const Tensor& count, const Tensor& position,
                   const Tensor& temperature, const Tensor& key, const Tensor& seed, double epsilon, double delta,
                   const Tensor& path, const Tensor& accepted, const Tensor& bonus) {
    const int64_t batch = token.size(0), vocab = logits.size(2);
    const Trees trees =
        sampled_trees(trees_of(token, parent, count, path, accepted, bonus), vocab, position, temperature, key, seed);
    if (batch == 0) return;
    const Launcher run(logits);
    const size_t room = beside_finder(likely_room(trees.nodes, splits_of(vocab)));
    const Tensor shares = shares_of<true>(run, logits, trees.temperature, trees.count, trees.nodes);
    by_type(logits, [&](auto kind) {
        using T = decltype(kind);
        run(likely_rows<T>, dim3(batch), dim3(kDrawThreads), room, trees, data<T>(logits), data<Share>(shares), epsilon, delta);
    });
}

void sample(const Tensor& logits, const Tensor& temperature, const Tensor& key, const Tensor& position, const Tensor& seed,
            int64_t lane, int64_t draw, const Tensor& token) {
    const int64_t rows = logits.size(0), vocab = logits.size(1);
    if (rows == 0) return;
    const Launcher run(logits);
    const size_t room = beside_finder(splits_of(vocab) * sizeof(double));
    const Tensor shares = shares_of<false>(run, logits, data<float>(temperature), nullptr, 1);
    by_type(logits, [&](auto kind) {
        using T = decltype(kind);
        run(sample_rows<T>, dim3(rows), dim3(kDrawThreads), room, data<T>(logits), data<Share>(shares),
            data<float>(temperature), data<int64_t>(key), data<int64_t>(position), data<int64_t>(seed), lane, draw, vocab,
            data<int64_t>(token));
    });
}

}  // namespace
}  // namespace drafttrain

DRAFTTRAIN_CUDA_OPS(m) {
    m.impl("greedy_accept", TORCH_BOX(&drafttrain::greedy_accept));
    m.impl("choice_accept", TORCH_BOX(&drafttrain::choice_accept));
    m.impl("lossless_accept", TORCH_BOX(&drafttrain::lossless_accept));
    m.impl("likely_accept", TORCH_BOX(&drafttrain::likely_accept));
    m.impl("sample", TORCH_BOX(&drafttrain::sample));
}
