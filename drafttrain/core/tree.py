"""The draft tree: the form of every drafter's proposal.

Shapes: B batch, N nodes (root included), V vocabulary, W children of a node.

A worked example, used throughout: root `r` has children `a`, `b`; `a` has child `c`.

    node      0   1   2   3
    token     r   a   b   c
    parent   -1   0   0   1
    depth     0   1   1   2

Node 0, the root, is the last committed token. No KV cache holds it yet. Every parent precedes its children.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import torch
from torch import Tensor

Path = tuple[int, ...]  # ranks from the root: (0, 2) is the third choice at depth 2 below the first at depth 1


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A batch of proposals, padded to one number of nodes.

    Row i of `q_BNV` is the distribution, after the request's logits processors, from which node i's *children* were sampled,
    without replacement where there are several.
    """

    token_BN: Tensor
    parent_BN: Tensor  # index of each node's parent, -1 at the root
    count_B: Tensor  # real nodes of each row; the rest is padding
    q_BNV: Tensor | None = None  # None: the proposal is deterministic given the context
    sampled_BN: Tensor | None = None  # bool, required with `q_BNV`: whether node i's children were sampled from `q_BNV[:, i]`
    known_BNN: Tensor | None = None  # `ancestors(parent_BN)`, where the shape is known in advance
    confidence_BN: Tensor | None = None  # chains only: P(node i is accepted given that its parent is), 1 at the root

    @property
    def ancestor_BNN(self) -> Tensor:
        """[B, N, N] bool, as `ancestors` gives it."""
        return ancestors(self.parent_BN) if self.known_BNN is None else self.known_BNN

    @staticmethod
    def chain(token_BN: Tensor, count_B: Tensor | None = None, q_BNV: Tensor | None = None) -> DraftTree:
        """A chain: each node's parent is its left neighbour. `q_BNV`, if given, is set for every node with a child."""
        (B, N), device = token_BN.shape, token_BN.device
        shape = _chains.get((N, device)) or ChainShape.of(N, device)
        count_B = torch.full((B,), N, device=device) if count_B is None else count_B
        sampled_BN = None if q_BNV is None else shape.ancestor_NN[-1].expand(B, N)  # the last node's: all
        return DraftTree(token_BN, shape.parent_N.expand(B, N), count_B, q_BNV, sampled_BN, shape.ancestor_NN.expand(B, N, N))

    @staticmethod
    def static(token_BN: Tensor, shape: TreeShape) -> DraftTree:
        """Trees of the same shape in every row of the batch."""
        B, N = token_BN.shape
        count_B = torch.full((B,), N, device=token_BN.device)
        return DraftTree(token_BN, shape.parent_N.expand(B, N), count_B, known_BNN=shape.ancestor_NN.expand(B, N, N))

    def cut(self, deepest: int | Tensor, trim: bool = True) -> DraftTree:
        """The tree without nodes deeper than `deepest`; the rest keep their order. `cut(1)` of the example is r, a, b.

        deepest: for all rows, or [B] of each. trim: also drop the columns of the removed nodes, which syncs with the host.
        Without it they become padding. The result has no confidence.
        """
        ancestor_BNN = self.ancestor_BNN
        B, N = self.token_BN.shape
        real_BN = torch.arange(N, device=self.token_BN.device) < self.count_B[:, None]
        deepest_B1 = deepest[:, None] if isinstance(deepest, Tensor) else deepest
        stays_BN = (depth(ancestor_BNN) <= deepest_B1) & real_BN
        if trim and bool((stays_BN == real_BN).all()):
            return self
        count_B = stays_BN.sum(-1)
        order_BM = (~stays_BN).long().argsort(stable=True, dim=-1)
        order_BM = order_BM[:, : int(count_B.max())] if trim else order_BM
        index_BN = stays_BN.cumsum(-1) - 1
        parent_BM = self.parent_BN.gather(1, order_BM)
        moved_BM = index_BN.gather(1, parent_BM.clamp_min(0))
        parent_BM = torch.where(parent_BM < 0, -1, moved_BM)
        parent_BM = torch.where(torch.arange(parent_BM.shape[1], device=parent_BM.device) < count_B[:, None], parent_BM, 0)
        parent_BM[:, 0] = -1
        rows_BM = torch.arange(B, device=self.token_BN.device)[:, None]
        q_BMV = None if self.q_BNV is None else self.q_BNV[rows_BM, order_BM]
        sampled_BM = None if self.sampled_BN is None else self.sampled_BN[rows_BM, order_BM]
        return DraftTree(self.token_BN.gather(1, order_BM), parent_BM, count_B, q_BMV, sampled_BM)

    def trimmed(self) -> DraftTree:
        """The tree without columns that are padding in every row. Syncs with the host."""
        N = max(self.count_B.tolist())
        if self.token_BN.shape[1] == N:
            return self
        q_BNV, sampled_BN = (None if x is None else x[:, :N] for x in (self.q_BNV, self.sampled_BN))
        known_BNN = None if self.known_BNN is None else self.known_BNN[:, :N, :N]
        return DraftTree(self.token_BN[:, :N], self.parent_BN[:, :N], self.count_B, q_BNV, sampled_BN, known_BNN)


@dataclass(frozen=True, slots=True)
class ChainShape:
    """The tensors of all chains of one length on one device."""

    parent_N: Tensor
    ancestor_NN: Tensor

    @staticmethod
    def of(nodes: int, device: torch.device) -> ChainShape:
        ancestor_NN = torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()
        return ChainShape(torch.arange(-1, nodes - 1, device=device), ancestor_NN)


_chains: dict[tuple[int, torch.device], ChainShape] = {}


def keep_chains(longest: int, device: torch.device) -> None:
    """Make the shapes of chains of up to so many nodes, for good, before any step is captured: graphs read them there."""
    with torch.inference_mode(False):
        for nodes in range(1, 1 + longest):
            if (nodes, device) not in _chains:
                _chains[nodes, device] = ChainShape.of(nodes, device)


def ancestors(parent_BN: Tensor) -> Tensor:
    """[B, N, N] bool: entry [b, i, j] is true where j is i or an ancestor of i."""
    B, N = parent_BN.shape
    mask_BNN = torch.eye(N, dtype=torch.bool, device=parent_BN.device).expand(B, N, N)
    up_BN = parent_BN.clamp_min(0)  # the root is its own parent here
    for _ in range(N.bit_length()):  # each pass doubles the distance covered, for any tree
        mask_BNN = mask_BNN | mask_BNN.gather(1, up_BN[..., None].expand(B, N, N))
        up_BN = up_BN.gather(1, up_BN)
    return mask_BNN


def depth(ancestor_BNN: Tensor) -> Tensor:
    """[B, N] edges from the root to each node, given `ancestors`."""
    return ancestor_BNN.sum(-1) - 1


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A static tree, with the tensors that every decode step needs, computed once.

    The worked example is `TreeShape.of([(0,), (1,), (0, 0)])`: parent (-1, 0, 0, 1), depth (0, 1, 1, 2).
    """

    paths: tuple[Path, ...]  # breadth first
    parent_N: Tensor
    depth_N: Tensor
    rank_N: Tensor  # each node's rank among its parent's candidates
    ancestor_NN: Tensor

    @staticmethod
    def of(paths: Sequence[Sequence[int]]) -> TreeShape:
        """The tree of these rank paths. Raises ValueError where a path's prefix is missing or a path is repeated."""
        ordered = tuple(sorted((tuple(p) for p in paths), key=lambda p: (len(p), p)))
        index: dict[Path, int] = {(): 0}
        for path in ordered:
            if not path or path in index:
                raise ValueError(f"tree path {list(path)} is empty or repeated; list each node once")
            if path[:-1] not in index:
                raise ValueError(f"tree path {list(path)} has no parent in the tree; add {list(path[:-1])}")
            index[path] = len(index)
        parent_N = torch.tensor([-1] + [index[p[:-1]] for p in ordered])
        depth_N, rank_N = torch.tensor([0] + [len(p) for p in ordered]), torch.tensor([0] + [p[-1] for p in ordered])
        return TreeShape(ordered, parent_N, depth_N, rank_N, ancestors(parent_N[None])[0])

    def to(self, device: torch.device) -> TreeShape:
        """The same shape with tensors on this device."""
        tensors = (self.parent_N, self.depth_N, self.rank_N, self.ancestor_NN)
        return TreeShape(self.paths, *(t.to(device) for t in tensors))

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node."""
        return max(map(len, self.paths), default=0)

    @property
    def max_rank(self) -> int:
        """The highest rank of a node."""
        return max((p[-1] for p in self.paths), default=0)


_NOWHERE, _ROOT = 0, 1  # nodes of the table in `arrivals`; those of paths follow


def arrivals(rank_MD: Tensor, paths: Sequence[Path]) -> Tensor:
    """[M, max depth] float64, 0 or 1: whether a node of `paths` at depth d + 1 is accepted at each position.

    rank_MD: the true token's rank among the drafter's candidates at each depth, given the true tokens above it.
    paths: each with its prefixes.
    """
    R = 1 + max(max(path) for path in paths)  # ranks of `paths`; all others are as one more
    child = [[_NOWHERE] * (R + 1) for _ in range(len(paths) + 2)]
    number: dict[Path, int] = {(): _ROOT}
    for path in sorted(paths, key=len):
        number[path] = child[number[path[:-1]]][path[-1]] = len(number) + 1
    child_X, node_M = torch.tensor(child).flatten(), torch.full((len(rank_MD),), _ROOT)
    arrive_MD = torch.zeros(len(rank_MD), max(map(len, paths)), dtype=torch.float64)
    for arrive_M, rank_M in zip(arrive_MD.unbind(-1), rank_MD[:, : arrive_MD.shape[1]].unbind(-1), strict=True):
        node_M = child_X[node_M * (R + 1) + rank_M.long().clamp_max(R)]
        arrive_M.copy_(node_M != _NOWHERE)
    return arrive_MD


def visits(arrive_MD: Tensor) -> Tensor:
    """[M] float64: P(a decode step starts at each position of one sequence).

    Decoding starts at the first position; a step that accepts a drafts moves a + 1 positions on. Example: arrivals (1, 0)
    everywhere, so that one draft is always accepted: visits 1, 0, 1, 0, ...
    """
    M, D = arrive_MD.shape
    ends_M1 = torch.zeros(M, 1, dtype=torch.float64)
    reach = torch.cat([ends_M1 + 1.0, arrive_MD, ends_M1], 1)
    accepted_share = (reach[:, :-1] - reach[:, 1:]).tolist()
    visit = [1.0] + [0.0] * (M + D)
    for i in (i for i in range(M) if visit[i]):
        for accepted, share in enumerate(accepted_share[i]):
            visit[i + accepted + 1] += visit[i] * share
    return torch.tensor(visit[:M], dtype=torch.float64)


def expected_nodes(rank_sequences: Sequence[Tensor], paths: Sequence[Path]) -> float:
    """Mean number of accepted drafts per decode step, over the positions at which steps start.

    rank_sequences: `rank_MD` of each sequence, as for `arrivals`. The mean over all positions would be larger, because
    decoding takes few steps in easy text: where half of a text is accepted 5 tokens at a time and half 1 at a time, all
    positions average 3.0 tokens, decode steps 1.67.
    """
    accepted, visited = step_sums([arrivals(rank_MD, paths) for rank_MD in rank_sequences]).sum(0).tolist()
    return float(accepted / visited)


def step_sums(arrivals: Sequence[Tensor]) -> Tensor:
    """[sequences, 2] float64: accepted drafts and decode steps of each sequence; zeros for an empty one.

    arrivals: [M, D] of each sequence, from `arrivals`.
    """
    weights = [visits(arrive_MD) for arrive_MD in arrivals]
    sums = [torch.stack([(w @ a).sum(), w.sum()]) for w, a in zip(weights, arrivals, strict=True)]
    return torch.stack(sums) if sums else torch.zeros(0, 2, dtype=torch.float64)


def best_paths(rank_MD: Tensor, nodes: int, width: int = 10, weight_M: Tensor | None = None) -> list[Path]:
    """The `nodes` paths that hold the true tokens most often. Greedy insertion is optimal, since P(child) <= P(parent).

    rank_MD: as for `arrivals`. width: ranks tried below each node. weight_M: weight of each position; None: all the same.
    """
    weight_M = torch.ones(len(rank_MD), dtype=torch.float64) if weight_M is None else weight_M
    chosen: list[Path] = []
    frontier: list[tuple[float, int, Path]] = []  # a heap: greatest weight first, then shortest path, then lowest ranks
    at_X: dict[Path, Tensor] = {(): torch.arange(len(rank_MD))}  # the positions where a path holds the true tokens
    path: Path = ()
    while len(chosen) < nodes:
        if len(path) < rank_MD.shape[1]:
            rank_X = rank_MD[at_X[path], len(path)].long().clamp_max(width)
            for rank, weight in enumerate(torch.bincount(rank_X, weight_M[at_X[path]], width + 1)[:width].tolist()):
                if weight:
                    heappush(frontier, (-weight, len(path) + 1, (*path, rank)))
        if not frontier:
            break
        path = heappop(frontier)[2]
        above_X = at_X[path[:-1]]
        at_X[path] = above_X[rank_MD[above_X, len(path) - 1] == path[-1]]
        chosen.append(path)
    return sorted(chosen, key=lambda p: (len(p), p))


def tuned_paths(rank_sequences: Sequence[Tensor], nodes: int, width: int = 10, iterations: int = 6) -> list[Path]:
    """The static tree of `nodes` nodes that accepts most on sequences like these.

    The best tree for all positions favours long runs of easy text, in which decoding takes few steps. So each iteration
    finds the best paths for the positions that the previous tree visits, and the best tree of all iterations is returned.
    """
    rank_MD = torch.cat(list(rank_sequences))
    paths, tried = best_paths(rank_MD, nodes, width), list[list[Path]]()
    best, most = paths, 0.0
    while paths and len(tried) < iterations and paths not in tried:
        tried.append(paths)
        arrive_MD = arrivals(rank_MD, paths)
        weight_M = torch.cat([visits(text) for text in torch.split(arrive_MD, [len(ranks) for ranks in rank_sequences])])
        accepted = float((weight_M @ arrive_MD).sum() / weight_M.sum())
        best, most = (paths, accepted) if accepted > most else (best, most)
        paths = best_paths(rank_MD, nodes, width, weight_M)
    return best
