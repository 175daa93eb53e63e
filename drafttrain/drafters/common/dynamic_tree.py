"""Trees for drafters that score a node from its token and its parent's state: one shape, or grown by confidence.

Shapes: B rows, W nodes scored at once, M nodes scored so far, C candidates, N tree nodes, F nodes with children, R ranks,
H state, V vocabulary (the drafter's), w words of ancestor bits.

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

from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree, Path, TreeShape
from drafttrain.model.drafter import Candidates
from drafttrain.ops.build_tree import MOST_CANDIDATES, build_tree, grow_tree
from drafttrain.ops.top import over_vocabulary, top, top_log
from drafttrain.ops.tree_bits import MOST_NODES, ancestors_of, single_bits, words_for, words_of


@dataclass(frozen=True, slots=True)
class TreeLevel:
    """Nodes to be scored in one pass."""

    token_BW: Tensor
    state_BWH: Tensor  # of their parents
    depth: int  # of all of them, from 1
    bits_BWw: Tensor | None  # bit i: the i-th node scored, from the first generation on, is the node or its ancestor; None: all


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of a generation. W = 1: the same for all its nodes. The next generation's states may be wider."""

    logits_BWV: Tensor  # of the token after each node, over the drafter's vocabulary or the draft's candidates
    state_BWH: Tensor  # from which the nodes below are scored


Score = Callable[[TreeLevel], Scored]
Ids = (
    Tensor | Candidates | None
)  # target ids of what logits are of: [V] of the drafter's vocabulary; None: they are the indices


class Grower(Protocol):
    """Builds trees no deeper than `depth` from a drafter's scores. ids: target ids of the drafter's vocabulary."""

    def grow(self, root_B: Tensor, first: Scored, score: Score, ids: Ids, sampling: Sampling, depth: int | None) -> DraftTree:
        """first: scores of the root, W = 1. score: scores further nodes."""
        ...

    def from_slots(
        self, root_B: Tensor, logits_BKV: Tensor, ids: Tensor | None, sampling: Sampling, depth: int | None = None
    ) -> DraftTree:
        """Of drafts that do not know each other's tokens: draft k's logits are the same below all nodes of depth k."""
        ...


@dataclass(frozen=True, slots=True)
class Level:
    """The nodes of one depth in a static tree."""

    ranks: int  # choices of each parent that the level takes at most
    choice_W: Tensor  # each node's index in the choices of all nodes scored before, [parents * ranks]
    rank_W: Tensor  # its index among its parent's choices: where all parents have the same
    inner_F: Tensor  # the nodes with children
    above_F: Tensor  # their parents' places among the nodes scored before
    bits_Fw: Tensor  # as in `TreeLevel`


@dataclass(frozen=True, slots=True)
class StaticTree:
    """One shape for every proposal."""

    shapes: list[TreeShape]  # the tree cut at depth 1, 2, ...
    levels: list[Level]
    choices: list[Tensor]  # for each of these trees each draft's index in the choices of all depths, [depth * ranks]

    @staticmethod
    def of(paths: Sequence[Path], device: torch.device) -> StaticTree:
        depths = range(1, 1 + max(map(len, paths)))
        shapes = [TreeShape.of([p for p in paths if len(p) <= depth]).to(device) for depth in depths]
        level_index: dict[Path, int] = {(): 0}  # places of the nodes scored last
        bits: dict[Path, int] = {(): 0}
        inner, levels, slot = {p[:-1] for p in paths}, [], 0
        words = words_for(len(inner - {()}))
        for depth in depths:
            nodes = sorted(p for p in paths if len(p) == depth)
            parents = [p for p in nodes if p in inner]
            ranks = 1 + max(p[-1] for p in nodes)
            choice, rank = [level_index[p[:-1]] * ranks + p[-1] for p in nodes], [p[-1] for p in nodes]
            columns = choice, rank, [nodes.index(p) for p in parents], [level_index[p[:-1]] for p in parents]
            bits = {p: bits[p[:-1]] | 1 << slot + i for i, p in enumerate(parents)}
            slot += len(parents)
            ancestor_words = [words_of(b, words) for b in bits.values()]
            tensors = (torch.tensor(c, dtype=torch.long, device=device) for c in (*columns, ancestor_words))
            levels.append(Level(ranks, *tensors))
            level_index = {p: i for i, p in enumerate(parents)}
        choices = [(shape.depth_N[1:] - 1) * (shape.max_rank + 1) + shape.rank_N[1:] for shape in shapes]
        return StaticTree(shapes, levels, choices)

    def grow(self, root_B: Tensor, first: Scored, score: Score, ids: Ids, sampling: Sampling, depth: int | None) -> DraftTree:
        """As `Grower.grow`."""
        steps = min(len(self.levels), depth or len(self.levels))
        B, scored, tokens = len(root_B), first, [root_B[:, None]]
        for level_index, level in enumerate(self.levels[:steps]):
            shared_logits = scored.logits_BWV.shape[1] == 1
            choice_BX = _best(top, scored.logits_BWV, level.ranks, ids, level_index)[1].flatten(1)
            token_BW = choice_BX.index_select(1, level.rank_W if shared_logits else level.choice_W)
            tokens.append(token_BW)
            if level_index + 1 < steps:
                state_BWH = scored.state_BWH
                if state_BWH.shape[1] == 1:
                    state_BFH = state_BWH.expand(-1, len(level.inner_F), -1).contiguous()
                else:
                    state_BFH = state_BWH.index_select(1, level.above_F)
                token_BF = token_BW.index_select(1, level.inner_F)
                scored = score(TreeLevel(token_BF, state_BFH, level_index + 1, level.bits_Fw.expand(B, -1, -1)))
        return DraftTree.static(torch.cat(tokens, 1), self.shapes[steps - 1])

    def from_slots(
        self, root_B: Tensor, logits_BKV: Tensor, ids: Tensor | None, sampling: Sampling, depth: int | None = None
    ) -> DraftTree:
        """As `Grower.from_slots`."""
        B, K, _ = logits_BKV.shape
        steps = min(len(self.levels), K, depth or len(self.levels))
        shape, ranks = self.shapes[steps - 1], self.shapes[steps - 1].max_rank + 1
        choice_BX = top(logits_BKV[:, :steps].flatten(0, 1), ranks, ids)[1].view(B, -1)
        draft_BN = choice_BX.index_select(1, self.choices[steps - 1])
        return DraftTree.static(torch.cat([root_B[:, None], draft_BN], 1), shape)


@dataclass(frozen=True, slots=True)
class DynamicTree:
    """Grown by confidence (arXiv 2406.16858): each generation scores the `width` likeliest paths, each scored node offers
    `width` candidates, and the `nodes` likeliest paths of all candidates are proposed. See `confidence` for what likely means.
    """

    depth: int
    width: int
    nodes: int
    temperature: float = 1.0

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

    def grower(self, device: torch.device) -> DynamicGrower:
        """The object that builds the trees."""
        return DynamicGrower(self, device)


class DynamicGrower:
    """Grows dynamic trees on one device; the constants of all proposals are made once.

    X counts -1 (what the root has as its parent), the root and the nodes scored; M the candidates, root included.
    """

    def __init__(self, tree: DynamicTree, device: torch.device) -> None:
        self.tree = tree
        slot_W = torch.arange(tree.width, device=device)
        scored, words = tree.width * (tree.depth - 1), words_for(tree.width * (tree.depth - 1))
        self._bit_Ww = [single_bits(first, tree.width, words, device) for first in range(0, scored, tree.width)]
        starts = [1, *range(1 + tree.width, 1 + tree.candidates(tree.depth), tree.width**2)]  # candidates before each depth
        starts = [0, 0, *(start for start in starts for _ in range(tree.width))]
        parents = [0, *[1] * tree.width, *(2 + node for node in range(scored) for _ in range(tree.width))]
        self._start_X, self._parent_M = (torch.tensor(x, dtype=torch.long, device=device) for x in (starts, parents))
        self._first_X = torch.cat([slot_W[:1] - 1, slot_W[:1], slot_W])

    def grow(self, root_B: Tensor, first: Scored, score: Score, ids: Ids, sampling: Sampling, depth: int | None) -> DraftTree:
        """As `Grower.grow`. A smaller depth drafts with the same budget of nodes, as far as there are candidates."""

        def chosen(scored: Scored, draft: int) -> Chosen:
            confidence_BWV = confidence(scored.logits_BWV, self.tree.temperature, sampling)
            return Chosen(*choices(confidence_BWV, self.tree.width, ids, draft), scored.state_BWH)

        return self._grow(root_B, chosen(first, 0), lambda nodes: chosen(score(nodes), nodes.depth), depth)

    def from_slots(
        self, root_B: Tensor, logits_BKV: Tensor, ids: Tensor | None, sampling: Sampling, depth: int | None = None
    ) -> DraftTree:
        """As `Grower.from_slots`."""
        steps = min(logits_BKV.shape[1], depth or logits_BKV.shape[1])
        confidence_BKV = confidence(logits_BKV[:, :steps], self.tree.temperature, sampling)
        gain_BKW, token_BKW = choices(confidence_BKV, self.tree.width, ids)
        levels = [Chosen(gain_BKW[:, k, None], token_BKW[:, k, None], logits_BKV[:, :1, :0]) for k in range(steps)]
        return self._grow(root_B, levels[0], lambda nodes: levels[nodes.depth], steps)

    def _grow(self, root_B: Tensor, first: Chosen, choose: Callable[[TreeLevel], Chosen], depth: int | None) -> DraftTree:
        tree, B = self.tree, len(root_B)
        steps, W = min(tree.depth, depth or tree.depth), tree.width
        score_BW, token_BW = first.gain_BWR[:, 0], first.token_BWR[:, 0]
        tokens, scores, scored = [root_B[:, None], token_BW], [score_BW[:, :1], score_BW], [self._first_X.expand(B, -1)]
        state_BWH = first.state_BWH.expand(B, W, first.state_BWH.shape[-1]).contiguous()
        bits_BWw = self._bit_Ww[0].expand(B, -1, -1) if self._bit_Ww else None
        for step in range(1, steps):
            assert bits_BWw is not None
            chosen = choose(TreeLevel(token_BW, state_BWH, step, bits_BWw))
            if step + 1 == steps:
                tokens.append(chosen.token_BWR.expand(B, W, W).flatten(1))
                scores.append((score_BW[..., None] + chosen.gain_BWR).flatten(1))
                break
            grown = grow_tree(score_BW, chosen.gain_BWR, chosen.token_BWR, chosen.state_BWH, bits_BWw, self._bit_Ww[step])
            score_BW, token_BW, state_BWH, bits_BWw = grown.score_BW, grown.best_token_BW, grown.state_BWH, grown.bits_BWw
            tokens.append(grown.token_BC)
            scores.append(grown.total_BC)
            scored.append(grown.best_BW)
        candidates = tree.candidates(steps)
        node_BX = torch.cat(scored, 1)
        node_BX = node_BX + self._start_X[: node_BX.shape[1]]
        parent_BM, count = node_BX.index_select(1, self._parent_M[: 1 + candidates]), 1 + min(tree.nodes, candidates)
        built = build_tree(parent_BM, torch.cat(scores, 1), count)
        token_BN, count_B = torch.cat(tokens, 1).gather(1, built.kept_BN), torch.full_like(root_B, count)
        return DraftTree(token_BN, built.parent_BN, count_B, known_BNN=ancestors_of(built.bits_BNw))


@dataclass(frozen=True, slots=True)
class Chosen:
    """The likeliest tokens below a generation's nodes. W = 1: the same for all its nodes."""

    gain_BWR: Tensor  # their log-probabilities
    token_BWR: Tensor
    state_BWH: Tensor  # as in `Scored`


def confidence(logits_BWV: Tensor, temperature: float, sampling: Sampling) -> Tensor:
    """The logits of P(a token is accepted), by temperature scaling (Guo et al. 2017, arXiv 1706.04599).

    A drafter learns the target's distribution. Sampling accepts a token with the probability that it has there, but greedy
    decoding accepts the likeliest one: P(a token is the likeliest) is sharper than the distribution, the more so the less
    certain the target is. Without this, trees for such a target are wide where they should be deep.

    temperature: fitted for greedy decoding; 1: none was fitted. At sampling temperatures above it, those count.
    """
    if temperature == 1.0:
        return logits_BWV
    if sampling.greedy:
        return logits_BWV / temperature
    if sampling.temperature_B is None:
        return logits_BWV / max(temperature, sampling.temperature)
    return logits_BWV / sampling.temperature_B.clamp_min(temperature).to(logits_BWV.dtype)[:, None, None]


def choices(logits_BWV: Tensor, ranks: int, ids: Ids, draft: int = 0) -> tuple[Tensor, Tensor]:
    """(log-probability, token), [B, W, R] each, likeliest first. draft: that the logits are for, from 0."""
    return _best(top_log, logits_BWV, ranks, ids, draft)


def _best(
    rank: Callable[..., tuple[Tensor, Tensor]], logits_BWV: Tensor, ranks: int, ids: Ids, draft: int
) -> tuple[Tensor, Tensor]:
    """As `choices`, with the values of `rank`: `top` or `top_log`."""
    B, W, V = logits_BWV.shape
    token_BC = None
    if isinstance(ids, Candidates):
        token_BC, vocab, ids = ids.token_BKC[:, draft], ids.vocab, None
        if ranks > V:  # the rest are tokens that cannot be
            logits_BWV = over_vocabulary(logits_BWV, token_BC[:, None].expand(B, W, V), vocab)
            token_BC = None
    value_MR, token_MR = rank(logits_BWV.flatten(0, 1), ranks, ids)
    token_BX = token_MR.view(B, -1) if token_BC is None else token_BC.gather(1, token_MR.view(B, -1))
    return value_MR.view(B, W, ranks), token_BX.view(B, W, ranks)
