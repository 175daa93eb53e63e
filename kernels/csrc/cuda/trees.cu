// Launchers of tree.cuh.
#include "../../include/drafttrain/tree.cuh"
#include "../grows.h"
#include "aligned.cuh"
#include "launch.cuh"

namespace drafttrain {
namespace {

void tree_links(const Tensor& parent, const Tensor& depth, const Tensor& bits) {
    const int64_t batch = parent.size(0), nodes = parent.size(1);
    STD_TORCH_CHECK(nodes <= kMostNodes, "trees have at most 256 nodes");
    STD_TORCH_CHECK(bits.numel() == parent.numel() * words_for(int(nodes)), "bits do not fit");
    if (parent.numel() == 0) return;
    const Launcher run(parent);
    by_words(int(nodes), [&](auto words) {
        run(link_trees<words.value>, dim3(batch), dim3(words.value * kWord), 0, data<int64_t>(parent), int(nodes),
            data<int64_t>(depth), data<int64_t>(bits));
    });
}

void build_tree(const Tensor& parent, const Tensor& score, const Tensor& kept, const Tensor& new_parent, const Tensor& depth,
                const Tensor& bits, const Tensor& child, const Tensor& sibling) {
    const int64_t batch = parent.size(0), candidates = parent.size(1), nodes = kept.size(1);
    STD_TORCH_CHECK(nodes >= 1 && nodes <= kMostNodes && nodes <= candidates && candidates <= kMostCandidates,
                    "trees have 1 to 256 nodes, of as many to 4096 candidates");
    STD_TORCH_CHECK(bits.numel() == batch * nodes * words_for(int(nodes)), "bits do not fit");
    STD_TORCH_CHECK(score.scalar_type() == ScalarType::Float, "scores are float32");
    if (batch == 0) return;
    const Launcher run(parent);
    const BuiltRow built = {data<int64_t>(kept), data<int64_t>(new_parent), data<int64_t>(depth),
                            data<int64_t>(bits), data<int64_t>(child),      data<int64_t>(sibling)};
    by_words(int(nodes), [&](auto words) {
        run(build_trees<words.value>, dim3(batch), dim3(kBuildThreads), build_room<words.value>(int(candidates)),
            data<int64_t>(parent), data<float>(score), int(candidates), int(nodes), built);
    });
}

void grow_tree(const Tensor& score, const Tensor& gain, const Tensor& token, const Tensor& state, const Tensor& bits,
               const Tensor& own, const Tensor& total, const Tensor& choice, const Tensor& best, const Tensor& best_score,
               const Tensor& best_token, const Tensor& best_state, const Tensor& best_bits) {
    const Grow g = grow_of(score, gain, token, bits, own, total, choice, best, best_score, best_token, best_bits);
    const int64_t batch = score.size(0), bytes = entry_bytes(state, best_state, batch * g.width);
    if (batch == 0) return;
    const Launcher run(score);
    const int each = int(ceil_div(g.candidates(), kSelectThreads));
    by_unit(bytes, state, best_state, [&](auto unit) {
        using Unit = decltype(unit);
        run(grow_rows<Unit>, dim3(unsigned(g.width), unsigned(batch)), dim3(kSelectThreads),
            select_room(int(g.width), each) * sizeof(uint64_t), g, data<Unit>(state), data<Unit>(best_state),
            bytes / int64_t(sizeof(Unit)));
    });
}

}  // namespace
}  // namespace drafttrain

DRAFTTRAIN_CUDA_OPS(m) {
    m.impl("tree_links", TORCH_BOX(&drafttrain::tree_links));
    m.impl("build_tree", TORCH_BOX(&drafttrain::build_tree));
    m.impl("grow_tree", TORCH_BOX(&drafttrain::grow_tree));
}
