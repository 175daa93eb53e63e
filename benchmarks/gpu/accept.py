"""Acceptance operators: the walk along the target's choices, speculative sampling, typical acceptance.

Shapes: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.case import Case, Draw, Tensors, generator, random_parents
from benchmarks.gpu.rows import lowest_of_greatest, noise, sampling
from drafttrain.core.sampling import Lane, uniform
from drafttrain.core.tree import DraftTree
from drafttrain.decoding.acceptance import DELTA, EPSILON
from drafttrain.ops import accept as accept_op
from drafttrain.ops import commit as commit_op
from drafttrain.ops import kv_cache as cache_op

SHARPNESS = 4.0  # of the logits, so that some drafts are accepted and some rejected
RANKS = 3  # a node's token is one of this many most likely ones after its parent


@dataclass(frozen=True)
class Verified(Case):
    """A tree of likely drafts with the target's logits at its nodes."""

    rows: int
    nodes: int
    vocab: int

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Tensors:
        draw, B, N = generator(device, seed), self.rows, self.nodes
        logits_BNV = (torch.randn(B, N, self.vocab, device=device, generator=draw) * SHARPNESS).to(dtype)
        parent_BN = self._parents(device, seed)
        likely_BNR = logits_BNV.topk(min(RANKS, self.vocab), -1).indices
        rank_BN1 = torch.randint(0, likely_BNR.shape[-1], (B, N, 1), device=device, generator=draw)
        above_BN1 = parent_BN.clamp_min(0)[..., None]
        token_BN = likely_BNR.gather(1, above_BN1.expand_as(likely_BNR)).gather(2, rank_BN1)[..., 0]
        count_B = torch.randint(max(1, N // 2), N + 1, (B,), device=device, generator=draw)
        count_B[0] = N
        given = {"logits": logits_BNV, "token": token_BN, "parent": parent_BN, "count": count_B} | noise(B, device, seed)
        start_B1 = given["position"][:, None]
        return given | {"position": start_B1 + (ancestor_counts(parent_BN) - 1)}

    def _parents(self, device: torch.device, seed: int) -> Tensor:
        return random_parents(self.rows, self.nodes, device, seed)

    def moved(self, dtype: torch.dtype) -> int:
        """The logits of every node, since the walk may visit any of them and cannot wait to load them then."""
        return self.rows * self.nodes * self.vocab * dtype.itemsize


def ancestor_counts(parent_BN: Tensor) -> Tensor:
    """[B, N]: number of nodes on the path from the root to each node."""
    counts = torch.ones_like(parent_BN)
    for i in range(1, parent_BN.shape[1]):
        counts[:, i] = counts.gather(1, parent_BN[:, i : i + 1])[:, 0] + 1
    return counts


def tree_of(given: Tensors) -> DraftTree:
    drawn = {"q_BNV": given["q"], "sampled_BN": given["sampled"]} if "q" in given else {}
    return DraftTree(given["token"], given["parent"], given["count"], **drawn)


def verdict(found: tuple[Tensor, Tensor, Tensor]) -> Tensors:
    return dict(zip(("path", "count", "bonus"), found, strict=True))


def walked(wide: Tensors, choice_BN: Tensor) -> Tensors:
    """The accept walk in plain Python, on the host."""
    paths, counts, bonuses = [], [], []
    tokens, parents, chosen = (x.tolist() for x in (wide["token"], wide["parent"], choice_BN))
    for token, parent, choice, count in zip(tokens, parents, chosen, wide["count"].tolist(), strict=True):
        path, at = [0], 0
        while hit := [i for i in range(1, count) if parent[i] == at and token[i] == choice[at]]:
            at = hit[0]
            path.append(at)
        paths.append(path + [0] * (len(token) - len(path)))
        counts.append(len(path))
        bonuses.append(choice[at])
    return {name: torch.tensor(x, device=choice_BN.device) for name, x in verdict((paths, counts, bonuses)).items()}  # type: ignore[arg-type]


@dataclass(frozen=True)
class GreedyAccept(Verified):
    op: ClassVar = "greedy_accept"
    twins: ClassVar = ("drafttrain.ops.accept.greedy_reference", "drafttrain.ops.accept.choice_reference")

    def run(self, given: Tensors) -> Tensors:
        return verdict(accept_op.greedy_accept(tree_of(given), given["logits"]))

    def exact(self, wide: Tensors) -> dict[str, Any]:
        return walked(wide, lowest_of_greatest(wide["logits"]))


@dataclass(frozen=True)
class ChoiceAccept(Verified):
    """Only the walk. The choices come from a small vocabulary, so that paths are long."""

    op: ClassVar = "choice_accept"
    twins: ClassVar = ("drafttrain.ops.accept.choice_reference",)
    dtypes: ClassVar = (torch.float32,)
    vocab: int = 16

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Tensors:
        given = super().inputs(torch.float32, device, seed)
        return {name: given[name] for name in ("token", "parent", "count")} | {"choice": given["logits"].argmax(-1)}

    def run(self, given: Tensors) -> Tensors:
        return verdict(accept_op.choice_accept(tree_of(given), given["choice"]))

    def exact(self, wide: Tensors) -> dict[str, Any]:
        return walked(wide, wide["choice"])

    def moved(self, dtype: torch.dtype) -> int:
        """Tokens, parents, choices and the path, eight bytes each."""
        return 32 * self.rows * self.nodes


@dataclass(frozen=True)
class LosslessAccept(Verified):
    """drawn: a chain sampled from its own distribution q; otherwise a tree of deterministic drafts. lazy: only the rows of the
    walk are read. Both are timed, for `ops.accept.EAGER`.
    """

    op: ClassVar = "lossless_accept"
    twins: ClassVar = ("drafttrain.ops.accept.lossless_reference", "drafttrain.ops.accept.greedy_reference")
    drawn: bool = False
    lazy: bool = False

    def _parents(self, device: torch.device, seed: int) -> Tensor:
        if self.drawn:
            return torch.arange(-1, self.nodes - 1, device=device).repeat(self.rows, 1)
        return super()._parents(device, seed)

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Tensors:
        given = super().inputs(dtype, device, seed)
        if not self.drawn:
            return given
        draw, temperature_B11 = generator(device, seed + 1), given["temperature"][:, None, None]
        shaken_BNV = given["logits"].float() + 0.5 * torch.randn(given["logits"].shape, device=device, generator=draw)
        q_BNV = (shaken_BNV / temperature_B11).softmax(-1)
        drafts_BM = torch.multinomial(q_BNV[:, :-1].flatten(0, 1), 1, generator=draw).view(self.rows, -1)
        token_BN = torch.cat([given["token"][:, :1], drafts_BM], 1)
        return given | {"token": token_BN, "q": q_BNV, "sampled": torch.ones_like(token_BN, dtype=torch.bool)}

    def run(self, given: Tensors) -> Tensors:
        with mock.patch.object(accept_op, "EAGER", -1 if self.lazy else 1 << 62):
            found = accept_op.lossless_accept(tree_of(given), given["logits"], given["position"], sampling(given))
        return verdict(found)

    def exact(self, wide: Tensors) -> dict[str, Any]:
        path_BN, count_B, _ = accept_op.lossless_reference(tree_of(wide), wide["logits"], wide["position"], sampling(wide))
        last_B = path_BN.gather(1, count_B[:, None] - 1)[:, 0]
        left_BV = torch.stack([self._left(wide, row, int(last)) for row, last in enumerate(last_B.tolist())])
        return {"path": path_BN, "count": count_B, "bonus": bonus(wide, left_BV, last_B)}

    def _left(self, wide: Tensors, row: int, last: int) -> Tensor:
        """[V]: the residual that the rejected children of the last accepted node leave."""
        p_V = (wide["logits"][row, last] / wide["temperature"][row]).softmax(-1)
        q_V = wide["q"][row, last] if self.drawn else None
        for child in range(last + 1, int(wide["count"][row])):
            if int(wide["parent"][row, child]) != last:
                continue
            token = int(wide["token"][row, child])
            left_V = p_V.index_fill(0, torch.tensor([token], device=p_V.device), 0.0)
            if q_V is not None:
                left_V = (p_V - q_V).clamp_min(0.0)
            p_V = left_V / left_V.sum() if float(left_V.sum()) > 0 else p_V
        return p_V

    def moved(self, dtype: torch.dtype) -> int:
        """The logits of every node, lazily of the root at least; with a known q, that of the node that rejects."""
        logits = self.rows * self.vocab * dtype.itemsize if self.lazy else super().moved(dtype)
        return logits + (4 * self.rows * self.vocab if self.drawn else 0)


@dataclass(frozen=True)
class LikelyAccept(Verified):
    op: ClassVar = "likely_accept"
    twins: ClassVar = ("drafttrain.ops.accept.likely_reference",)

    def run(self, given: Tensors) -> Tensors:
        at = (given["position"], sampling(given), EPSILON, DELTA)
        return verdict(accept_op.likely_accept(tree_of(given), given["logits"], *at))

    def exact(self, wide: Tensors) -> dict[str, Any]:
        at = (wide["position"], sampling(wide), EPSILON, DELTA)
        path_BN, count_B, _ = accept_op.likely_reference(tree_of(wide), wide["logits"], *at)
        last_B = path_BN.gather(1, count_B[:, None] - 1)[:, 0]
        row_B = torch.arange(self.rows, device=last_B.device)
        p_BV = (wide["logits"][row_B, last_B] / wide["temperature"][:, None]).softmax(-1)
        return {"path": path_BN, "count": count_B, "bonus": bonus(wide, p_BV, last_B)}


def bonus(wide: Tensors, p_BV: Tensor, last_B: Tensor) -> Draw:
    """The token after the last accepted node, sampled with the noise of the position after it."""
    position_B = wide["position"].gather(1, last_B[:, None])[:, 0] + 1
    return Draw(p_BV, uniform(sampling(wide), position_B, Lane.TARGET))


@dataclass(frozen=True)
class Commit(Verified):
    """What a step makes of an accepted path: tokens, the state of the texts, the host's record, and what drafters store."""

    op: ClassVar = "commit"
    twins: ClassVar = (
        "drafttrain.ops.commit.reference",
        "drafttrain.ops.commit.along_reference",
        "drafttrain.ops.commit.keep_last_reference",
        "drafttrain.ops.commit.append_text_reference",
        "drafttrain.ops.commit.append_pending_reference",
        "drafttrain.ops.commit.take_pending_reference",
        "drafttrain.ops.kv_cache.advance_reference",
    )
    dtypes: ClassVar = (torch.float32,)
    vocab: int = 16

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Tensors:
        given = super().inputs(torch.float32, device, seed)
        path_BN, count_B, bonus_B = accept_op.choice_reference(tree_of(given), given["logits"].argmax(-1))
        made_B = torch.arange(1, self.rows + 1, device=device)
        found = {name: given[name] for name in ("token", "parent", "count")}
        found |= {"path": path_BN, "accepted": count_B, "bonus": bonus_B, "slot": made_B.flip(0) - 1}
        found |= {"root": torch.zeros_like(made_B), "made": made_B, "done": made_B % 3 == 0, "limit": made_B + 1 + made_B % 3}
        found |= {"hidden": given["logits"], "kept": given["logits"][:, 0] + 1.0, "known": made_B + 1}
        found |= {"pending": made_B % 2, "tokens": torch.zeros_like(given["token"]).repeat(1, 2)}
        found |= {"states": torch.zeros_like(given["logits"]).repeat(1, 2, 1)}
        found |= {"text": torch.zeros_like(given["token"]).repeat(1, 2), "written": made_B % self.nodes}
        return found | {"stop": torch.full_like(made_B, -1)[:, None], "length": made_B * 5, "lengths": made_B * 7}

    def run(self, given: Tensors) -> Tensors:
        at, sequences = self._arguments(given)
        found = commit_op.commit(tree_of(given), given["path"], self.nodes, *at)
        (hidden_BAH,) = commit_op.along([given["hidden"]], given["path"], self.nodes)
        rows = (found.count_B, given["slot"])
        commit_op.keep_last(given["kept"], given["known"], hidden_BAH, found.next_BA, *rows)
        commit_op.append_text(given["text"], given["written"], found.token_BA, found.next_BA, *rows)
        longer_B = cache_op.advance(given["length"], *rows, given["lengths"])
        stores = [given["tokens"], given["states"]]
        commit_op.append_pending([found.token_BA, hidden_BAH], *rows, stores, given["pending"])
        taken, pending_B = commit_op.take_pending(stores, given["slot"], given["pending"], self.nodes)
        results = self._results(given, sequences, found) | dict(zip(("tokens", "states"), taken, strict=True))
        return results | {"along": hidden_BAH, "longer": longer_B, "waiting": pending_B}

    def exact(self, wide: Tensors) -> dict[str, Any]:
        at, sequences = self._arguments(wide)
        found = commit_op.reference(tree_of(wide), wide["path"], *at)
        hidden_BAH = commit_op.along_reference(wide["hidden"], wide["path"])
        rows = (found.count_B, wide["slot"])
        commit_op.keep_last_reference(wide["kept"], wide["known"], hidden_BAH, found.next_BA, *rows)
        commit_op.append_text_reference(wide["text"], wide["written"], found.token_BA, found.next_BA, *rows)
        longer_B = cache_op.advance_reference(wide["length"], *rows, wide["lengths"])
        stores = [wide["tokens"], wide["states"]]
        commit_op.append_pending_reference([found.token_BA, hidden_BAH], *rows, stores, wide["pending"])
        taken, pending_B = commit_op.take_pending_reference(stores, wide["slot"], wide["pending"], self.nodes)
        results = self._results(wide, sequences, found) | dict(zip(("tokens", "states"), taken, strict=True))
        return results | {"along": hidden_BAH, "longer": longer_B, "waiting": pending_B}

    def _arguments(self, given: Tensors) -> tuple[tuple[Any, ...], commit_op.Sequences]:
        sequences = commit_op.Sequences(*(given[name] for name in ("root", "made", "done", "limit", "stop")))
        return (given["accepted"], given["bonus"], given["slot"], sequences, True, True), sequences

    def _results(self, given: Tensors, sequences: commit_op.Sequences, found: commit_op.Committed) -> Tensors:
        state = {"root": sequences.root_S, "made": sequences.made_S, "done": sequences.done_S}
        state |= {name: given[name] for name in ("kept", "known", "written", "lengths")} | {"text": given["text"][:, :-1]}
        return state | {"token": found.token_BA, "next": found.next_BA, "count": found.count_B, "record": found.record_BX}

    def moved(self, dtype: torch.dtype) -> int:
        """Tokens, parents and paths, eight bytes each, and the path's tokens three times."""
        return 48 * self.rows * self.nodes
