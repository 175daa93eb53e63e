// The greedy accept walk: from the root, follow the child whose token is the target's choice.
#pragma once

#include <cstdint>

#include "both.h"

namespace drafttrain {

// choice(i): the target's most likely token after node i. Writes the accepted nodes to path[0..return) and the token that
// follows the last of them; of several children with one token the first counts. The rest of path is zero.
template <typename Choice>
DRAFTTRAIN_BOTH int64_t greedy_walk(const int64_t* token, const int64_t* parent, int64_t count, int64_t nodes, Choice choice,
                                    int64_t* path, int64_t* bonus) {
    int64_t accepted = 0, at = 0;
    for (int64_t i = 0; i < nodes; i++) path[i] = 0;
    for (;;) {
        path[accepted++] = at;
        *bonus = choice(at);
        int64_t next = -1;
        for (int64_t i = at + 1; i < count && next < 0; i++)
            if (parent[i] == at && token[i] == *bonus) next = i;
        if (next < 0) return accepted;
        at = next;
    }
}

}  // namespace drafttrain
