"""Hydra: heads that also read the tokens drafted above them; Hydra++ passes the target's state through a layer first
(arXiv 2402.05109).

Shapes: B rows, T positions, A pending positions, W nodes scored at once, D depth of a node from 1 (root 1), P = B T positions
of a batch, K heads, M predictions, S slots, H hidden, I = (D + 1) H, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.drafters import Family
from drafttrain.drafters.common.dynamic_tree import Grower, Scored, TreeLevel
from drafttrain.drafters.common.pending import CachedState, LastState
from drafttrain.drafters.common.proposal import TreeProposal
from drafttrain.drafters.options import HydraOptions
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.cached_layers import CachedLayers, FusedLayers
from drafttrain.model.causal_attention import causal
from drafttrain.model.drafter import Commit, Drafter, FrozenRef
from drafttrain.model.layers import DecoderLayer, Linear, ResidualBlock, RMSNorm, recomputed
from drafttrain.model.shapes import TargetShape
from drafttrain.model.target import FINAL, Taps, Target
from drafttrain.ops.rms_norm import norm


class GroundedBlock(nn.Module):
    """A residual block from I to H, with `res_connection` in place of the identity. At first it gives its first H inputs."""

    def __init__(self, in_width: int, width: int) -> None:
        super().__init__()
        self.linear, self.res_connection = Linear(in_width, width), Linear(in_width, width)
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


class HydraBase(Drafter):
    """Both forms share the heads and the tree that they fill level by level.

    A node is scored from the base state of the heads and the embeddings of the tokens down to its parent.
    """

    proposal: TreeProposal
    revertible = True

    def __init__(self, options: HydraOptions, target: Target) -> None:
        shape, width = target.shape, target.shape.hidden_size
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
        self.hydra_lm_head = nn.ModuleList(Linear(width, shape.vocab_size) for _ in range(options.heads))
        for head in self.hydra_lm_head:
            head.weight.data.copy_(target.head_weight.detach())  # type: ignore[operator]
            nn.init.zeros_(head.bias)  # type: ignore[arg-type]
        self.width = width
        self._target = FrozenRef(target)

    def base(self, batch: TrainBatch) -> Tensor:
        """[B, T, H]: the base states of the heads."""
        return batch.hidden[FINAL]

    def _joined(self, state_I: Tensor, token_D: Tensor) -> Tensor:
        """[..., I + D H]: a state [..., I] and the embeddings of the D tokens that follow it."""
        return torch.cat([state_I, self._target.module.embed(token_D).flatten(-2).to(state_I.dtype)], -1)

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """Head k (from 0) knows the k + 1 tokens after its source and predicts the next one."""
        base_PH = self.base(batch).flatten(0, 1)
        future_tokens = [batch.after(1 + k).flatten() for k in range(self.draft_length)]
        for k in range(self.draft_length):
            pairs = batch.future(k + 2)
            token_MD = torch.stack([token_P[pairs.source_M] for token_P in future_tokens[: k + 1]], 1)
            joined_MI = self._joined(base_PH[pairs.source_M], token_MD)
            hidden_MH = recomputed(self.recomputes, self.hydra_mlp[k], joined_MI)
            yield Prediction(k, pairs.source_M, pairs.label_M, hidden_MH, self.hydra_lm_head[k], self.decay ** (k + 1))

    def grow(self, grower: Grower, base_BH: Tensor, root_B: Tensor, sampling: Sampling, depth: int | None) -> DraftTree:
        """All nodes of a level in one pass."""

        def scored(head: int, state_BWI: Tensor, token_BW: Tensor) -> Scored:
            joined_BWI = self._joined(state_BWI, token_BW[..., None])
            return Scored(self.hydra_lm_head[head](self.hydra_mlp[head](joined_BWI)), joined_BWI)

        def score(nodes: TreeLevel) -> Scored:
            return scored(nodes.depth, nodes.state_BWH, nodes.token_BW)

        return grower.grow(root_B, scored(0, base_BH[:, None], root_B[:, None]), score, None, sampling, depth)


class Hydra(HydraBase):
    """The base state of the heads is the target's last state: nothing to cache."""

    def open(self, slots: int, max_len: int) -> HydraState:
        return HydraState(self, slots)


class HydraState(LastState):
    def __init__(self, drafter: Hydra, slots: int) -> None:
        parameter = next(drafter.parameters())
        super().__init__(slots, drafter.width, parameter)
        self.drafter, self.grower = drafter, drafter.proposal.grower(parameter.device)

    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        return self.drafter.grow(self.grower, self.hidden_SH[slot_B], self.root_S[slot_B], sampling, depth)


class HydraPlus(HydraBase):
    """The base state of the heads is the output of a layer over all states so far, computed once per proposal."""

    def __init__(self, options: HydraOptions, target: Target) -> None:
        super().__init__(options, target)
        self.prefix = PrefixLayer(target.shape)
        self.fused_layers = FusedLayers([self.prefix])

    def base(self, batch: TrainBatch) -> Tensor:
        return self.prefix.whole(batch.hidden[FINAL], batch)

    def open(self, slots: int, max_len: int) -> PrefixState:
        return PrefixState(self, slots, max_len)


class PrefixState(CachedState):
    """The prefix layer's cache."""

    def __init__(self, drafter: HydraPlus, slots: int, max_len: int) -> None:
        self.cached = CachedLayers(drafter.fused_layers, slots, max_len)
        super().__init__(self.cached.kv, slots, drafter.draft_length)
        self.drafter, self.grower = drafter, drafter.proposal.grower(self.kv.device)

    def consume(self, commit: Commit, slot_B: Tensor) -> None:
        """Only the keys and values: later positions need nothing else of these."""
        self.kv.rows(slot_B)
        normed_BAH = self.drafter.prefix.input_layernorm(self._final(commit))
        self.drafter.fused_layers.write(normed_BAH, self.cached.meta(self.cached.after_prefix(normed_BAH.shape[1])))
        self.cached.keep_first(commit.count_B)

    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        self.kv.rows(slot_B)
        pending = self.take_pending(slot_B)
        return self.drafter.grow(self.grower, self._base(pending), pending.root_B, sampling, depth)

    def _base(self, commit: Commit) -> Tensor:
        """[B, H] the prefix layer's output at each row's last position; its first `count` positions stay in the cache."""
        final_BAH, cached = self._final(commit), self.cached
        x_BAH, delta_BAH = self.drafter.fused_layers.run(final_BAH, cached.meta(cached.after_prefix(final_BAH.shape[1])))
        cached.keep_first(commit.count_B)
        last_B1H = commit.last_B1[..., None].expand(-1, 1, final_BAH.shape[-1])
        return norm(self.drafter.prefix.norm, (x_BAH + delta_BAH).gather(1, last_B1H))[1][:, 0]

    def _final(self, commit: Commit) -> Tensor:
        """The target's post-norm states in the drafter's dtype."""
        return commit.hidden[FINAL].to(self.drafter.prefix.norm.weight.dtype)


def build(options: HydraOptions, target: Target) -> Drafter:
    return HydraPlus(options, target) if options.prefix_layer else Hydra(options, target)


FAMILY = Family("hydra", HydraOptions, build)
