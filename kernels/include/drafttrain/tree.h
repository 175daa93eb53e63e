// Depth, ancestors and links of a tree of at most 256 nodes, from its parents, for host and device. No node needs another's
// result. Node 0 is the root, parent[0] = -1, and every parent precedes its children.
//
// The example of tree.py, parent (-1, 0, 0, 1): depth (0, 1, 1, 2), bits (1, 3, 5, 11), child (1, 3, -1, -1),
// sibling (-1, 2, -1, -1).
#pragma once

#include <cstdint>

#include "both.h"
#include "top.h"

namespace drafttrain {

constexpr int kMostNodes = 256;
constexpr int kMostCandidates = 4096;
constexpr int kWord = 64;  // nodes whose bits share an int64

DRAFTTRAIN_BOTH int words_for(int nodes) { return nodes <= kWord ? 1 : (nodes + kWord - 1) / kWord; }

// For a tree of up to Words * kWord nodes; the number of words is a constant, so that they stay in registers.
template <int Words>
struct Links {
    int64_t depth;
    uint64_t bits[Words];  // bit j % kWord of word j / kWord: node j is this one or an ancestor of it

    // to: [Words]
    DRAFTTRAIN_BOTH void store_bits(int64_t* to) const {
        for (int w = 0; w < Words; w++) to[w] = int64_t(bits[w]);
    }
};

template <int Words>
DRAFTTRAIN_BOTH Links<Words> links_of(const int64_t* parent, int node) {
    Links<Words> links = {0, {1}};
    while (node > 0) {
        links.depth++;
        for (int w = 0; w < Words; w++)
            if (Words == 1 || node / kWord == w) links.bits[w] |= uint64_t(1) << (node % kWord);
        node = parent[node] < node ? int(parent[node]) : 0;  // an invalid parent after its child is ignored, so that walks end
    }
    return links;
}

template <int Words>
struct Constant {
    static constexpr int value = Words;
};

// f(Constant<w>()) for the w words of trees of so many nodes, 1 to kMostNodes.
template <typename F>
void by_words(int nodes, F f) {
    static_assert(kMostNodes == 4 * kWord);
    switch (words_for(nodes)) {
        case 1:
            return f(Constant<1>());
        case 2:
            return f(Constant<2>());
        case 3:
            return f(Constant<3>());
        default:
            return f(Constant<4>());
    }
}

// The first node from `start` on with this parent, or -1.
DRAFTTRAIN_BOTH int64_t next_child(const int64_t* parent, int start, int nodes, int64_t of) {
    for (int i = start; i < nodes; i++)
        if (parent[i] == of) return i;
    return -1;
}

// A candidate's key in the order of the best: the root, candidate 0, comes first.
DRAFTTRAIN_BOTH uint64_t candidate_key(float score, int i) { return i == 0 ? ~uint64_t(0) : top_key(score, uint32_t(i)); }

// The number of chosen candidates with a lower index: the place of a chosen candidate in the new tree.
DRAFTTRAIN_BOTH int64_t place_of(const int64_t* chosen, int nodes, int64_t candidate) {
    int64_t place = -1;
    for (int i = 0; i < nodes; i++) place += chosen[i] <= candidate;
    return place;
}

// The outputs for one row of a new tree: [nodes] each, bits [nodes, words].
struct BuiltRow {
    int64_t *kept, *parent, *depth, *bits, *child, *sibling;

    // The same for another row of the batch.
    DRAFTTRAIN_BOTH BuiltRow at(int64_t row, int nodes) const {
        const int64_t i = row * nodes;
        return {kept + i, parent + i, depth + i, bits + i * words_for(nodes), child + i, sibling + i};
    }

    // Makes entry i of the candidates `chosen`, in any order, a node. old: the candidates' parents. new_parent: receives the
    // nodes' parents for `link`, which may run once every entry is placed.
    DRAFTTRAIN_BOTH void place(const int64_t* chosen, int nodes, int i, const int64_t* old, int64_t* new_parent) const {
        const int64_t candidate = chosen[i], at = place_of(chosen, nodes, candidate);
        const int64_t above = candidate == 0 ? -1 : place_of(chosen, nodes, old[candidate]);
        kept[at] = candidate, parent[at] = new_parent[at] = above;
    }
    template <int Words>
    DRAFTTRAIN_BOTH void link(const int64_t* new_parent, int nodes, int i) const {
        const Links links = links_of<Words>(new_parent, i);
        depth[i] = links.depth;
        links.store_bits(bits + i * Words);
        child[i] = next_child(new_parent, i + 1, nodes, i);
        sibling[i] = next_child(new_parent, i + 1, nodes, new_parent[i]);
    }
};

// The next generation of a tree that grows: of the candidates below `width` nodes, `ranks` each, the `width` best.
struct Grow {
    int64_t width, ranks, words;
    int64_t from;  // rows of gain, token and state: as many as nodes, or one for all
    const float *score, *gain;
    const int64_t *token, *bits, *own;
    float *total, *best_score;
    int64_t *choice, *best, *best_token, *best_bits;

    DRAFTTRAIN_BOTH int candidates() const { return int(width * ranks); }
    // The row that candidate c comes from.
    DRAFTTRAIN_BOTH int64_t row_of(int64_t b, int64_t c) const { return b * from + (from == 1 ? 0 : c / ranks); }
    DRAFTTRAIN_BOTH float sum(int64_t b, int64_t c) const {
        return score[b * width + c / ranks] + gain[row_of(b, c) * ranks + c % ranks];
    }
    DRAFTTRAIN_BOTH void candidate(int64_t b, int64_t c) const {
        total[b * width * ranks + c] = sum(b, c);
        choice[b * width * ranks + c] = token[row_of(b, c) * ranks + c % ranks];
    }
    // Node w of the next generation is candidate c.
    DRAFTTRAIN_BOTH void node(int64_t b, int64_t w, int64_t c) const {
        const int64_t at = b * width + w;
        best[at] = c, best_score[at] = sum(b, c), best_token[at] = token[row_of(b, c) * ranks + c % ranks];
        for (int64_t i = 0; i < words; i++)
            best_bits[at * words + i] = bits[(b * width + c / ranks) * words + i] | own[w * words + i];
    }
};

}  // namespace drafttrain
