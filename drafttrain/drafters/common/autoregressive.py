"""Drafters that are language models: a KV cache of their own, one token after another.

Shapes: B rows, N tokens of one pass, A pending positions, W nodes scored at once, M nodes scored so far, R logit rows,
V vocabulary, w words of ancestor bits.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial

import torch
from torch import Tensor

from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.drafters.common.dynamic_tree import Scored, TreeLevel
from drafttrain.drafters.common.pending import CachedState, with_root
from drafttrain.drafters.common.proposal import TreeProposal
from drafttrain.model.drafter import Commit, Drafter, draft_chain
from drafttrain.model.kv_cache import KVCache
from drafttrain.ops.tree_bits import ancestors_of


class Autoregressive(Drafter):
    """At a temperature above 0 it samples chains, which carry the distribution q of every draft."""

    proposal: TreeProposal
    revertible = True

    def __init__(self, proposal: TreeProposal) -> None:
        super().__init__(proposal)
        self.samples = proposal.kind == "chain"

    @abstractmethod
    def new_caches(self, slots: int, max_len: int) -> list[KVCache]:
        """Empty caches; all of them will have the same lengths."""

    @abstractmethod
    def run(
        self, caches: list[KVCache], token_BN: Tensor, ancestor_BNN: Tensor | None, position_BN: Tensor, row_BR: Tensor
    ) -> Tensor | None:
        """[B, R, V] logits at the rows asked for. The new positions become scratch of the caches.

        ancestor_BNN: as for a target.
        """

    @property
    @abstractmethod
    def generations(self) -> bool:
        """Whether a tree may come in several passes, as for a target."""

    @property
    @abstractmethod
    def last_position(self) -> int: ...

    @property
    def scratch_positions(self) -> int:
        """Positions after the text that one proposal needs in the caches, beyond those of a chain."""
        return 0 if self.proposal.kind == "chain" else self.proposal.scratch_positions

    def open(self, slots: int, max_len: int) -> AutoregressiveState:
        return AutoregressiveState(self, slots, max_len)


class AutoregressiveState(CachedState):
    def __init__(self, drafter: Autoregressive, slots: int, max_len: int) -> None:
        kv, *extra_caches = drafter.new_caches(slots, max_len + drafter.scratch_positions)
        super().__init__(kv, slots, drafter.draft_length, extra_caches)
        self.drafter, proposal = drafter, drafter.proposal
        self.grower = None if proposal.kind == "chain" else proposal.grower(kv.device)

    def consume(self, commit: Commit, slot_B: Tensor) -> None:
        self._choose_rows(slot_B)
        no_rows_B0 = commit.token_BA[:, :0]
        self._run(commit.token_BA, commit.count_B, no_rows_B0)

    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        self._choose_rows(slot_B)
        token_BN, last_B = with_root(self.take_pending(slot_B))
        logits_BRV = self._pass(token_BN, last_B[:, None])
        assert logits_BRV is not None
        marks = [kv.mark(last_B) for kv in self.own_caches]  # the root's keys are scratch: the next commit brings it again
        self._keep(last_B + 1)
        logits_BV = logits_BRV[:, 0]
        root_B = token_BN.gather(1, last_B[:, None])[:, 0]
        if self.grower is None:
            tree = self._chain(root_B, logits_BV, depth, sampling)
        else:
            first = Scored(logits_BV[:, None], logits_BV[:, None, :0])
            tree = self.grower.grow(root_B, first, partial(self._score, list[TreeLevel]()), None, sampling, depth)
        for kv, mark in zip(self.own_caches, marks, strict=True):
            kv.back_to(mark)
        return tree

    def _choose_rows(self, slot_B: Tensor) -> None:
        for kv in self.own_caches:
            kv.rows(slot_B)

    def _chain(self, root_B: Tensor, logits_BV: Tensor, depth: int | None, sampling: Sampling) -> DraftTree:
        def advance(token_B: Tensor) -> Tensor:
            return self._run(token_B[:, None], torch.ones_like(token_B), torch.zeros_like(token_B)[:, None])

        steps = min(self.drafter.draft_length, depth or self.drafter.draft_length)
        return draft_chain(root_B, logits_BV, advance, steps, sampling, self.kv.length_B - 1)

    def _score(self, above: list[TreeLevel], nodes: TreeLevel) -> Scored:
        """above: the generations scored so far; receives this one.

        Where the model takes a tree in one pass only, earlier generations are computed again with this one.
        """
        W, drafter = nodes.token_BW.shape[1], self.drafter
        above.append(nodes)
        M, bits = (
            sum(level.token_BW.shape[1] for level in above),
            [level.bits_BWw for level in above if level.bits_BWw is not None],
        )
        assert len(bits) == len(above), "trees name their nodes' ancestors"
        if drafter.generations:
            position_B1 = (self.kv.length_B + (nodes.depth - 1)).clamp_max(drafter.last_position)[:, None]
            ancestor_BWM, row_W = ancestors_of(bits[-1], M), torch.arange(W, device=position_B1.device)
            position_args = (position_B1.expand(-1, W), row_W.expand(len(position_B1), W))
            logits_BWV = drafter.run(self.own_caches, nodes.token_BW, ancestor_BWM, *position_args)
            assert logits_BWV is not None
            return Scored(logits_BWV, logits_BWV[..., :0])
        depth_BM = torch.cat([torch.full_like(level.token_BW, level.depth) for level in above], 1)
        position_BM = (self.kv.length_B[:, None] + depth_BM - 1).clamp_max(drafter.last_position)
        row_BW = torch.arange(M - W, M, device=position_BM.device).expand(len(position_BM), W)
        token_BM, ancestor_BMM = torch.cat([level.token_BW for level in above], 1), ancestors_of(torch.cat(bits, 1))
        logits_BWV = drafter.run(self.own_caches, token_BM, ancestor_BMM, position_BM, row_BW)
        assert logits_BWV is not None
        return Scored(logits_BWV, logits_BWV[..., :0])  # the model's state is its cache

    def _run(self, token_BN: Tensor, count_B: Tensor, row_BR: Tensor) -> Tensor:
        """[B, V] logits at the one row asked for, if any; the first `count` tokens stay in the cache."""
        logits_BRV = self._pass(token_BN, row_BR)
        self._keep(count_B)
        return row_BR if logits_BRV is None else logits_BRV[:, 0]

    def _pass(self, token_BN: Tensor, row_BR: Tensor) -> Tensor | None:
        """[B, R, V] logits at the rows asked for; the tokens become scratch."""
        column_N = torch.arange(token_BN.shape[1], device=token_BN.device)
        position_BN = (self.kv.length_B[:, None] + column_N).clamp_max(self.drafter.last_position)
        return self.drafter.run(self.own_caches, token_BN, None, position_BN, row_BR)

    def _keep(self, count_B: Tensor) -> None:
        for kv in self.own_caches:
            kv.advance(count_B)
