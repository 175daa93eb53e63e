"""Two drafters of one target, whose proposals are joined into one tree.

Shapes: B rows, A committed positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree, Path
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.drafter import Commit, Drafter, DraftState, RevertibleState
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.proposal import Proposal
from drafttrain.model.target import Target
from drafttrain.ops.join_trees import join_trees
from drafttrain.ops.tree_bits import MOST_NODES


class MergedProposal(Proposal):
    """The nodes of both proposals. Figures, paths and tuning are those of one of them, the `lead`."""

    def __init__(self, middle: Proposal, inner: Proposal, lead: Proposal) -> None:
        super().__init__(max(middle.draft_length, inner.draft_length))
        self.middle, self.inner, self.lead = middle, inner, lead

    @property
    def predicted_depths(self) -> int:
        return self.lead.predicted_depths

    @property
    def paths(self) -> list[Path]:
        """The lead's paths. The acceptance that they predict is a lower bound."""
        return self.lead.paths

    @property
    def max_nodes(self) -> int:
        return self.middle.max_nodes + self.inner.max_nodes - 1

    @property
    def grows(self) -> bool:
        return self.lead.grows

    def fit_confidence(self, loss_T: Tensor) -> None:
        self.lead.fit_confidence(loss_T)

    @property
    def takes_paths(self) -> bool:
        return self.lead.takes_paths and self.lead.grown is None

    @property
    def more_nodes(self) -> int:
        return self.max_nodes - self.lead.max_nodes

    def tree_settings(self, depth: int, paths: Sequence[Path]) -> dict[str, Any]:
        """The lead's tree. The other drafter's drafts are as deep as before."""
        return {"middle" if self.lead is self.middle else "inner": {"paths": [list(path) for path in paths]}}

    @property
    def tunable(self) -> bool:
        return self.lead.tunable

    def tune(self, sequences: Sequence[Tensor], nodes: int) -> None:
        """Tune the lead's tree, as far as it fits next to the other drafter's nodes."""
        other_proposal = self.inner if self.lead is self.middle else self.middle
        self.lead.tune(sequences, min(nodes, MOST_NODES - other_proposal.max_nodes))

    def use(self, settings: Mapping[str, Any]) -> None:
        """The parts have taken their settings already."""
        super().use(settings)
        self.check()

    def check(self) -> None:
        if self.max_nodes > MOST_NODES:
            raise UserError(
                f"drafter.middle proposes up to {self.middle.max_nodes - 1} nodes, drafter.inner {self.inner.max_nodes - 1}; a "
                f"tree of both holds {MOST_NODES - 1}: lower draft_length, paths or nodes of either"
            )


class Merged(Drafter):
    """Both drafters draft alone. The tree holds every token path of either proposal once.

    Proposals are deterministic at any temperature: a sampled chain could not carry its draft distribution into the tree.
    The lead is the middle, unless only the inner drafter is trained.
    """

    def __init__(self, middle: Drafter, inner: Drafter, target: Target) -> None:
        if not target.trees:
            raise UserError(
                "drafter.join=merge proposes trees; this target's architecture is exact for chains only: use one of the "
                "drafters alone, or a middle with a language model and drafter.join=verify"
            )
        middle_leads = middle.trained or not inner.trained
        proposal = MergedProposal(middle.proposal, inner.proposal, (middle if middle_leads else inner).proposal)
        super().__init__(proposal)
        self.middle, self.inner = middle, inner
        self.taps = middle.taps | inner.taps
        self.trained = middle.trained or inner.trained
        self.revertible = middle.revertible and inner.revertible
        self.starts_usable = middle.starts_usable
        proposal.check()

    @property
    def lead(self) -> Drafter:
        return self.middle if self.middle.trained or not self.inner.trained else self.inner

    @property
    def max_new_positions(self) -> int:
        return max(super().max_new_positions, *(drafter.max_new_positions for drafter in self.parts.values()))

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """The lead's predictions. In training the other drafter's follow; they do not enter the figures."""
        yield from self.lead.predict(batch)
        if self.training and self.lead is self.middle:
            for prediction in self.inner.predict(batch):
                yield replace(prediction, counted=False)

    def open(self, slots: int, max_len: int) -> MergedState:
        """The parts' caches have room for the whole tree, since the session bounds their lengths for it."""
        positions = max_len + self.max_new_positions
        states = [(drafter, drafter.open(slots, positions)) for drafter in self.parts.values()]
        return RevertibleMergedState(states) if self.revertible else MergedState(states)


class MergedState(DraftState):
    """The states of both drafters."""

    def __init__(self, parts: list[tuple[Drafter, DraftState]]) -> None:
        self.parts = parts

    def reset(self, slot_R: Tensor) -> None:
        for _, state in self.parts:
            state.reset(slot_R)

    def observe(self, commit: Commit, slot_B: Tensor) -> None:
        """A part has room for as many positions as its own drafts could bring. It gets more of them in pieces."""
        for drafter, state in self.parts:
            tapped = _tapped(drafter, commit)
            if commit.token_BA.shape[1] <= drafter.draft_length + 1:  # as most commits are
                state.observe(tapped, slot_B)
                continue
            first, *rest = pieces(tapped, drafter.draft_length)
            state.observe(first, slot_B)
            for piece in rest:
                state.catch_up(slot_B)
                state.observe(piece, slot_B)

    def observe_prompt(self, commit: Commit, slot_B: Tensor) -> None:
        for drafter, state in self.parts:
            state.observe_prompt(_tapped(drafter, commit), slot_B)

    def catch_up(self, slot_B: Tensor) -> None:
        for _, state in self.parts:
            state.catch_up(slot_B)

    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        greedy = replace(sampling, draft_temperature=0.0)
        middle, inner = (state.propose(slot_B, greedy, depth) for _, state in self.parts)
        return join_trees(middle, inner)

    @property
    def caches(self) -> list[KVCache]:
        return [kv for _, state in self.parts for kv in state.caches]


class RevertibleMergedState(MergedState, RevertibleState):
    """The states of two drafters that can both forget."""

    def snapshot(self, slot_B: Tensor) -> list[Any]:
        return [state.snapshot(slot_B) for state in self._states]

    def restore(self, slot_B: Tensor, snapshot: list[Any]) -> None:
        for state, state_snapshot in zip(self._states, snapshot, strict=True):
            state.restore(slot_B, state_snapshot)

    @property
    def _states(self) -> list[RevertibleState]:
        states = [state for _, state in self.parts if isinstance(state, RevertibleState)]
        assert len(states) == len(self.parts), "`Merged.open` chooses this class where all parts are revertible"
        return states


def pieces(commit: Commit, draft_length: int) -> list[Commit]:
    """The commit's columns in order, split so that a drafter can store each piece.

    The first piece has a draft and its root; later ones have one position less, because one position stays pending. 9 columns
    with a draft length of 3 give 4, 3 and 2.
    """
    A, commits, start = commit.token_BA.shape[1], [], 0
    while start < A:
        end = min(A, start + draft_length + (start == 0))
        hidden = {k: h[:, start:end] for k, h in commit.hidden.items()}
        count_B = (commit.count_B - start).clamp(0, end - start)
        commits.append(Commit(commit.token_BA[:, start:end], commit.next_BA[:, start:end], hidden, count_B))
        start = end
    return commits


def _tapped(drafter: Drafter, commit: Commit) -> Commit:
    """The commit with only the states that this drafter reads."""
    keys = drafter.taps.keys
    if len(keys) == len(commit.hidden):
        return commit
    hidden = {k: commit.hidden[k] for k in keys}
    return Commit(commit.token_BA, commit.next_BA, hidden, commit.count_B)
