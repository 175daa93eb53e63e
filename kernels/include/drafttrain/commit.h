// What a decode step makes of each row's accepted path: its tokens, the text's state, and the record that the host reads.
#pragma once

#include <cstdint>

#include "both.h"

namespace drafttrain {

struct Commits {
    int64_t nodes, width, stride, stops;  // of a tree, columns of a path, entries between two paths, stop tokens of a slot
    bool skips, counts;                   // rows whose text has ended commit nothing; the text's length and end are kept here
    const int64_t *token, *parent, *real, *path, *count, *bonus, *slot, *stop, *limit;
    int64_t *root, *made, *taken, *next, *kept, *record;
    bool* done;

    DRAFTTRAIN_BOTH int64_t accepted_at(int64_t row, int64_t a) const { return path[row * stride + a]; }
    DRAFTTRAIN_BOTH int64_t last(int64_t row) const { return accepted_at(row, count[row] - 1); }
    DRAFTTRAIN_BOTH int64_t kept_of(int64_t row) const { return skips && done[slot[row]] ? 0 : count[row]; }

    // Writes column a of a row, whose path has `keeps` entries; whether its new token ends the text.
    DRAFTTRAIN_BOTH bool column(int64_t row, int64_t a, int64_t keeps) const {
        const int64_t* tokens = token + row * nodes;
        const int64_t end = keeps > 0 ? keeps - 1 : 0;
        const int64_t after = a == end ? bonus[row] : tokens[accepted_at(row, a + 1 < width ? a + 1 : 0)];
        taken[row * width + a] = tokens[accepted_at(row, a)];
        next[row * width + a] = record[row * (width + 3) + a] = after;
        bool stops_here = false;
        for (int64_t k = 0; k < stops; k++) stops_here |= stop[slot[row] * stops + k] == after;
        return stops_here && a < keeps;
    }

    DRAFTTRAIN_BOTH bool is_child(int64_t row, int64_t node, int64_t last) const { return parent[row * nodes + node] == last; }

    // Writes what a row has once. open: the last accepted node has children.
    DRAFTTRAIN_BOTH void finish(int64_t row, int64_t keeps, bool stopped, bool open) const {
        int64_t* counted = record + row * (width + 3) + width;
        counted[0] = kept[row] = keeps, counted[1] = real[row], counted[2] = open;
        root[slot[row]] = bonus[row];
        if (!counts) return;
        const int64_t length = made[slot[row]] + keeps;
        made[slot[row]] = length;
        if (stopped || length >= limit[slot[row]]) done[slot[row]] = true;
    }
};

}  // namespace drafttrain
