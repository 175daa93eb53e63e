// Launchers of tree.cuh.
#include "../../include/drafttrain/tree.cuh"
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

}  // namespace
}  // namespace drafttrain

DRAFTTRAIN_CUDA_OPS(m) {
    m.impl("tree_links", TORCH_BOX(&drafttrain::tree_links));
    m.impl("build_tree", TORCH_BOX(&drafttrain::build_tree));
}
