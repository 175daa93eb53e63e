"""Hydra: heads that also read the tokens drafted above them; Hydra++ passes the target's state through a layer first
(arXiv 2402.05109).

Shapes: B rows, T positions, A staged positions, N tree nodes, P nodes with children, C children, D depth of a node from 1
(root 1), K heads, M predictions, S slots, H hidden, I = (D + 1) H, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafttrain.batch import Prediction, TrainBatch
from drafttrain.drafter import Commit, Drafter
from drafttrain.drafters import Family
from drafttrain.errors import UserError
from drafttrain.kv import KVCache
from drafttrain.layers import Attention, AttentionShape, GatedMLP, ResidualBlock, RMSNorm
from drafttrain.ops.top import top
from drafttrain.sampling import Sampling
from drafttrain.staged import CachedDrafter, OwnCache, Staged, split_last
from drafttrain.target import FINAL, Taps, Target, TargetShape
from drafttrain.tree import DraftTree, Path, TreeShape, tuned_paths


@dataclass
class HydraOptions:
    """K sequentially dependent heads; with `prefix_layer` Hydra++."""

    family: str = "hydra"
    heads: int = 4
    layers: int = 4  # blocks per head; the first one narrows state and embeddings to the hidden size
    prefix_layer: bool = False  # one decoder layer over the target's states, with a cache of its own
    head_decay: float = 1.0  # head k (from 1) weighs head_decay ** k in the loss
    tree: list[list[int]] | None = None  # rank paths; None: searched on held-out text after training


class GroundedBlock(nn.Module):
    """A residual block from I to H: `res_connection` in the identity's place. At the start it gives its first H inputs back."""

    def __init__(self, in_width: int, width: int) -> None:
        super().__init__()
        self.linear, self.res_connection = nn.Linear(in_width, width), nn.Linear(in_width, width)
        for zero in (self.linear.weight, self.linear.bias, self.res_connection.bias):
            nn.init.zeros_(zero)
        nn.init.eye_(self.res_connection.weight)

    def forward(self, x_I: Tensor) -> Tensor:
        out_H: Tensor = self.res_connection(x_I) + F.silu(self.linear(x_I))
        return out_H


class PrefixLayer(nn.Module):
    """One decoder layer and a norm over the target's post-norm states, causal within a document."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        attention = AttentionShape(width, width, shape.heads, shape.kv_heads, shape.head_dim, shape.rope_theta)
        self.self_attn = Attention(attention)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(width, shape.intermediate_size)
        self.norm = RMSNorm(width, eps)

    def whole(self, hidden_BTH: Tensor, batch: TrainBatch) -> Tensor:
        """Over whole documents, without a cache."""
        q_BhTD, k_BhTD, v_BhTD = self.self_attn.qkv(self.input_layernorm(hidden_BTH), batch.position_BT)
        T = hidden_BTH.shape[1]
        causal_TT = torch.ones(T, T, dtype=torch.bool, device=hidden_BTH.device).tril()
        seen_BTT = causal_TT & (batch.document_BT[:, :, None] == batch.document_BT[:, None])
        keys_BhTD, values_BhTD = self.self_attn.grouped(k_BhTD), self.self_attn.grouped(v_BhTD)
        mixed_BhTD = F.scaled_dot_product_attention(q_BhTD, keys_BhTD, values_BhTD, attn_mask=seen_BTT[:, None])
        return self._rest(hidden_BTH, self.self_attn.out(mixed_BhTD))

    def store(self, hidden_BAH: Tensor, kv: KVCache, count_B: Tensor) -> None:
        """Only the keys and values: all that later positions need of these."""
        k_BhAD, v_BhAD = self.self_attn.kv(self.input_layernorm(hidden_BAH), _positions(kv, hidden_BAH))
        kv.put(0, k_BhAD, v_BhAD)
        _keep(kv, hidden_BAH, count_B)

    def last(self, hidden_BAH: Tensor, kv: KVCache, count_B: Tensor) -> Tensor:
        """[B, H] at each row's last position; its first `count` positions stay in the cache."""
        B, A, H = hidden_BAH.shape
        causal_BAA = torch.ones(A, A, dtype=torch.bool, device=hidden_BAH.device).tril().expand(B, A, A)
        normed_BAH, at_BA = self.input_layernorm(hidden_BAH), _positions(kv, hidden_BAH)
        attended_BAH = self.self_attn.cached(normed_BAH, at_BA, kv, 0, causal_BAA)
        _keep(kv, hidden_BAH, count_B)
        last_B1H = (count_B - 1).clamp_min(0)[:, None, None].expand(-1, 1, H)
        return self._rest(hidden_BAH.gather(1, last_B1H), attended_BAH.gather(1, last_B1H))[:, 0]

    def _rest(self, hidden_BTH: Tensor, attended_BTH: Tensor) -> Tensor:
        hidden_BTH = hidden_BTH + attended_BTH
        out_BTH: Tensor = self.norm(hidden_BTH + self.mlp(self.post_attention_layernorm(hidden_BTH)))
        return out_BTH


def _positions(kv: KVCache, hidden_BAH: Tensor) -> Tensor:
    return kv.length_B[:, None] + torch.arange(hidden_BAH.shape[1], device=hidden_BAH.device)


def _keep(kv: KVCache, hidden_BAH: Tensor, count_B: Tensor) -> None:
    B, A, _ = hidden_BAH.shape
    kv.keep(torch.arange(A, device=hidden_BAH.device).expand(B, A), count_B)


@dataclass(frozen=True, slots=True)
class Level:
    """The nodes of one depth that have children. path_PD: the nodes from the root to each. A child of column c is the
    choice of rank rank_C[c] after the parent in row parent_C[c] of path_PD.

    tree.py's example: level 0 has path ((0,),), parent (0, 0), rank (0, 1); level 1 has path ((0, 1),), parent (0,), rank (0,).
    """

    path_PD: Tensor
    parent_C: Tensor
    rank_C: Tensor
    ranks: int


def levels(shape: TreeShape, device: torch.device) -> list[Level]:
    index: dict[Path, int] = {(): 0} | {path: i for i, path in enumerate(shape.paths, start=1)}
    found = []
    for depth in range(shape.max_depth):
        children = [path for path in shape.paths if len(path) == depth + 1]
        parents = sorted({path[:-1] for path in children})
        path_PD = [[index[parent[:i]] for i in range(depth + 1)] for parent in parents]
        parent_C, rank_C = torch.tensor([[parents.index(path[:-1]), path[-1]] for path in children], device=device).T
        found.append(Level(torch.tensor(path_PD, device=device), parent_C, rank_C, 1 + max(path[-1] for path in children)))
    return found


@dataclass(frozen=True, slots=True)
class Plan:
    """The tree on the drafter's device. shapes: by depth - 1, the last is the whole tree; levels: of the whole."""

    shapes: list[TreeShape]
    levels: list[Level]


class Heads(Drafter):
    """What both forms share: the heads, and the static tree that they fill level by level."""

    def __init__(self, options: HydraOptions, target: Target) -> None:
        super().__init__()
        shape, width = target.shape, target.shape.hidden_size
        if options.heads < 1 or options.layers < 1:
            raise UserError(f"drafter.heads is {options.heads}, drafter.layers {options.layers}; both must be 1 or more")
        if options.heads + 2 > shape.max_positions:
            raise UserError(
                f"drafter.heads is {options.heads}; a context of {shape.max_positions} allows {shape.max_positions - 2}"
            )
        self.taps, self.draft_length, self.decay = Taps(final=True), options.heads, options.head_decay
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(GroundedBlock((k + 2) * width, width), *(ResidualBlock(width) for _ in range(options.layers - 1)))
            for k in range(options.heads)
        )
        self.hydra_lm_head = nn.ModuleList(nn.Linear(width, shape.vocab_size) for _ in range(options.heads))
        for head in self.hydra_lm_head:
            head.weight.data.copy_(target.head_weight.detach())  # type: ignore[operator]
            nn.init.zeros_(head.bias)  # type: ignore[arg-type]
        self._width = width
        self._target = [target]  # in a list: read, never trained or saved with the drafter
        self._fixed = options.tree is not None
        self.shape = self._checked(options.tree or [[0] * d for d in range(1, options.heads + 1)])

    def _checked(self, paths: Sequence[Sequence[int]]) -> TreeShape:
        shape = TreeShape.of(paths)
        if shape.max_depth > self.draft_length:
            raise UserError(
                f"drafter.tree reaches depth {shape.max_depth}; {self.draft_length} heads allow {self.draft_length}"
            )
        return shape

    def base(self, batch: TrainBatch) -> Tensor:
        """[B, T, H]: the states that the heads stand on."""
        return batch.hidden[FINAL]

    def _grounded(self, k: int, base_H: Tensor, known_D: Tensor) -> Tensor:
        """[..., H]: head k on a state [..., H] and the k + 1 tokens [..., D] that follow it, the root first."""
        embedded_I = self._target[0].embed(known_D).flatten(-2).to(base_H.dtype)
        out_H: Tensor = self.hydra_mlp[k](torch.cat([base_H, embedded_I], -1))
        return out_H

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """Head k (from 0) knows the k + 1 tokens after its source and predicts the next one."""
        base_PH = self.base(batch).flatten(0, 1)
        after = [batch.after(1 + k).flatten() for k in range(self.draft_length)]
        for k in range(self.draft_length):
            pairs = batch.future(k + 2)
            known_MD = torch.stack([token_P[pairs.source_M] for token_P in after[: k + 1]], 1)
            hidden_MH = self._grounded(k, base_PH[pairs.source_M], known_MD)
            yield Prediction(k, pairs.source_M, pairs.label_M, hidden_MH, self.hydra_lm_head[k], self.decay ** (k + 1))

    def plan(self, device: torch.device) -> Plan:
        depths = range(1, self.shape.max_depth + 1)
        shapes = [TreeShape.of([p for p in self.shape.paths if len(p) <= depth]).to(device) for depth in depths]
        return Plan(shapes, levels(self.shape, device))

    def grow(self, plan: Plan, base_BH: Tensor, root_B: Tensor, depth: int | None) -> DraftTree:
        """All nodes of a level in one pass."""
        shape, B = plan.shapes[min(depth or len(plan.shapes), len(plan.shapes)) - 1], len(root_B)
        token_BN = root_B[:, None]
        for k, level in enumerate(plan.levels[: shape.max_depth]):
            P = len(level.path_PD)
            hidden_BPH = self._grounded(k, base_BH[:, None].expand(-1, P, -1), token_BN[:, level.path_PD])
            choice_BPR = top(self.hydra_lm_head[k](hidden_BPH).flatten(0, 1), level.ranks)[1].view(B, P, -1)
            token_BN = torch.cat([token_BN, choice_BPR[:, level.parent_C, level.rank_C]], 1)
        return DraftTree.static(token_BN, shape)

    def paths(self) -> list[Path]:
        return list(self.shape.paths)

    def tune(self, texts: Sequence[Tensor], nodes: int) -> None:
        """A head is ranked given the true tokens above it: what it meets at a node whose path is right."""
        if not self._fixed:
            self.shape = self._checked(tuned_paths(texts, nodes) or [(0,)])

    def decode_settings(self) -> dict[str, Any]:
        return {"tree": [list(p) for p in self.shape.paths]}

    def use_decode_settings(self, settings: dict[str, Any]) -> None:
        if "tree" in settings:
            self.shape = self._checked(settings["tree"])


@dataclass
class HydraState:
    """The target's post-norm state at the last committed position, and the root token, per slot."""

    hidden_SH: Tensor
    root_S: Tensor
    plan: Plan


class Hydra(Heads):
    """The heads stand on the target's last state: nothing to cache."""

    def open(self, slots: int, max_len: int) -> HydraState:
        like = next(self.parameters())
        root_S = torch.zeros(slots, dtype=torch.long, device=like.device)
        return HydraState(like.new_zeros(slots, self._width), root_S, self.plan(like.device))

    def reset(self, state: HydraState, slot_R: Tensor) -> None:
        state.hidden_SH[slot_R], state.root_S[slot_R] = 0.0, 0

    def observe(self, state: HydraState, commit: Commit, slot_B: Tensor) -> None:
        _, last = split_last(commit)
        new_B, held_BH = last.count_B > 0, state.hidden_SH[slot_B]
        state.hidden_SH[slot_B] = torch.where(new_B[:, None], last.hidden[FINAL][:, 0].to(held_BH.dtype), held_BH)
        state.root_S[slot_B] = torch.where(new_B, last.next_BA[:, 0], state.root_S[slot_B])

    def mark(self, state: HydraState, slot_B: Tensor) -> tuple[Tensor, Tensor]:
        return state.hidden_SH[slot_B], state.root_S[slot_B]

    def rewind(self, state: HydraState, slot_B: Tensor, mark: tuple[Tensor, Tensor]) -> None:
        state.hidden_SH[slot_B], state.root_S[slot_B] = mark

    def propose(self, state: HydraState, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        return self.grow(state.plan, state.hidden_SH[slot_B], state.root_S[slot_B], depth)


@dataclass
class PrefixState(OwnCache):
    """The prefix layer's cache, and what waits for it."""

    plan: Plan


class HydraPlus(CachedDrafter, Heads):
    """The heads stand on a layer over all states so far, computed once per proposal."""

    def __init__(self, options: HydraOptions, target: Target) -> None:
        super().__init__(options, target)
        self.prefix = PrefixLayer(target.shape)

    def base(self, batch: TrainBatch) -> Tensor:
        return self.prefix.whole(batch.hidden[FINAL], batch)

    def open(self, slots: int, max_len: int) -> PrefixState:
        kv = KVCache(1, slots, max_len, next(self.parameters()).device)
        device = kv.length_S.device
        return PrefixState(kv, Staged(slots, self.draft_length, device), self.plan(device))

    def consume(self, state: OwnCache, commit: Commit, slot_B: Tensor) -> None:
        state.kv.rows(slot_B)
        self.prefix.store(self._own(commit), state.kv, commit.count_B)

    def propose(self, state: PrefixState, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        state.kv.rows(slot_B)
        staged = self.staged(state, slot_B)
        base_BH = self.prefix.last(self._own(staged), state.kv, staged.count_B)
        root_B = staged.next_BA.gather(1, (staged.count_B - 1).clamp_min(0)[:, None])[:, 0]
        return self.grow(state.plan, base_BH, root_B, depth)

    def _own(self, commit: Commit) -> Tensor:
        """The target's states in the drafter's dtype."""
        return commit.hidden[FINAL].to(self.prefix.norm.weight.dtype)


def build(options: HydraOptions, target: Target) -> Drafter:
    return HydraPlus(options, target) if options.prefix_layer else Hydra(options, target)


FAMILY = Family("hydra", HydraOptions, build)
