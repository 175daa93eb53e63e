"""EAGLE-3: one layer over fused low, middle and high target states, trained on its own outputs (arXiv 2503.01840).

Shapes: B rows, T positions, A staged positions, h heads, D head width, H hidden, M predictions, V vocabulary.

At index t the drafter reads the token x[t+1] and the target's states at t; step i of training-time test reads
x[t+1+i] and its own state of step i-1 *at the same index*, and predicts x[t+2+i].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafttrain.batch import Prediction, TrainBatch
from drafttrain.drafter import Commit, draft_chain
from drafttrain.drafters import Family
from drafttrain.errors import UserError
from drafttrain.kv import KVCache
from drafttrain.layers import Attention, AttentionShape, GatedMLP, RMSNorm
from drafttrain.sampling import Sampling
from drafttrain.staged import CachedDrafter, OwnCache, Staged
from drafttrain.target import Taps, Target, TargetShape
from drafttrain.tree import DraftTree


@dataclass
class Eagle3Options:
    """The minimal form: a chain over the target's whole vocabulary."""

    family: str = "eagle3"
    steps: int = 3  # of training-time test
    draft_length: int = 4
    taps: list[int] | None = None  # three block outputs, from 0; None: 1, n/2 - 1, n - 4
    step_decay: float = 0.8  # step i (from 0) weighs step_decay ** i in the loss


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads [norm(embedding); norm(state)] and whose residual is the state, un-normed."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.norm_eps
        self.input_layernorm, self.hidden_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        attention = AttentionShape(2 * width, width, shape.heads, shape.kv_heads, shape.head_dim, shape.rope_theta)
        self.self_attn = Attention(attention)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(width, shape.intermediate_size)

    def joined(self, embedded_BTH: Tensor, state_BTH: Tensor) -> Tensor:
        return torch.cat([self.input_layernorm(embedded_BTH), self.hidden_norm(state_BTH)], -1)

    def rest(self, state_BTH: Tensor, attended_BTH: Tensor) -> Tensor:
        state_BTH = state_BTH + attended_BTH
        return state_BTH + self.mlp(self.post_attention_layernorm(state_BTH))


class Eagle3(CachedDrafter):
    """Feature drafter with its own cache; chains. After each verification it re-reads the target's states."""

    def __init__(self, options: Eagle3Options, target: Target) -> None:
        super().__init__()
        shape = target.shape
        if options.steps < 1 or options.draft_length < 1:
            raise UserError(
                f"drafter.steps is {options.steps}, drafter.draft_length {options.draft_length}; both must be 1 or more"
            )
        blocks = options.taps if options.taps is not None else default_taps(shape.blocks)
        self.taps, self.draft_length = Taps(tuple(blocks)), options.draft_length
        self.taps.check(shape.blocks)
        self.steps, self.decay = options.steps, options.step_decay
        self.fc = nn.Linear(len(blocks) * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.lm_head.weight.data.copy_(target.head_weight.detach())
        self._target = [target]  # in a list: read, never trained or saved with the drafter

    def _fuse(self, hidden: dict[int, Tensor]) -> Tensor:
        return self.fc(torch.cat([hidden[b] for b in self.taps.blocks], -1).to(self.fc.weight.dtype))

    def _logits(self, state_H: Tensor) -> Tensor:
        return self.lm_head(self.norm(state_H))

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """Training-time test: each step's state feeds the next, at the same index, not detached.

        In evaluation it goes on to the draft length, so that every depth that decoding proposes is foretold.
        """
        state_BTH, attend = self._fuse(batch.hidden), UnrolledAttention(self.midlayer.self_attn, batch)
        for step in range(self.steps if self.training else max(self.steps, self.draft_length)):
            embedded_BTH = self._target[0].embed(batch.after(1 + step)).to(state_BTH.dtype)
            joined_BTI = self.midlayer.joined(embedded_BTH, state_BTH)
            state_BTH = self.midlayer.rest(state_BTH, attend.step(joined_BTI, step))
            pairs = batch.future(2 + step)
            hidden_MH = state_BTH.flatten(0, 1)[pairs.source_M]
            yield Prediction(step, pairs.source_M, pairs.label_M, hidden_MH, self._logits, self.decay**step)

    def open(self, slots: int, max_len: int) -> OwnCache:
        kv = KVCache(1, slots, max_len, self.fc.weight.device)
        return OwnCache(kv, Staged(slots, self.draft_length, kv.length_S.device))

    def consume(self, state: OwnCache, commit: Commit, slot_B: Tensor) -> None:
        state.kv.rows(slot_B)
        self._feed(state.kv, commit.next_BA, self._fuse(commit.hidden), commit.count_B)

    def propose(self, state: OwnCache, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        kv = state.kv
        kv.rows(slot_B)
        staged = self.staged(state, slot_B)
        latest = [self._feed(kv, staged.next_BA, self._fuse(staged.hidden), staged.count_B)]
        committed_B = kv.length_B

        def advance(token_B: Tensor) -> Tensor:
            latest[0] = self._feed(kv, token_B[:, None], latest[0][:, None], torch.ones_like(token_B))
            return self._logits(latest[0])

        root_B = staged.next_BA.gather(1, (staged.count_B - 1).clamp_min(0)[:, None])[:, 0]
        steps = min(self.draft_length, depth or self.draft_length)
        tree = draft_chain(root_B, self._logits(latest[0]), advance, steps, sampling, committed_B)
        kv.rollback(committed_B)
        return tree

    def _feed(self, kv: KVCache, token_BA: Tensor, state_BAH: Tensor, count_B: Tensor) -> Tensor:
        """[B, H] the new state at each row's last column; its first `count` columns stay in the cache."""
        B, A = token_BA.shape
        column_A = torch.arange(A, device=token_BA.device)
        causal_BAA = torch.ones(A, A, dtype=torch.bool, device=token_BA.device).tril().expand(B, A, A)
        joined_BAI = self.midlayer.joined(self._target[0].embed(token_BA).to(state_BAH.dtype), state_BAH)
        attended_BAH = self.midlayer.self_attn.cached(joined_BAI, kv.length_B[:, None] + column_A, kv, 0, causal_BAA)
        state_BAH = self.midlayer.rest(state_BAH, attended_BAH)
        kv.keep(column_A.expand(B, A), count_B)
        last_B11 = (count_B - 1).clamp_min(0)[:, None, None]
        return state_BAH.gather(1, last_B11.expand(-1, 1, state_BAH.shape[-1]))[:, 0]


class UnrolledAttention:
    """Attention of training-time test: step i at index t sees step 0 causally over 0..t, and index t alone of steps 1..i."""

    def __init__(self, attention: Attention, batch: TrainBatch) -> None:
        self.attention, self.position_BT = attention, batch.position_BT
        T = batch.token_BT.shape[1]
        causal_TT = torch.ones(T, T, dtype=torch.bool, device=batch.token_BT.device).tril()
        self.seen_BTT = causal_TT & (batch.document_BT[:, :, None] == batch.document_BT[:, None])
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def step(self, joined_BTI: Tensor, step: int) -> Tensor:
        q_BhTD, k_BhTD, v_BhTD = self.attention.qkv(joined_BTI, self.position_BT + step)
        self.keys.append(self.attention.grouped(k_BhTD))
        self.values.append(self.attention.grouped(v_BhTD))
        scale = q_BhTD.shape[-1] ** -0.5
        first_BhTT = (q_BhTD @ self.keys[0].transpose(-1, -2) * scale).masked_fill(~self.seen_BTT[:, None], -torch.inf)
        own_BhTi = [(q_BhTD * k).sum(-1, keepdim=True) * scale for k in self.keys[1:]]
        share_BhTP = torch.cat([first_BhTT, *own_BhTi], -1).float().softmax(-1).to(q_BhTD.dtype)
        T = first_BhTT.shape[-1]
        mixed_BhTD = share_BhTP[..., :T] @ self.values[0]
        for i, value_BhTD in enumerate(self.values[1:]):
            mixed_BhTD = mixed_BhTD + share_BhTP[..., T + i : T + i + 1] * value_BhTD
        return self.attention.out(mixed_BhTD)


def default_taps(blocks: int) -> list[int]:
    """Low, middle and high block outputs of the official recipe; shallow targets get what they have."""
    return sorted({min(1, blocks - 1), max(blocks // 2 - 1, 0), max(blocks - 4, 0)})


FAMILY = Family("eagle3", Eagle3Options, Eagle3)
