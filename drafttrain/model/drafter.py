"""What every drafter family is.

Shapes: B rows, A committed positions, N tree nodes, S slots, H hidden, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.core.sampling import Lane, Sampling, distribution
from drafttrain.core.tree import DraftTree
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.target import LoraSpec, PrunedTarget, Taps, Target, TargetShape
from drafttrain.ops.sample import sample


@dataclass(frozen=True, slots=True)
class Commit:
    """Newly verified positions, root first, all aligned on A: row b has count_B[b] of them, the rest is padding.

    token_BA: the token at a position. next_BA: the token that follows it (accepted drafts, then the bonus token).
    hidden: by tap key, [B, A, H], the target's state at the position.
    """

    token_BA: Tensor
    next_BA: Tensor
    hidden: dict[int, Tensor]
    count_B: Tensor


@dataclass(frozen=True, slots=True)
class Preferred:
    """How a drafter is decoded unless the user says otherwise, where tuning has found it out; None: as trained.

    draft_temperature: for sampling at `temperature`.
    """

    draft_length: int | None = None
    draft_temperature: float | None = None
    temperature: float | None = None


class Drafter(nn.Module, ABC):
    """Trained by `predict`, decoded by `open`, `observe`, `propose`. State is passed, never kept on the module."""

    taps: Taps
    draft_length: int  # K: depth of the deepest proposal
    captured: bool = True  # observe, absorb and propose neither ask the device nor change shape: a CUDA graph can hold them
    samples: bool = False  # at a temperature above 0 proposals are chains drawn from the drafter's own law, which they carry
    adapts: LoraSpec | None = None  # the family also trains the target: it drafts for the adapted one, the baseline of all
    starts_usable: bool = False  # worth measuring before it is trained: it begins as a model that can draft
    remark: str = ""  # what a user should know of this drafter before it is run, in one line
    recomputes: bool = False  # in training, layers keep their inputs alone and compute the rest again for the gradient
    preferred: Preferred = Preferred()
    layer_shape: TargetShape | None = None  # of decoder layers of its own
    trained: bool = True  # False: nothing is learnt, `predict` says nothing, and `fit` goes straight to the measurement

    @abstractmethod
    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """What is predicted for which label, one step (or head) at a time, in drafting order."""

    def recompute(self) -> None:
        """From here on `recomputes`, and what is inside does too."""
        self.recomputes = True
        for module in self.children():
            if isinstance(module, Drafter | PrunedTarget):
                module.recompute()

    def fed(self, length: int) -> int:
        """How many positions a sequence of this length sends through the drafter's layers in training, at most."""
        return length

    @property
    def ahead(self) -> int:
        """How many positions after its source a label lies, at most."""
        return self.draft_length + 1

    def prepare(self, counts: Callable[[], Tensor]) -> None:
        """Once before training. counts: how often each of the target's tokens is supervised in the training data, [V]."""

    @abstractmethod
    def open(self, slots: int, max_len: int) -> Any:
        """State for this many concurrent requests."""

    @abstractmethod
    def reset(self, state: Any, slot_R: Tensor) -> None:
        """New requests enter these slots."""

    @abstractmethod
    def observe(self, state: Any, commit: Commit, slot_B: Tensor) -> None:
        """Stage what was accepted for these slots. Computes nothing as long as there is room, so that an idle drafter costs
        next to nothing."""

    def read(self, state: Any, commit: Commit, slot_B: Tensor) -> None:
        """A piece of these slots' prompts, perhaps long; rows whose prompt has ended before it have count 0."""
        self.observe(state, commit, slot_B)

    def absorb(self, state: Any, slot_B: Tensor) -> None:
        """Work off what is staged, as far as the next proposal does not need it; for rounds that propose nothing."""

    def mark(self, state: Any, slot_B: Tensor) -> Any:
        """What `rewind` needs to take back what these slots observe from here on."""
        raise AssertionError("a family that can rewind can mark")

    def rewind(self, state: Any, slot_B: Tensor, mark: Any) -> None:
        """As if these slots had observed nothing since the mark: for drafters that draft for another one's guesses."""
        raise AssertionError("asked only where `rewinds`")

    @property
    def rewinds(self) -> bool:
        return type(self).rewind is not Drafter.rewind

    def variants(self) -> dict[str, Drafter]:
        """The same drafter decoding in other ways, by name, to be measured beside it. Before it has decoded anything."""
        return {}

    def language_model(self) -> Target | None:
        """The causal model whose own next tokens are the drafts, where there is one: it can verify a cheaper drafter's."""
        return None

    def settled(self) -> dict[str, Any]:
        """Options that were left to a rule, as the rule has set them for this target; plain data."""
        return {}

    def caches(self, state: Any) -> list[KVCache]:
        """The drafter's own caches, whose `bound` the session sets."""
        return []

    @abstractmethod
    def propose(self, state: Any, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        """A tree per slot, no deeper than `depth` (from 1) where one is given. Its first pass consumes the staged positions."""

    @property
    def foretold(self) -> int:
        """How many depths, from the first, `predict` speaks of in figures: those of `paths()`."""
        return self.draft_length

    def decode_settings(self) -> dict[str, Any]:
        """What decoding needs beyond weights and configuration (a searched tree, say); JSON values only."""
        return {}

    def use_decode_settings(self, settings: dict[str, Any]) -> None:
        """Take up what `decode_settings` gave."""

    def prefer(self, settings: dict[str, Any]) -> None:
        """Take up what tuning found best, beside `use_decode_settings`."""
        self.preferred = Preferred(*(settings.get(name) for name in ("draft_length", "draft_temperature", "temperature")))

    def tune(self, texts: Sequence[Tensor], nodes: int) -> None:
        """Choose the proposal's shape from each held-out text's teacher-forced ranks [samples, K], in text order, and a
        node budget (root excluded)."""

    def calibrate(self, sure_MK: Tensor, hit_MK: Tensor, mass_MK: Tensor) -> None:
        """Fit what confidences stand for to held-out text. sure_MK: their logits (`Prediction.confidence`). hit_MK: whether
        the draft was the text's token; mass_MK: sum min(p, q)."""

    def assured(self, sure_MK: Tensor, sampled: bool) -> Tensor:
        """[M, K] P(draft k is accepted, if those above it are) that these confidences stand for."""
        return sure_MK.sigmoid()

    @property
    def tunable(self) -> bool:
        """Whether `tune` chooses anything."""
        return type(self).tune is not Drafter.tune

    def paths(self) -> list[tuple[int, ...]]:
        """The rank paths that greedy decoding proposes; a chain unless a family says otherwise."""
        return [(0,) * d for d in range(1, self.draft_length + 1)]

    @property
    def max_nodes(self) -> int:
        """Nodes of the largest proposal, root included: what a cache must have room for."""
        return len(self.paths()) + 1

    @property
    def widest(self) -> int:
        """New positions of one pass at most: a tree, or what a drafter with its own cache has staged, with the root."""
        return max(self.max_nodes, self.draft_length + 2)


def trainable(drafter: nn.Module) -> int:
    return sum(p.numel() for p in drafter.parameters() if p.requires_grad)


def draft_chain(
    root_B: Tensor, logits_BV: Tensor, advance: Callable[[Tensor], Tensor], steps: int, sampling: Sampling, position_B: Tensor
) -> DraftTree:
    """A chain of `steps` drafts below the root: argmax when greedy, else drawn from q, which the tree carries.

    logits_BV: for the first draft. advance: token_B of the last draft -> logits for the next. position_B: of the root.
    With `sampling.shared_noise` a draft is drawn with the number that the verifier will use at its position.
    """
    tokens, laws, sampling = [root_B], [], sampling.drafting
    for step in range(steps):
        if step:
            logits_BV = advance(tokens[-1])
        if not sampling.greedy:
            laws.append(distribution(logits_BV, sampling))
        if sampling.shared_noise:
            tokens.append(sample(logits_BV, sampling, position_B + step + 1, Lane.TARGET))
        else:
            tokens.append(sample(logits_BV, sampling, position_B, Lane.DRAFT, draw=step))
    return DraftTree.chain(torch.stack(tokens, 1), q_BNV=torch.stack([*laws, laws[-1]], 1) if laws else None)
