// The accept walks over a verified tree. Nodes are in index order, parents before children.
#pragma once

#include <cmath>
#include <cstdint>

#include "both.h"

namespace drafttrain {

// A batch of verified trees, the keys of their noise, and the outputs. Pointers that a walk does not use are null.
struct Trees {
    int64_t nodes, vocab;
    const int64_t *token, *parent, *count;  // [B, N], [B, N], [B]: real nodes
    const int64_t *position, *key, *seed;   // [B, N], [B], [1]
    const float* temperature;               // [B]
    int64_t *path, *accepted, *bonus;       // [B, N] zeros after the accepted nodes, [B], [B]
};

// Whether an earlier child of node i's parent has the same token. All earlier children are rejected when i is tried.
DRAFTTRAIN_BOTH bool is_twin(const int64_t* token, const int64_t* parent, int64_t i) {
    for (int64_t j = parent[i] + 1; j < i; j++)
        if (parent[j] == parent[i] && token[j] == token[i]) return true;
    return false;
}

// The walk along choice(i), the target's token after node i. Writes the accepted nodes to path[0..return), zeros after them,
// and the token that follows the last of them. Among children with the same token the first counts.
template <typename Choice>
DRAFTTRAIN_BOTH int64_t greedy_walk(const int64_t* token, const int64_t* parent, int64_t count, int64_t nodes, Choice choice,
                                    int64_t* path, int64_t* bonus) {
    int64_t at = 0, accepted = 1;
    for (int64_t i = 0; i < nodes; i++) path[i] = 0;
    *bonus = choice(0);
    for (int64_t i = 1; i < count; i++) {
        if (parent[i] != at || token[i] != *bonus) continue;
        path[accepted++] = at = i;
        *bonus = choice(i);
    }
    return accepted;
}

// A node in the likely walk: the length of its path (0: some node is not likely enough) and the sum of log p along it.
struct Likely {
    int64_t depth;
    double likelihood;
};

// Finds the deepest node whose whole path is likely enough; among several the one with the highest product of p, then the
// first. p(i): node i's probability, called only where its parent's path is likely enough. floor(i): the bound that the
// children of i must exceed. Writes the path as greedy_walk does; returns the number of accepted nodes.
template <typename P, typename Floor>
DRAFTTRAIN_BOTH int64_t likely_walk(const int64_t* parent, int64_t count, int64_t nodes, P p, Floor floor, Likely* found,
                                    int64_t* path) {
    int64_t last = 0;
    found[0] = {1, 0.0};
    for (int64_t i = 1; i < count; i++) {
        const Likely above = found[parent[i]];
        found[i] = {0, 0.0};
        if (above.depth == 0) continue;
        const double chance = p(i);
        if (!(chance > floor(parent[i]))) continue;
        found[i] = {above.depth + 1, above.likelihood + log(chance)};
        const Likely best = found[last];
        const bool tie = found[i].depth == best.depth;
        if (found[i].depth > best.depth || (tie && found[i].likelihood > best.likelihood)) last = i;
    }
    const int64_t accepted = found[last].depth;
    for (int64_t i = accepted; i < nodes; i++) path[i] = 0;
    for (int64_t i = accepted - 1; i >= 0; i--) {
        path[i] = last;
        last = parent[last];
    }
    return accepted;
}

}  // namespace drafttrain
