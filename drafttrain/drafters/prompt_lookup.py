"""Prompt lookup: the draft is copied from after an earlier occurrence of the text's last tokens; nothing is trained
(Saxena 2023; arXiv 2304.04487 does the same with references).

Shapes: S slots, B rows, A committed positions, P positions of a text, K drafts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.drafters import Family
from drafttrain.drafters.options import PromptLookupOptions
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.drafter import Commit, Drafter, FrozenRef, RevertibleState
from drafttrain.model.proposal import Proposal
from drafttrain.model.target import Taps, Target
from drafttrain.ops.commit import append_text
from drafttrain.ops.lookup import look_up, powers


class PromptLookup(Drafter):
    """Proposes chains of at most K tokens. A row whose last token is new proposes its root alone, followed by padding."""

    trained = False
    revertible = True

    def __init__(self, options: PromptLookupOptions, target: Target) -> None:
        max_ngram, min_ngram = options.max_ngram, options.min_ngram
        if max_ngram is not None and max_ngram < min_ngram:
            raise UserError(f"drafter.min_ngram is {min_ngram}, drafter.max_ngram {max_ngram}; set the first no higher")
        super().__init__(Proposal(options.draft_length))
        self.taps, self.most, self.least = Taps(), max_ngram, min_ngram
        self._target = FrozenRef(target)

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        return iter(())

    def open(self, slots: int, max_len: int) -> LookupState:
        return LookupState(self, slots, max_len, self._target.module.device)


class LookupState(RevertibleState):
    """Each slot's text. All work is on the device."""

    def __init__(self, drafter: PromptLookup, slots: int, max_len: int, device: torch.device) -> None:
        self.drafter = drafter
        self.token_SP = torch.zeros(slots, max_len + 2, dtype=torch.long, device=device)  # the last column takes padding
        self.length_S = torch.zeros(slots, dtype=torch.long, device=device)  # tokens before the root, which follows them
        self.power_P = powers(max_len + 2, device)  # of the hash's base

    def reset(self, slot_R: Tensor) -> None:
        self.length_S.index_fill_(0, slot_R, 0)

    def observe(self, commit: Commit, slot_B: Tensor) -> None:
        append_text(self.token_SP, self.length_S, commit.token_BA, commit.next_BA, commit.count_B, slot_B)

    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        drafter, steps = self.drafter, min(self.drafter.draft_length, depth or self.drafter.draft_length)
        history = (self.token_SP, self.length_S, self.power_P)
        return DraftTree.chain(*look_up(*history, slot_B, drafter.most, drafter.least, steps))

    def snapshot(self, slot_B: Tensor) -> Tensor:
        return self.length_S[slot_B]

    def restore(self, slot_B: Tensor, snapshot: Tensor) -> None:
        self.length_S[slot_B] = snapshot  # later positions are written again before they are read


FAMILY = Family(
    "prompt_lookup",
    PromptLookupOptions,
    PromptLookup,
    unserved="it has no trained weights; turn on the stack's own n-gram drafting",
)
