// Draft trees on a CPU: top-k, the best candidates, and depth and links from the parents.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <optional>

#include "../include/drafttrain/simd.h"
#include "../include/drafttrain/top.h"
#include "../include/drafttrain/tree.h"
#include "grows.h"
#include "types.h"

namespace {

using namespace drafttrain;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The k greatest keys of a row in descending order. Vectors without a value above the k-th are skipped.
template <typename T>
void top_keys(const T* x, int64_t width, int64_t k, uint64_t* keys) {
    std::fill(keys, keys + k, 0);
    for (int64_t start = 0; start < width; start += kLanes) {
        const int64_t stop = std::min<int64_t>(width, start + kLanes);
        if (keys[k - 1] != 0 && stop - start == kLanes) {
            const Floats v = load(x + start);
            if (greatest(v == v ? v : all(-INFINITY)) <= value_of(keys[k - 1])) continue;
        }
        for (int64_t i = start; i < stop; i++) {
            const uint64_t key = top_key(to_float(x[i]), uint32_t(i));
            if (key < keys[k - 1]) continue;
            int64_t at = k - 1;
            for (; at > 0 && key > keys[at - 1]; at--) keys[at] = keys[at - 1];
            keys[at] = key;
        }
    }
}

// The logarithm of a row's sum of exponentials, less `best`, its greatest value.
template <typename T>
float log_sum(const T* x, int64_t width, float best) {
    if (!(best > -INFINITY && best < INFINITY)) return 0.0f;
    Floats total{};
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) total += exp(load(x + i) - best);
    float rest = 0.0f;
    for (; i < width; i++) rest += std::exp(to_float(x[i]) - best);
    return std::log(sum(total) + rest);
}

template <typename T>
void top_of(const Tensor& logits, const int64_t* ids, const Tensor& value, const Tensor& index, bool log) {
    const int64_t rows = logits.size(0), width = logits.size(1), k = value.size(1);
    const auto some = [&](int64_t begin, int64_t end) {
        uint64_t keys[kMostTop];
        for (int64_t r = begin; r < end; r++) {
            top_keys(data<T>(logits) + r * width, width, k, keys);
            const float best = log ? value_of(keys[0]) : 0.0f;
            const float less = log ? log_sum(data<T>(logits) + r * width, width, best) : 0.0f;
            for (int64_t i = 0; i < k; i++) {
                data<float>(value)[r * k + i] = log ? std::min(value_of(keys[i]) - best - less, 0.0f) : value_of(keys[i]);
                data<int64_t>(index)[r * k + i] = ids == nullptr ? int64_t(index_of(keys[i])) : ids[index_of(keys[i])];
            }
        }
    };
    if (rows == 1)
        some(0, 1);
    else
        torch::stable::parallel_for(0, rows, 1, some);
}

void top_or_log(const Tensor& logits, const std::optional<Tensor>& ids, const Tensor& value, const Tensor& index, bool log) {
    const int64_t k = value.size(1);
    STD_TORCH_CHECK(k >= 1 && k <= kMostTop && k <= logits.size(1), "top finds 1 to 64 of a row, and no more than there are");
    STD_TORCH_CHECK(value.scalar_type() == ScalarType::Float, "top's values are float32");
    const int64_t* names = ids ? data<int64_t>(*ids) : nullptr;
    by_type(logits, [&](auto kind) { top_of<decltype(kind)>(logits, names, value, index, log); });
}

void top(const Tensor& logits, const std::optional<Tensor>& ids, const Tensor& value, const Tensor& index) {
    top_or_log(logits, ids, value, index, false);
}

void top_log(const Tensor& logits, const std::optional<Tensor>& ids, const Tensor& value, const Tensor& index) {
    top_or_log(logits, ids, value, index, true);
}

void tree_links(const Tensor& parent, const Tensor& depth, const Tensor& bits) {
    const int64_t nodes = parent.size(1);
    STD_TORCH_CHECK(nodes <= kMostNodes, "trees have at most 256 nodes");
    STD_TORCH_CHECK(bits.numel() == parent.numel() * words_for(int(nodes)), "bits do not fit");
    by_words(int(nodes), [&](auto words) {
        for (int64_t i = 0; i < parent.numel(); i++) {
            const Links links = links_of<words.value>(data<int64_t>(parent) + i / nodes * nodes, int(i % nodes));
            data<int64_t>(depth)[i] = links.depth;
            links.store_bits(data<int64_t>(bits) + i * words.value);
        }
    });
}

void join_trees(const Tensor& token, const Tensor& parent, const Tensor& count, const Tensor& other_token,
                const Tensor& other_parent, const Tensor& other_count, const Tensor& joined_token, const Tensor& joined_parent,
                const Tensor& joined_count, const Tensor& ancestor) {
    const int64_t first = token.size(1), second = other_token.size(1), nodes = joined_token.size(1);
    STD_TORCH_CHECK(nodes == first + second - 1 && second <= kMostNodes, "the joined tree has other nodes than both");
    const auto at = [](const Tensor& x, int64_t row, int64_t column) {  // rows may be one and the same
        return data<int64_t>(x)[row * x.stride(0) + column * x.stride(1)];
    };
    for (int64_t b = 0; b < token.size(0); b++) {
        int64_t *names = data<int64_t>(joined_token) + b * nodes, *above = data<int64_t>(joined_parent) + b * nodes;
        const int64_t ours = data<int64_t>(count)[b], theirs = data<int64_t>(other_count)[b];
        for (int64_t i = 0; i < nodes; i++)
            names[i] = i < ours ? at(token, b, i) : 0, above[i] = i < ours ? at(parent, b, i) : 0;
        int64_t total = ours, place[kMostNodes] = {0};
        for (int64_t m = 1; m < theirs; m++) {
            const int64_t up = place[at(other_parent, b, m)], name = at(other_token, b, m);
            int64_t i = 1;
            while (i < ours && (above[i] != up || names[i] != name)) i++;
            if (i == ours) i = total++, names[i] = name, above[i] = up;
            place[m] = i;
        }
        data<int64_t>(joined_count)[b] = total;
        bool* mask = data<bool>(ancestor) + b * nodes * nodes;
        std::fill_n(mask, nodes * nodes, false);
        for (int64_t i = 0; i < nodes; i++) {  // every parent precedes its children
            if (i > 0) std::copy_n(mask + above[i] * nodes, i, mask + i * nodes);
            mask[i * nodes + i] = true;
        }
    }
}

void build_tree(const Tensor& parent, const Tensor& score, const Tensor& kept, const Tensor& new_parent, const Tensor& depth,
                const Tensor& bits, const Tensor& child, const Tensor& sibling) {
    const int64_t batch = parent.size(0), candidates = parent.size(1);
    const int nodes = int(kept.size(1));
    STD_TORCH_CHECK(nodes >= 1 && nodes <= kMostNodes && nodes <= candidates && candidates <= kMostCandidates,
                    "trees have 1 to 256 nodes, of as many to 4096 candidates");
    STD_TORCH_CHECK(bits.numel() == batch * nodes * words_for(nodes), "bits do not fit");
    STD_TORCH_CHECK(score.scalar_type() == ScalarType::Float, "scores are float32");
    const BuiltRow built = {data<int64_t>(kept), data<int64_t>(new_parent), data<int64_t>(depth),
                            data<int64_t>(bits), data<int64_t>(child),      data<int64_t>(sibling)};
    for (int64_t b = 0; b < batch; b++) {
        uint64_t keys[kMostCandidates];
        int64_t chosen[kMostNodes], above[kMostNodes];
        for (int64_t c = 0; c < candidates; c++) keys[c] = candidate_key(data<float>(score)[b * candidates + c], int(c));
        std::nth_element(keys, keys + nodes - 1, keys + candidates, std::greater<>());
        for (int i = 0; i < nodes; i++) chosen[i] = index_of(keys[i]);
        const BuiltRow row = built.at(b, nodes);
        for (int i = 0; i < nodes; i++) row.place(chosen, nodes, i, data<int64_t>(parent) + b * candidates, above);
        by_words(nodes, [&](auto words) {
            for (int i = 0; i < nodes; i++) row.link<words.value>(above, nodes, i);
        });
    }
}

void grow_tree(const Tensor& score, const Tensor& gain, const Tensor& token, const Tensor& state, const Tensor& bits,
               const Tensor& own, const Tensor& total, const Tensor& choice, const Tensor& best, const Tensor& best_score,
               const Tensor& best_token, const Tensor& best_state, const Tensor& best_bits) {
    const Grow g = grow_of(score, gain, token, bits, own, total, choice, best, best_score, best_token, best_bits);
    const int64_t batch = score.size(0), bytes = entry_bytes(state, best_state, batch * g.width);
    for (int64_t b = 0; b < batch; b++) {
        uint64_t keys[kMostTop];
        for (int64_t c = 0; c < g.candidates(); c++) g.candidate(b, c);
        top_keys(g.total + b * g.candidates(), g.candidates(), g.width, keys);
        for (int64_t w = 0; w < g.width; w++) {
            const int64_t c = index_of(keys[w]);
            g.node(b, w, c);
            std::memcpy(data<char>(best_state) + (b * g.width + w) * bytes, data<char>(state) + g.row_of(b, c) * bytes, bytes);
        }
    }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(drafttrain, CPU, m) {
    m.impl("top", TORCH_BOX(&top));
    m.impl("top_log", TORCH_BOX(&top_log));
    m.impl("tree_links", TORCH_BOX(&tree_links));
    m.impl("join_trees", TORCH_BOX(&join_trees));
    m.impl("build_tree", TORCH_BOX(&build_tree));
    m.impl("grow_tree", TORCH_BOX(&grow_tree));
}
