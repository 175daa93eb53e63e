"""Drafters of one attention layer that read a token and the state before it, and feed their own state back.

Shapes: B rows, T positions, A staged positions, W nodes, M predictions, h heads, D head width, H hidden, I what attention
reads, V the drafter's vocabulary.

At index t the layer reads the token x[t+1] and the state at t, the target's where it is known. What comes out at t is the
state of t + 1, from which x[t+2] is foretold. Trained on its own outputs, step i reads at index t the token x[t+1+i] and its
own state of step i-1 *at the same index*, and foretells x[t+2+i].
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.drafters.common.dynamic_tree import Generation, Grower, Scored, Scratch
from drafttrain.drafters.common.pending import CachedDrafter, OwnCache, Staged
from drafttrain.drafters.common.proposal import Proposal, Proposing
from drafttrain.model.batch import Pairs, TrainBatch
from drafttrain.model.drafter import Commit, draft_chain
from drafttrain.model.frozen_ref import FrozenRef
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.layers import Attention, recomputed
from drafttrain.model.target import Target
from drafttrain.model.unrolled_attention import unrolled
from drafttrain.ops.remap import remap_logits


@dataclass
class RecurrentState(OwnCache):
    """grower: of the proposals; None: chains."""

    grower: Grower | None


class Recurrent(CachedDrafter, Proposing):
    """A family gives the layer in parts. After each verification the accepted positions are read again with the target's
    states: what was drafted leaves nothing behind.
    """

    def __init__(self, proposal: Proposal, target: Target) -> None:
        super().__init__()
        self.proposal, self.draft_length = proposal, proposal.draft_length
        self.samples = proposal.kind == "chain"
        self._target = FrozenRef(target)

    @property
    @abstractmethod
    def attention(self) -> Attention: ...

    @abstractmethod
    def fuse(self, hidden: dict[int, Tensor]) -> Tensor:
        """[..., H] the state at committed positions, from the target's states there."""

    @abstractmethod
    def enter(self, token_BN: Tensor, state_BNH: Tensor) -> tuple[Tensor, Tensor]:
        """(the residual, [B, N, H]; what attention reads, [B, N, I])."""

    @abstractmethod
    def leave(self, residual_BNH: Tensor, attended_BNH: Tensor) -> Tensor:
        """[B, N, H] the new state: for the head and for the next step."""

    @abstractmethod
    def logits(self, state_H: Tensor) -> Tensor:
        """[..., V]."""

    @property
    def ids(self) -> Tensor | None:
        """[V] the target's ids of the drafter's vocabulary, ascending; None: it is the target's."""
        return None

    def embed(self, token_BN: Tensor, like: Tensor) -> Tensor:
        return self._target.module.embed(token_BN).to(like.dtype)

    def unroll(
        self, batch: TrainBatch, state_BTH: Tensor, steps: int, detach: bool = False
    ) -> Iterator[tuple[int, Pairs, Tensor]]:
        """(step, pairs, new state [M, H] at their sources) of each step. detach: no gradient flows from step to step."""
        attention, keys, values = UnrolledAttention(self.attention, batch), list[Tensor](), list[Tensor]()

        def advance(token_BT: Tensor, state_BTH: Tensor, *past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            residual_BTH, read_BTI = self.enter(token_BT, state_BTH)
            attended_BTH, key_BhTD, value_BhTD = attention.step(read_BTI, past)
            return self.leave(residual_BTH, attended_BTH), key_BhTD, value_BhTD

        for step in range(steps):
            inputs = (batch.after(1 + step), state_BTH, *keys, *values)
            state_BTH, key_BhTD, value_BhTD = recomputed(self.recomputes, advance, *inputs)
            keys, values = [*keys, key_BhTD], [*values, value_BhTD]
            pairs = batch.future(2 + step)
            yield step, pairs, state_BTH.flatten(0, 1)[pairs.source_M]
            state_BTH = state_BTH.detach() if detach else state_BTH

    def fed(self, length: int) -> int:
        return length * self.draft_length

    def steps_of(self, trained: int) -> int:
        """In evaluation as deep as decoding proposes, so that every depth is foretold."""
        return trained if self.training else max(trained, self.draft_length)

    def open(self, slots: int, max_len: int) -> RecurrentState:
        device = self.attention.o_proj.weight.device
        kv = KVCache(1, slots, max_len + self.proposal.fed, device)
        grower = None if self.proposal.kind == "chain" else self.proposal.grower(device)
        return RecurrentState(kv, Staged(slots, self.draft_length, device), grower)

    def consume(self, state: OwnCache, commit: Commit, slot_B: Tensor) -> None:
        state.kv.rows(slot_B)
        self._read(state.kv, commit)

    def _read(self, kv: KVCache, commit: Commit) -> Tensor:
        """[B, H] the new state at each row's last position; its first `count` positions stay in the cache."""
        B, A = commit.next_BA.shape
        column_A = torch.arange(A, device=commit.next_BA.device)
        causal_BAA = torch.ones(A, A, dtype=torch.bool, device=column_A.device).tril().expand(B, A, A)
        residual_BAH, read_BAI = self.enter(commit.next_BA, self.fuse(commit.hidden))
        attended_BAH = self.attention.cached(read_BAI, kv.length_B[:, None] + column_A, kv, 0, causal_BAA)
        state_BAH = self.leave(residual_BAH, attended_BAH)
        kv.keep(column_A.expand(B, A), commit.count_B)
        last_B11 = (commit.count_B - 1).clamp_min(0)[:, None, None]
        return state_BAH.gather(1, last_B11.expand(-1, 1, state_BAH.shape[-1]))[:, 0]

    def propose(self, state: RecurrentState, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        kv = state.kv
        kv.rows(slot_B)
        staged = self.staged(state, slot_B)
        root_B = staged.next_BA.gather(1, (staged.count_B - 1).clamp_min(0)[:, None])[:, 0]
        first_B1H, scratch = self._read(kv, staged)[:, None], Scratch(kv)
        first = Scored(self.logits(first_B1H), first_B1H)

        def feed(nodes: Generation) -> Scored:
            residual_BWH, read_BWI = self.enter(nodes.token_BW, nodes.state_BWH)
            attended_BWH = scratch.attend(self.attention, read_BWI, nodes.depth, nodes.bits_BW)
            state_BWH = self.leave(residual_BWH, attended_BWH)
            return Scored(self.logits(state_BWH), state_BWH)

        if state.grower is not None:
            return state.grower.grow(root_B, first, feed, self.ids, depth)
        latest = [first]

        def advance(token_B: Tensor) -> Tensor:
            number = scratch.fed + 1
            bits_B1 = torch.full_like(token_B, (1 << number) - 1)[:, None]
            latest[0] = feed(Generation(token_B[:, None], latest[0].state_BWH, number, bits_B1))
            return self._whole(latest[0])

        steps = min(self.draft_length, depth or self.draft_length)
        return draft_chain(root_B, self._whole(first), advance, steps, sampling, kv.length_B)

    def _whole(self, scored: Scored) -> Tensor:
        """[B, V] one node's logits over the target's vocabulary."""
        logits_BV = scored.logits_BWV[:, 0]
        return logits_BV if self.ids is None else remap_logits(logits_BV, self.ids, self._target.module.shape.vocab_size)


class UnrolledAttention:
    """Attention of training on own outputs: step i at index t sees step 0 over 0..t, and index t alone of steps 1..i."""

    def __init__(self, attention: Attention, batch: TrainBatch) -> None:
        self.attention, self.position_BT = attention, batch.position_BT
        self.documents = batch.sees()
        self.span = batch.span

    def step(self, read_BTI: Tensor, past: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(what comes out, [B, T, H]; this step's keys and values). past: those of the earlier steps, all keys first.

        Keys and values of sequences held together are those of all positions, for this process's heads.
        """
        steps = len(past) // 2
        q_BhTD, k_BhTD, v_BhTD = self.attention.qkv(read_BTI, self.position_BT + steps)
        k_BhTD, v_BhTD = self.attention.grouped(k_BhTD), self.attention.grouped(v_BhTD)
        if self.span is not None:
            q_BhTD, k_BhTD, v_BhTD = (self.span.gather(x) for x in (q_BhTD, k_BhTD, v_BhTD))
        keys, values = [*past[:steps], k_BhTD], [*past[steps:], v_BhTD]
        mixed_BhTD = unrolled(q_BhTD, keys, values, self.documents)
        return self.attention.out(mixed_BhTD if self.span is None else self.span.scatter(mixed_BhTD)), k_BhTD, v_BhTD
