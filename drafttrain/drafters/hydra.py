"""Hydra: heads that also read the tokens drafted above them; Hydra++ passes the target's state through a layer first
(arXiv 2402.05109).

Shapes: B rows, T positions, A pending positions, W nodes scored at once, D depth of a node from 1 (root 1), P = B T positions
of a batch, K heads, M predictions, S slots, H hidden, I = (D + 1) H, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.drafters import Family
from drafttrain.drafters.common.dynamic_tree import Generation, Grower, Scored
from drafttrain.drafters.common.last_state import LastState
from drafttrain.drafters.common.pending import CachedState
from drafttrain.drafters.common.proposal import TreeOptions, TreeProposal
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.causal_attention import causal
from drafttrain.model.drafter import Commit, Drafter
from drafttrain.model.frozen_ref import FrozenRef
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.layers import DecoderLayer, ResidualBlock, RMSNorm, recomputed
from drafttrain.model.target import FINAL, Taps, Target, TargetShape


@dataclass
class HydraOptions(TreeOptions):
    """K sequentially dependent heads; with `prefix_layer` Hydra++."""

    family: str = "hydra"
    heads: int = 4
    layers: int = 4  # blocks per head; the first one narrows state and embeddings to the hidden size
    prefix_layer: bool = False  # one decoder layer over the target's states, with its own KV cache
    head_decay: float = 1.0  # head k (from 1) weighs head_decay ** k in the loss


class GroundedBlock(nn.Module):
    """A residual block from I to H, with `res_connection` in place of the identity. At first it gives its first H inputs."""

    def __init__(self, in_width: int, width: int) -> None:
        super().__init__()
        self.linear, self.res_connection = nn.Linear(in_width, width), nn.Linear(in_width, width)
        for zero in (self.linear.weight, self.linear.bias, self.res_connection.bias):
            nn.init.zeros_(zero)
        nn.init.eye_(self.res_connection.weight)

    def forward(self, x_I: Tensor) -> Tensor:
        out_H: Tensor = self.res_connection(x_I) + F.silu(self.linear(x_I))
        return out_H


class PrefixLayer(DecoderLayer):
    """One decoder layer and a norm over the target's post-norm states, causal within a document."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def whole(self, hidden_BTH: Tensor, batch: TrainBatch) -> Tensor:
        """Over whole documents, without a cache."""
        q_BhTD, k_BhTD, v_BhTD = self.self_attn.qkv(self.input_layernorm(hidden_BTH), batch.position_BT)
        out_BTH: Tensor = self.norm(self.leave(hidden_BTH, self.self_attn.out(causal(q_BhTD, k_BhTD, v_BhTD, batch.sees()))))
        return out_BTH

    def store(self, hidden_BAH: Tensor, kv: KVCache, count_B: Tensor) -> None:
        """Only the keys and values: later positions need nothing else of these."""
        k_BhAD, v_BhAD = self.self_attn.kv(self.input_layernorm(hidden_BAH), _positions(kv, hidden_BAH))
        kv.append(0, k_BhAD, v_BhAD)
        _keep(kv, hidden_BAH, count_B)

    def last(self, hidden_BAH: Tensor, kv: KVCache, count_B: Tensor) -> Tensor:
        """[B, H] at each row's last position; its first `count` positions stay in the cache."""
        B, A, H = hidden_BAH.shape
        causal_BAA = torch.ones(A, A, dtype=torch.bool, device=hidden_BAH.device).tril().expand(B, A, A)
        normed_BAH, at_BA = self.input_layernorm(hidden_BAH), _positions(kv, hidden_BAH)
        attended_BAH = self.self_attn.cached(normed_BAH, at_BA, kv, 0, causal_BAA)
        _keep(kv, hidden_BAH, count_B)
        last_B1H = (count_B - 1).clamp_min(0)[:, None, None].expand(-1, 1, H)
        out_B1H: Tensor = self.norm(self.leave(hidden_BAH.gather(1, last_B1H), attended_BAH.gather(1, last_B1H)))
        return out_B1H[:, 0]


def _positions(kv: KVCache, hidden_BAH: Tensor) -> Tensor:
    return kv.length_B[:, None] + torch.arange(hidden_BAH.shape[1], device=hidden_BAH.device)


def _keep(kv: KVCache, hidden_BAH: Tensor, count_B: Tensor) -> None:
    B, A, _ = hidden_BAH.shape
    kv.keep(torch.arange(A, device=hidden_BAH.device).expand(B, A), count_B)


class HydraBase(Drafter):
    """Both forms share the heads and the tree that they fill level by level.

    A node is scored from the base state of the heads and the embeddings of the tokens down to its parent.
    """

    proposal: TreeProposal
    revertible = True

    def __init__(self, options: HydraOptions, target: Target) -> None:
        shape, width = target.shape, target.shape.hidden_size
        if options.heads < 1 or options.layers < 1:
            raise UserError(f"drafter.heads is {options.heads}, drafter.layers {options.layers}; both must be 1 or more")
        if options.heads + 2 > shape.max_positions:
            raise UserError(
                f"drafter.heads is {options.heads}; a context of {shape.max_positions} allows {shape.max_positions - 2}"
            )
        super().__init__(TreeProposal(options, options.heads, target))
        self.taps, self.decay = Taps(final=True), options.head_decay
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(GroundedBlock((k + 2) * width, width), *(ResidualBlock(width) for _ in range(options.layers - 1)))
            for k in range(options.heads)
        )
        self.hydra_lm_head = nn.ModuleList(nn.Linear(width, shape.vocab_size) for _ in range(options.heads))
        for head in self.hydra_lm_head:
            head.weight.data.copy_(target.head_weight.detach())  # type: ignore[operator]
            nn.init.zeros_(head.bias)  # type: ignore[arg-type]
        self.width = width
        self._target = FrozenRef(target)

    def base(self, batch: TrainBatch) -> Tensor:
        """[B, T, H]: the base states of the heads."""
        return batch.hidden[FINAL]

    def _joined(self, state_I: Tensor, known_D: Tensor) -> Tensor:
        """[..., I + D H]: a state [..., I] and the embeddings of the D tokens that follow it."""
        return torch.cat([state_I, self._target.module.embed(known_D).flatten(-2).to(state_I.dtype)], -1)

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """Head k (from 0) knows the k + 1 tokens after its source and predicts the next one."""
        base_PH = self.base(batch).flatten(0, 1)
        after = [batch.after(1 + k).flatten() for k in range(self.draft_length)]
        for k in range(self.draft_length):
            pairs = batch.future(k + 2)
            known_MD = torch.stack([token_P[pairs.source_M] for token_P in after[: k + 1]], 1)
            joined_MI = self._joined(base_PH[pairs.source_M], known_MD)
            hidden_MH = recomputed(self.recomputes, self.hydra_mlp[k], joined_MI)
            yield Prediction(k, pairs.source_M, pairs.label_M, hidden_MH, self.hydra_lm_head[k], self.decay ** (k + 1))

    def grow(self, grower: Grower, base_BH: Tensor, root_B: Tensor, depth: int | None) -> DraftTree:
        """All nodes of a level in one pass."""

        def scored(head: int, state_BWI: Tensor, token_BW: Tensor) -> Scored:
            joined_BWI = self._joined(state_BWI, token_BW[..., None])
            return Scored(self.hydra_lm_head[head](self.hydra_mlp[head](joined_BWI)), joined_BWI)

        def score(nodes: Generation) -> Scored:
            return scored(nodes.depth, nodes.state_BWH, nodes.token_BW)

        return grower.grow(root_B, scored(0, base_BH[:, None], root_B[:, None]), score, None, depth)


class Hydra(HydraBase):
    """The base state of the heads is the target's last state: nothing to cache."""

    def open(self, slots: int, max_len: int) -> HydraState:
        return HydraState(self, slots)


class HydraState(LastState):
    def __init__(self, drafter: Hydra, slots: int) -> None:
        like = next(drafter.parameters())
        super().__init__(slots, drafter.width, like)
        self.drafter, self.grower = drafter, drafter.proposal.grower(like.device)

    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        return self.drafter.grow(self.grower, self.hidden_SH[slot_B], self.root_S[slot_B], depth)


class HydraPlus(HydraBase):
    """The base state of the heads is the output of a layer over all states so far, computed once per proposal."""

    def __init__(self, options: HydraOptions, target: Target) -> None:
        super().__init__(options, target)
        self.prefix = PrefixLayer(target.shape)

    def base(self, batch: TrainBatch) -> Tensor:
        return self.prefix.whole(batch.hidden[FINAL], batch)

    def open(self, slots: int, max_len: int) -> PrefixState:
        return PrefixState(self, slots, max_len)


class PrefixState(CachedState):
    """The prefix layer's cache."""

    def __init__(self, drafter: HydraPlus, slots: int, max_len: int) -> None:
        kv = KVCache(1, slots, max_len, next(drafter.parameters()).device)
        super().__init__(kv, slots, drafter.draft_length)
        self.drafter, self.grower = drafter, drafter.proposal.grower(kv.device)

    def consume(self, commit: Commit, slot_B: Tensor) -> None:
        self.kv.rows(slot_B)
        self.drafter.prefix.store(self._final(commit), self.kv, commit.count_B)

    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        self.kv.rows(slot_B)
        pending = self.take_pending(slot_B)
        base_BH = self.drafter.prefix.last(self._final(pending), self.kv, pending.count_B)
        return self.drafter.grow(self.grower, base_BH, pending.root_B, depth)

    def _final(self, commit: Commit) -> Tensor:
        """The target's post-norm states in the drafter's dtype."""
        return commit.hidden[FINAL].to(self.drafter.prefix.norm.weight.dtype)


def build(options: HydraOptions, target: Target) -> Drafter:
    return HydraPlus(options, target) if options.prefix_layer else Hydra(options, target)


FAMILY = Family("hydra", HydraOptions, build)
