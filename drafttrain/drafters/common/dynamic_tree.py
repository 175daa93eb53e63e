"""Trees for drafters that score a node from its token and its parent's state: one shape, or grown by confidence.

Shapes: B rows, W nodes scored at once, M nodes scored so far, C candidates, N tree nodes, F nodes with children, R ranks,
h heads, D head width, H state, I input width of a projection, V vocabulary (the drafter's).

The root is in the drafter's cache already when the first choices below it are known. The nodes of each generation that get
children are scored in one pass, as scratch positions after the committed prefix:

    scored         generation 1      generation 2
    node           a    b            a1   b3         chosen: the W likeliest paths so far, or those of a static shape
    slot           0    1            2    3          node i takes cache position length + i
    sees           0    1            0 2  1 3        besides the prefix: its ancestors among the nodes scored
    rotary at      length            length + 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.core.tree import DraftTree, Path, TreeShape
from drafttrain.model.attention import pages_in_place
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.layers import Attention
from drafttrain.ops.build_tree import MOST_CANDIDATES, build_tree
from drafttrain.ops.top import top
from drafttrain.ops.tree_attention import MOST_NODES, ancestors_of, visible


@dataclass(frozen=True, slots=True)
class Generation:
    """Nodes to be scored in one pass."""

    token_BW: Tensor
    state_BWH: Tensor  # of their parents
    depth: int  # of all of them, from 1
    bits_BW: Tensor  # bit i: the i-th node scored, counted from the first generation, is the node or its ancestor


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of a generation. W = 1: the same for all its nodes. The next generation's states may be wider."""

    logits_BWV: Tensor  # of the token after each node, over the drafter's vocabulary
    state_BWH: Tensor  # from which the nodes below are scored


Score = Callable[[Generation], Scored]


class Grower(Protocol):
    """Builds trees from a drafter's scores."""

    def grow(self, root_B: Tensor, first: Scored, score: Score, ids: Tensor | None, depth: int | None) -> DraftTree:
        """A tree no deeper than `depth`.

        first: scores of the root, W = 1. score: scores further nodes. ids: target ids of the drafter's vocabulary.
        """
        ...


def grown_from_slots(
    grower: Grower, root_B: Tensor, logits_BKV: Tensor, ids: Tensor | None = None, depth: int | None = None
) -> DraftTree:
    """A tree of drafts that do not know each other's tokens: draft k's logits are the same below all nodes of depth k."""
    no_state_B10 = logits_BKV[:, :1, :0]

    def scored(draft: int) -> Scored:
        return Scored(logits_BKV[:, draft, None], no_state_B10)

    def score(nodes: Generation) -> Scored:
        return scored(nodes.depth)

    return grower.grow(root_B, scored(0), score, ids, min(logits_BKV.shape[1], depth or logits_BKV.shape[1]))


class Scratch:
    """One layer's attention for the generations of one proposal.

    The keys of each generation are written after the prefix, together with those of the generations before. The cache's length
    never grows: nothing has to be rolled back, and the next commit overwrites them.
    """

    def __init__(self, kv: KVCache, layer: int = 0) -> None:
        self.kv, self.layer, self.nodes = kv, layer, 0
        self._k_BhMD: Tensor | None = None
        self._v_BhMD: Tensor | None = None

    def attend(self, attention: Attention, x_BWI: Tensor, depth: int, bits_BW: Tensor) -> Tensor:
        """[B, W, H]: each new node sees its row's prefix, its ancestors and itself."""
        kv, (B, W, _) = self.kv, x_BWI.shape
        position_BW = (kv.length_B + depth - 1)[:, None].expand(B, W)
        q_BhWD, k_BhWD, v_BhWD = attention.qkv(x_BWI, position_BW)
        if self._k_BhMD is not None and self._v_BhMD is not None:
            k_BhWD, v_BhWD = torch.cat([self._k_BhMD, k_BhWD], 2), torch.cat([self._v_BhMD, v_BhWD], 2)
        self._k_BhMD, self._v_BhMD = k_BhWD, v_BhWD
        self.nodes = M = k_BhWD.shape[2]
        bits_BM = F.pad(bits_BW, (M - W, 0))
        kv.append(self.layer, k_BhWD, v_BhWD)
        pages = pages_in_place(kv)
        if pages is not None:  # the operator's queries are all nodes whose keys are scratch; the earlier ones get zeros
            q_BMhD, scale = F.pad(q_BhWD, (0, 0, M - W, 0)).transpose(1, 2), q_BhWD.shape[-1] ** -0.5
            mixed_BMI = pages.attend(self.layer, q_BMhD, bits_BM, F.pad(position_BW, (M - W, 0)), scale)
            out_BWH: Tensor = attention.o_proj(mixed_BMI[:, M - W :])
            return out_BWH
        keys_BhPD, values_BhPD = kv.read(self.layer, M)
        seen_BWP = visible(kv.length_B, kv.longest, ancestors_of(bits_BM))[:, M - W :, : keys_BhPD.shape[2]]
        keys_BhPD, values_BhPD = attention.grouped(keys_BhPD), attention.grouped(values_BhPD)
        return attention.out(F.scaled_dot_product_attention(q_BhWD, keys_BhPD, values_BhPD, seen_BWP[:, None]))


@dataclass(frozen=True, slots=True)
class Level:
    """The nodes of one depth in a static tree."""

    above_W: Tensor  # each node's parent: its place among the nodes scored before
    rank_W: Tensor
    inner_F: Tensor  # the nodes with children
    bits_F: Tensor  # as in `Generation`


@dataclass(frozen=True, slots=True)
class StaticTree:
    """One shape for every proposal."""

    shapes: list[TreeShape]  # the tree cut at depth 1, 2, ...
    levels: list[Level]

    @staticmethod
    def of(paths: Sequence[Path], device: torch.device) -> StaticTree:
        depths = range(1, 1 + max(map(len, paths)))
        shapes = [TreeShape.of([p for p in paths if len(p) <= depth]).to(device) for depth in depths]
        above: dict[Path, int] = {(): 0}  # places of the nodes scored last
        bits: dict[Path, int] = {(): 0}
        inner, levels, slot = {p[:-1] for p in paths}, [], 0
        for depth in depths:
            nodes = sorted(p for p in paths if len(p) == depth)
            parents = [p for p in nodes if p in inner]
            columns = [above[p[:-1]] for p in nodes], [p[-1] for p in nodes], [nodes.index(p) for p in parents]
            bits = {p: bits[p[:-1]] | 1 << slot + i for i, p in enumerate(parents)}
            slot += len(parents)
            signed = [b - (1 << 64) if b >= 1 << 63 else b for b in bits.values()]
            levels.append(Level(*(torch.tensor(c, dtype=torch.long, device=device) for c in (*columns, signed))))
            above = {p: i for i, p in enumerate(parents)}
        return StaticTree(shapes, levels)

    def grow(self, root_B: Tensor, first: Scored, score: Score, ids: Tensor | None, depth: int | None) -> DraftTree:
        """As `Grower.grow`."""
        steps = min(len(self.levels), depth or len(self.levels))
        ranks = self.shapes[-1].max_rank + 1
        scored, tokens = first, [root_B[:, None]]
        for number, level in enumerate(self.levels[:steps]):
            choice_BWR, alike = choices(scored.logits_BWV, ranks, ids)[1], scored.logits_BWV.shape[1] == 1
            token_BW = choice_BWR[:, 0 if alike else level.above_W, level.rank_W]
            tokens.append(token_BW)
            if number + 1 < steps:
                above_F = level.above_W[level.inner_F]
                state_BFH = scored.state_BWH[:, torch.zeros_like(above_F) if scored.state_BWH.shape[1] == 1 else above_F]
                bits_BF = level.bits_F.expand(len(root_B), -1)
                scored = score(Generation(token_BW[:, level.inner_F], state_BFH, number + 1, bits_BF))
        return DraftTree.static(torch.cat(tokens, 1), self.shapes[steps - 1])


@dataclass(frozen=True, slots=True)
class DynamicTree:
    """Grown by confidence (arXiv 2406.16858): each generation scores the `width` likeliest paths, each scored node offers
    `width` candidates, and the `nodes` likeliest paths of all candidates are proposed."""

    depth: int
    width: int
    nodes: int

    def check(self) -> None:
        """Raise ValueError for a tree that the operators cannot hold."""
        scored, candidates = self.width * (self.depth - 1), self.candidates(self.depth)
        if min(self.depth, self.width, self.nodes) < 1:
            raise ValueError(
                f"a dynamic tree of depth {self.depth}, width {self.width}, {self.nodes} nodes: all must be 1 or more"
            )
        if self.nodes >= MOST_NODES or scored > MOST_NODES or candidates >= MOST_CANDIDATES:
            raise ValueError(
                f"a dynamic tree of depth {self.depth}, width {self.width} and {self.nodes} nodes feeds {scored} nodes and has "
                f"{candidates} candidates; at most {MOST_NODES - 1} nodes, {MOST_NODES} fed and {MOST_CANDIDATES - 1} "
                "candidates are possible: lower drafter.width, drafter.draft_length or drafter.nodes"
            )

    def candidates(self, depth: int) -> int:
        return self.width + (depth - 1) * self.width**2

    def grow(self, root_B: Tensor, first: Scored, score: Score, ids: Tensor | None, depth: int | None) -> DraftTree:
        """As `Grower.grow`. A smaller depth drafts with the same budget of nodes, as far as there are candidates."""
        steps, W, B = min(self.depth, depth or self.depth), self.width, len(root_B)
        slot_W = torch.arange(W, device=root_B.device)
        score_BW, token_BW = (x[:, 0] for x in choices(first.logits_BWV, W, ids))
        zero_B1 = torch.zeros_like(root_B)[:, None]
        tokens, scores, parents = [root_B[:, None], token_BW], [score_BW[:, :1], score_BW], [zero_B1 - 1, zero_B1.expand(B, W)]
        state_BWH = first.state_BWH.expand(B, W, first.state_BWH.shape[-1])
        node_BW, bits_BW, held = (1 + slot_W).expand(B, W), (1 << slot_W).expand(B, W), 1 + W
        for step in range(1, steps):
            scored = score(Generation(token_BW, state_BWH, step, bits_BW))
            gain_BWW, choice_BWW = (x.expand(B, W, W) for x in choices(scored.logits_BWV, W, ids))
            total_BC, choice_BC = (score_BW[..., None] + gain_BWW).flatten(1), choice_BWW.flatten(1)
            tokens.append(choice_BC)
            scores.append(total_BC)
            parents.append(node_BW.repeat_interleave(W, 1))
            if step + 1 == steps:
                break
            score_BW, best_BW = top(total_BC, W)
            above_BW, token_BW = best_BW // W, choice_BC.gather(1, best_BW)
            held_BWH = scored.state_BWH.expand(B, W, scored.state_BWH.shape[-1])
            state_BWH = held_BWH.gather(1, above_BW[..., None].expand_as(held_BWH))
            bits_BW = bits_BW.gather(1, above_BW) | 1 << (step * W + slot_W)
            node_BW, held = held + best_BW, held + W * W
        count = 1 + min(self.nodes, self.candidates(steps))
        built = build_tree(torch.cat(parents, 1), torch.cat(scores, 1), count)
        token_BN, count_B = torch.cat(tokens, 1).gather(1, built.kept_BN), torch.full_like(root_B, count)
        return DraftTree(token_BN, built.parent_BN, count_B, known_BNN=ancestors_of(built.bits_BN))


def choices(logits_BWV: Tensor, ranks: int, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """(log-probability, token), [B, W, R] each, likeliest first. No log-probability is above 0, so that no path gains by
    growing."""
    B, W, V = logits_BWV.shape
    logits_MV = logits_BWV.flatten(0, 1)
    value_MR, token_MR = top(logits_MV, ranks, ids)
    value_MR = (value_MR - logits_MV.float().logsumexp(-1, keepdim=True)).clamp_max(0.0)
    return value_MR.view(B, W, ranks), token_MR.view(B, W, ranks)
