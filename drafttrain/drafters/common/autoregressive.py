"""Drafters that are language models: a cache of their own, one token after another.

Shapes: B rows, N tokens fed, A staged positions, W nodes fed at once, M nodes fed so far, R logit rows, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.drafters.common.dynamic_tree import Generation, Grower, Scored
from drafttrain.drafters.common.pending import CachedDrafter, OwnCache, Staged, with_root
from drafttrain.drafters.common.proposal import Proposal, Proposing
from drafttrain.model.drafter import Commit, draft_chain
from drafttrain.model.kv_cache import KVCache
from drafttrain.ops.tree_attention import ancestors_of


@dataclass
class AutoregressiveState(OwnCache):
    """grower: of the proposals; None: chains. others: caches of what is not the model itself."""

    grower: Grower | None
    others: list[KVCache]


@dataclass
class Above:
    """The nodes fed so far in one proposal, root excluded."""

    token_BM: Tensor
    bits_BM: Tensor
    depth_BM: Tensor

    @staticmethod
    def of(root_B: Tensor) -> Above:
        return Above(*(root_B.new_empty(len(root_B), 0) for _ in range(3)))

    def add(self, nodes: Generation) -> None:
        self.token_BM = torch.cat([self.token_BM, nodes.token_BW], 1)
        self.bits_BM = torch.cat([self.bits_BM, nodes.bits_BW], 1)
        self.depth_BM = torch.cat([self.depth_BM, torch.full_like(nodes.token_BW, nodes.depth)], 1)


class Autoregressive(CachedDrafter, Proposing):
    """Chains are sampled at a temperature above 0, and report the law q of every draft. All caches of a state are of one
    length."""

    def __init__(self, proposal: Proposal) -> None:
        super().__init__()
        self.proposal, self.draft_length, self.samples = proposal, proposal.draft_length, proposal.kind == "chain"

    @abstractmethod
    def caches_for(self, slots: int, max_len: int) -> list[KVCache]:
        """Empty ones."""

    @abstractmethod
    def run(
        self, state: AutoregressiveState, token_BN: Tensor, ancestor_BNN: Tensor | None, position_BN: Tensor, row_BR: Tensor
    ) -> Tensor | None:
        """[B, R, V] logits at the rows asked for; what is fed becomes scratch of the caches. ancestor_BNN None: causal."""

    @property
    @abstractmethod
    def last_position(self) -> int: ...

    def open(self, slots: int, max_len: int) -> AutoregressiveState:
        chain = self.proposal.kind == "chain"
        kv, *others = self.caches_for(slots, max_len if chain else max_len + self.proposal.fed)
        device = kv.device
        grower = None if chain else self.proposal.grower(device)
        return AutoregressiveState(kv, Staged(slots, self.draft_length, device), grower, others)

    def caches(self, state: Any) -> list[KVCache]:
        return [state.kv, *state.others]

    def reset(self, state: Any, slot_R: Tensor) -> None:
        super().reset(state, slot_R)
        for kv in state.others:
            kv.reset(slot_R)

    def rewind(self, state: Any, slot_B: Tensor, mark: Any) -> None:
        super().rewind(state, slot_B, mark)
        for kv in state.others:
            kv.rows(slot_B)
            kv.crop(mark[0])

    def consume(self, state: Any, commit: Commit, slot_B: Tensor) -> None:
        self._rows(state, slot_B)
        no_rows_B0 = commit.token_BA[:, :0]
        self._feed(state, commit.token_BA, commit.count_B, no_rows_B0)

    def propose(self, state: AutoregressiveState, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        self._rows(state, slot_B)
        token_BN, last_B = with_root(self.staged(state, slot_B))
        logits_BV = self._feed(state, token_BN, last_B + 1, last_B[:, None])
        committed_B = state.kv.length_B - 1  # the root's keys are scratch: the next commit brings it again

        root_B = token_BN.gather(1, last_B[:, None])[:, 0]
        if state.grower is None:
            tree = self._chain(state, root_B, logits_BV, depth, sampling)
        else:
            first = Scored(logits_BV[:, None], logits_BV[:, None, :0])
            tree = state.grower.grow(root_B, first, partial(self._score, state, Above.of(root_B)), None, depth)
        for kv in self.caches(state):
            kv.crop(committed_B)
        return tree

    def _rows(self, state: AutoregressiveState, slot_B: Tensor) -> None:
        for kv in self.caches(state):
            kv.rows(slot_B)

    def _chain(
        self, state: AutoregressiveState, root_B: Tensor, logits_BV: Tensor, depth: int | None, sampling: Sampling
    ) -> DraftTree:
        def advance(token_B: Tensor) -> Tensor:
            return self._feed(state, token_B[:, None], torch.ones_like(token_B), torch.zeros_like(token_B)[:, None])

        steps = min(self.draft_length, depth or self.draft_length)
        return draft_chain(root_B, logits_BV, advance, steps, sampling, state.kv.length_B - 1)

    def _score(self, state: AutoregressiveState, above: Above, nodes: Generation) -> Scored:
        """The generations before are computed again beside this one: no pass leaves keys behind that siblings could see."""
        W = nodes.token_BW.shape[1]
        above.add(nodes)
        M = above.token_BM.shape[1]
        position_BM = (state.kv.length_B[:, None] + above.depth_BM - 1).clamp_max(self.last_position)
        row_BW = torch.arange(M - W, M, device=position_BM.device).expand(len(position_BM), W)
        logits_BWV = self.run(state, above.token_BM, ancestors_of(above.bits_BM), position_BM, row_BW)
        assert logits_BWV is not None
        return Scored(logits_BWV, logits_BWV[..., :0])  # the model's state is its cache

    def _feed(self, state: AutoregressiveState, token_BN: Tensor, count_B: Tensor, row_BR: Tensor) -> Tensor:
        """[B, V] logits at the one row asked for, if any; the first `count` tokens stay in the cache."""
        column_N = torch.arange(token_BN.shape[1], device=token_BN.device)
        position_BN = (state.kv.length_B[:, None] + column_N).clamp_max(self.last_position)
        logits_BRV = self.run(state, token_BN, None, position_BN, row_BR)
        for kv in self.caches(state):
            kv.keep(column_N.expand_as(token_BN), count_B)
        return row_BR if logits_BRV is None else logits_BRV[:, 0]
