"""Two drafters of one target, whose proposals are joined into one tree.

Shapes: B rows, A committed positions, C columns of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree, Path
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.drafter import Commit, Drafter
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.target import Target
from drafttrain.ops.tree_attention import MOST_NODES


@dataclass
class MergedState:
    """The drafters' own states."""

    middle: Any
    inner: Any


class Merged(Drafter):
    """Both draft alone; the tree holds every token path of either proposal once.

    At any temperature proposals are deterministic: a chain that was drawn from a law could not carry it into the tree.
    Figures and paths are those of one of them, the `lead`: the middle, unless only the inner one learns.
    """

    def __init__(self, middle: Drafter, inner: Drafter, target: Target) -> None:
        super().__init__()
        if not target.trees:
            raise UserError(
                "drafter.join=merge proposes trees; this target's architecture is exact for chains only: use one of the "
                "drafters alone, or a middle with a language model and drafter.join=verify"
            )
        self.middle, self.inner = middle, inner
        self.taps = middle.taps | inner.taps
        self.draft_length = max(middle.draft_length, inner.draft_length)
        self.captured = middle.captured and inner.captured
        self.trained = middle.trained or inner.trained
        self.starts_usable = middle.starts_usable
        self._check_nodes()

    @property
    def parts(self) -> tuple[Drafter, Drafter]:
        return self.middle, self.inner

    @property
    def lead(self) -> Drafter:
        return self.middle if self.middle.trained or not self.inner.trained else self.inner

    @property
    def foretold(self) -> int:
        return self.lead.foretold

    def fed(self, length: int) -> int:
        return sum(part.fed(length) for part in self.parts if part.trained)

    @property
    def ahead(self) -> int:
        return max(part.ahead for part in self.parts)

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """The lead's; in training then the other's, which enter no figure."""
        yield from self.lead.predict(batch)
        if self.training and self.lead is self.middle:
            for prediction in self.inner.predict(batch):
                yield replace(prediction, counted=False)

    def prepare(self, counts: Callable[[], Tensor]) -> None:
        for part in self.parts:
            part.prepare(counts)

    def open(self, slots: int, max_len: int) -> MergedState:
        """Caches have room for the whole tree, since their bound is set for it."""
        positions = max_len + self.widest
        return MergedState(*(part.open(slots, positions) for part in self.parts))

    def _each(self, state: MergedState) -> list[tuple[Drafter, Any]]:
        return [(self.middle, state.middle), (self.inner, state.inner)]

    def reset(self, state: MergedState, slot_R: Tensor) -> None:
        for part, own in self._each(state):
            part.reset(own, slot_R)

    def observe(self, state: MergedState, commit: Commit, slot_B: Tensor) -> None:
        """A part has room for what its own drafts could bring; of more it gets a piece at a time."""
        for part, own in self._each(state):
            first, *rest = pieces(_for(part, commit), part.draft_length)
            part.observe(own, first, slot_B)
            for piece in rest:
                part.absorb(own, slot_B)
                part.observe(own, piece, slot_B)

    def read(self, state: MergedState, commit: Commit, slot_B: Tensor) -> None:
        for part, own in self._each(state):
            part.read(own, _for(part, commit), slot_B)

    def absorb(self, state: MergedState, slot_B: Tensor) -> None:
        for part, own in self._each(state):
            part.absorb(own, slot_B)

    def mark(self, state: MergedState, slot_B: Tensor) -> Any:
        return [part.mark(own, slot_B) for part, own in self._each(state)]

    def rewind(self, state: MergedState, slot_B: Tensor, mark: Any) -> None:
        for (part, own), seen in zip(self._each(state), mark, strict=True):
            part.rewind(own, slot_B, seen)

    @property
    def rewinds(self) -> bool:
        return all(part.rewinds for part in self.parts)

    def caches(self, state: MergedState) -> list[KVCache]:
        return [kv for part, own in self._each(state) for kv in part.caches(own)]

    def propose(self, state: MergedState, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        greedy = replace(sampling, draft_temperature=0.0)
        middle, inner = (part.propose(own, slot_B, greedy, depth) for part, own in self._each(state))
        return middle.joined(inner)

    def decode_settings(self) -> dict[str, Any]:
        return {"middle": self.middle.decode_settings(), "inner": self.inner.decode_settings()}

    def use_decode_settings(self, settings: dict[str, Any]) -> None:
        self.middle.use_decode_settings(settings.get("middle", {}))
        self.inner.use_decode_settings(settings.get("inner", {}))
        self._check_nodes()

    def tune(self, texts: Sequence[Tensor], nodes: int) -> None:
        """The lead's share, as far as it fits beside the other one's nodes."""
        other = self.inner if self.lead is self.middle else self.middle
        self.lead.tune(texts, min(nodes, MOST_NODES - other.max_nodes))

    @property
    def tunable(self) -> bool:
        return self.lead.tunable

    def paths(self) -> list[Path]:
        """The lead's: what they promise of acceptance is a floor."""
        return self.lead.paths()

    @property
    def max_nodes(self) -> int:
        return self.middle.max_nodes + self.inner.max_nodes - 1

    @property
    def widest(self) -> int:
        return max(super().widest, self.middle.widest, self.inner.widest)

    def _check_nodes(self) -> None:
        if self.max_nodes > MOST_NODES:
            raise UserError(
                f"drafter.middle proposes up to {self.middle.max_nodes - 1} nodes, drafter.inner {self.inner.max_nodes - 1}; a "
                f"tree of both holds {MOST_NODES - 1}: lower draft_length, paths or nodes of either"
            )


def pieces(commit: Commit, draft_length: int) -> list[Commit]:
    """The commit's columns in order, as many at a time as wait for a drafter at most: a draft with its root, then, as one
    position goes on waiting, one less. 9 columns for a draft length of 3: 4, 3 and 2.
    """
    A, found, start = commit.token_BA.shape[1], [], 0
    while start < A:
        end = min(A, start + draft_length + (start == 0))
        hidden = {k: h[:, start:end] for k, h in commit.hidden.items()}
        count_B = (commit.count_B - start).clamp(0, end - start)
        found.append(Commit(commit.token_BA[:, start:end], commit.next_BA[:, start:end], hidden, count_B))
        start = end
    return found


def _for(part: Drafter, commit: Commit) -> Commit:
    """With the states that this drafter asks for alone."""
    return replace(commit, hidden={k: commit.hidden[k] for k in part.taps.keys})
