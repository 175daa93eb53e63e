"""Decoding with a module for each draft depth, as DeepSeek-V3 trains them (arXiv 2412.19437, section 2.2).

Shapes: B rows, A pending positions, M modules, H hidden, V vocabulary.

At index t module k (from 0) reads the token x[t+1+k] and the state of module k-1 at t, module 0 the target's. It sees its own
keys at 0..t and predicts x[t+2+k].

Worked example: two modules, text `a b c` with the root r. Module 0 reads (b, h[0]), (c, h[1]), (r, h[2]) and drafts d. Module 1
then reads c, r, d at the same indices and drafts e. Its token at index 2 is a draft, so it reads index 2 again when that token
is known: the last M - 1 positions stay pending, and every cache holds the positions before them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.drafters.common.pending import CachedState, concatenated
from drafttrain.drafters.common.recurrent import Passes
from drafttrain.model.drafter import Commit, draft_chain


class PerDepth(Protocol):
    """A drafter with a module for each depth."""

    @property
    def draft_length(self) -> int: ...

    @property
    def modules_count(self) -> int: ...

    def passes(self, slots: int, positions: int) -> Passes:
        """An empty cache with a layer for each module."""
        ...

    def fuse(self, hidden: dict[int, Tensor]) -> Tensor:
        """[..., H] the state that module 0 reads."""
        ...

    def depth(self, number: int, token_BA: Tensor, state_BAH: Tensor, positions: Passes) -> Tensor:
        """[B, A, H] the state of a module at the columns after each row's prefix, which become scratch of its cache."""
        ...

    def logits(self, state_H: Tensor) -> Tensor: ...


def split_at(commit: Commit, keep_B: Tensor, columns: int) -> Commit:
    """Each row's positions after its first `keep_B`, at most `columns`, left-aligned."""
    column_BC = keep_B[:, None] + torch.arange(columns, device=keep_B.device)
    column_BC = column_BC.clamp_max(commit.token_BA.shape[1] - 1)
    index_BC1 = column_BC[..., None]
    hidden = {key: x.gather(1, index_BC1.expand(-1, -1, x.shape[-1])) for key, x in commit.hidden.items()}
    return Commit(commit.token_BA.gather(1, column_BC), commit.next_BA.gather(1, column_BC), hidden, commit.count_B - keep_B)


class DepthState(CachedState):
    """The state of a drafter with a module for each depth. It drafts chains."""

    def __init__(self, drafter: PerDepth, slots: int, max_len: int) -> None:
        self.drafter = drafter
        self.again = drafter.modules_count - 1  # positions that some module reads again
        self.cached = drafter.passes(slots, max_len + drafter.draft_length)
        super().__init__(self.cached.kv, slots, drafter.draft_length)

    def observe_prompt(self, commit: Commit, slot_B: Tensor) -> None:
        if self.pending.most:
            commit = concatenated(self.pending.take(slot_B, self.again, others=True), commit)
        self._consume_all_but_last(commit, slot_B)

    def take_pending(self, slot_B: Tensor) -> Commit:
        return self.pending.take(slot_B, self.pending.step + self.again if self.kv.static else None)

    def consume(self, commit: Commit, slot_B: Tensor) -> None:
        """Bring all but each row's last positions into the caches."""
        chain = DepthChain(self, commit, slot_B)
        for _ in range(1, self.drafter.modules_count):
            chain.next(torch.zeros_like(commit.root_B))

    def _consume_all_but_last(self, commit: Commit, slot_B: Tensor) -> None:
        self.consume(commit, slot_B)
        self._keep(commit, slot_B)

    def _keep(self, commit: Commit, slot_B: Tensor) -> None:
        """Commit the positions that no module reads again; the others stay pending."""
        keep_B = (commit.count_B - self.again).clamp_min(0)
        self.cached.keep_first(keep_B)
        self.pending.add(split_at(commit, keep_B, self.again), slot_B, empty=True)

    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        drafter, pending = self.drafter, self.take_pending(slot_B)
        chain = DepthChain(self, pending, slot_B)
        steps = min(drafter.draft_length, depth or drafter.draft_length)
        position_B = self.kv.length_B + pending.count_B
        tree = draft_chain(pending.root_B, chain.logits(), chain.next, steps, sampling, position_B)
        while chain.number + 1 < drafter.modules_count:
            chain.next(torch.zeros_like(pending.root_B))  # their keys of known tokens are needed all the same
        self._keep(pending, slot_B)
        return tree


class DepthChain:
    """One pass of the modules over the pending positions, one after another."""

    def __init__(self, state: DepthState, commit: Commit, slot_B: Tensor) -> None:
        state.kv.rows(slot_B)
        self.state, self.last_B1, self.number = state, commit.last_B1, 0
        self.token_BA = commit.next_BA
        self.state_BAH = self._run(state.drafter.fuse(commit.hidden))

    def _run(self, state_BAH: Tensor) -> Tensor:
        return self.state.drafter.depth(self.number, self.token_BA, state_BAH, self.state.cached)

    def logits(self) -> Tensor:
        """[B, V] of the token after each row's last one."""
        index_B1H = self.last_B1[..., None].expand(-1, 1, self.state_BAH.shape[-1])
        return self.state.drafter.logits(self.state_BAH.gather(1, index_B1H))[:, 0]

    def next(self, token_B: Tensor) -> Tensor:
        """Run the next module, whose tokens are one later. token_B: the one after each row's last; as `logits`."""
        self.number += 1
        later_BA = torch.cat([self.token_BA[:, 1:], self.token_BA[:, -1:]], 1)
        self.token_BA = later_BA.scatter(1, self.last_B1, token_B[:, None])
        self.state_BAH = self._run(self.state_BAH)
        return self.logits()
