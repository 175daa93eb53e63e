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
from drafttrain.model.drafter import Commit, Drafter, RevertibleState
from drafttrain.model.frozen_ref import FrozenRef
from drafttrain.model.proposal import Proposal
from drafttrain.model.target import Taps, Target


class PromptLookup(Drafter):
    """Proposes chains of at most K tokens. A row whose last token is new proposes its root alone, followed by padding."""

    trained = False
    revertible = True

    def __init__(self, options: PromptLookupOptions, target: Target) -> None:
        most, least = options.max_ngram, options.min_ngram
        if least < 1 or options.draft_length < 1 or (most is not None and most < least):
            raise UserError(
                f"drafter.min_ngram is {least}, max_ngram {most}, draft_length {options.draft_length}; "
                "set each to 1 or more, and min_ngram no higher than max_ngram"
            )
        super().__init__(Proposal(options.draft_length))
        self.taps, self.most, self.least = Taps(), most, least
        self._target = FrozenRef(target)

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        return iter(())

    def open(self, slots: int, max_len: int) -> LookupState:
        return LookupState(self, slots, max_len, self._target.module.device)


class LookupState(RevertibleState):
    """Each slot's text. All work is on the device: a proposal compares the end of the text with every place in it."""

    def __init__(self, drafter: PromptLookup, slots: int, max_len: int, device: torch.device) -> None:
        self.drafter = drafter
        self.token_SP = torch.zeros(slots, max_len + 2, dtype=torch.long, device=device)  # the last column takes padding
        self.length_S = torch.zeros(slots, dtype=torch.long, device=device)  # tokens before the root, which follows them
        self.power_P = powers(max_len + 2, device)  # of the hash's base

    def reset(self, slot_R: Tensor) -> None:
        self.length_S.index_fill_(0, slot_R, 0)

    def observe(self, commit: Commit, slot_B: Tensor) -> None:
        known_BA = torch.cat([commit.token_BA[:, :1], commit.next_BA], 1)  # ends with the root
        column_A, spare = torch.arange(known_BA.shape[1], device=slot_B.device), self.token_SP.shape[1] - 1
        held_B, new_B = self.length_S[slot_B], commit.count_B
        real_BA = (column_A <= new_B[:, None]) & (new_B > 0)[:, None]
        at_BA = torch.where(real_BA, held_B[:, None] + column_A, spare)
        self.token_SP[slot_B[:, None], at_BA] = known_BA
        self.length_S[slot_B] = held_B + new_B

    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        drafter, text_BP, root_B = self.drafter, self.token_SP[slot_B], self.length_S[slot_B]
        most = drafter.most
        matched_BP = suffixes(text_BP, root_B, self.power_P) if most is None else ngrams(text_BP, root_B, most)
        source_B, found_B = latest_longest(matched_BP, root_B, drafter.least)
        steps = min(drafter.draft_length, depth or drafter.draft_length)
        copied_B = torch.where(found_B, (root_B - source_B).clamp_max(steps), 0)
        at_BK = source_B[:, None] + torch.arange(1, steps + 1, device=slot_B.device)
        draft_BK = text_BP.gather(1, at_BK.clamp_max(text_BP.shape[1] - 1))
        return DraftTree.chain(torch.cat([text_BP.gather(1, root_B[:, None]), draft_BK], 1), 1 + copied_B)

    def snapshot(self, slot_B: Tensor) -> Tensor:
        return self.length_S[slot_B]

    def restore(self, slot_B: Tensor, snapshot: Tensor) -> None:
        self.length_S[slot_B] = snapshot  # later positions are written again before they are read


def latest_longest(matched_BP: Tensor, root_B: Tensor, least: int) -> tuple[Tensor, Tensor]:
    """(place_B, found_B): where the longest match before the root ends, the last of equally long ones; whether it has `least`
    tokens."""
    place_P = torch.arange(matched_BP.shape[1], device=root_B.device)
    possible_BP = (matched_BP >= least) & (place_P < root_B[:, None])
    best_B, place_B = torch.where(possible_BP, matched_BP * len(place_P) + place_P, -1).max(1)
    return place_B, best_B >= 0


def ngrams(text_BP: Tensor, root_B: Tensor, most: int) -> Tensor:
    """[B, P] how many of the last tokens up to the root, `most` at most, also end at each place.

    In `a b c a b` with root the last `b`: 0 2 0 0 2.
    """
    place_P = torch.arange(text_BP.shape[1], device=text_BP.device)
    matched_BP, same_BP = torch.zeros_like(text_BP), torch.ones_like(text_BP, dtype=torch.bool)
    for back in range(most):
        token_B1 = text_BP.gather(1, (root_B - back).clamp_min(0)[:, None])
        inside_BP = (place_P >= back) & (root_B >= back)[:, None]
        same_BP = same_BP & inside_BP & (text_BP.roll(back, 1) == token_B1)
        matched_BP = matched_BP + same_BP
    return matched_BP


_BASE = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that no power of it vanishes modulo 2 ** 64


def powers(count: int, device: torch.device) -> Tensor:
    """[count] int64: powers of the hash's base, modulo 2 ** 64."""
    base = torch.full((count,), _BASE, dtype=torch.long, device=device)
    base[0] = 1
    return base.cumprod(0)


def suffixes(text_BP: Tensor, root_B: Tensor, power_P: Tensor) -> Tensor:
    """`ngrams` without a limit: log P comparisons of hashes instead of one for each length.

    The hash of a piece is the sum of token * base ** place, modulo 2 ** 64; two pieces are the same where their hashes are,
    moved to one place. Tokens that differ and hash alike would make a bad draft, no wrong text.
    """
    P = text_BP.shape[1]
    place_BP = torch.arange(P, device=text_BP.device).expand_as(text_BP)
    before_BP = torch.nn.functional.pad(((text_BP + 1) * power_P).cumsum(1), (1, 0))  # of the first p tokens, p to P
    here_BP, root_B1 = before_BP[:, 1:], root_B[:, None]
    whole_B1, apart_BP = before_BP.gather(1, root_B1 + 1), power_P[(root_B1 - place_BP).clamp_min(0)]
    matched_BP = torch.zeros_like(text_BP)
    for bit in reversed(range(P.bit_length())):
        longer_BP = matched_BP + (1 << bit)
        ours_BP = here_BP - before_BP.gather(1, (place_BP + 1 - longer_BP).clamp_min(0))
        wanted_BP = whole_B1 - before_BP.gather(1, (root_B1 + 1 - longer_BP).clamp_min(0))
        same_BP = (longer_BP <= place_BP + 1) & (place_BP <= root_B1) & (ours_BP * apart_BP == wanted_BP)
        matched_BP = torch.where(same_BP, longer_BP, matched_BP)
    return matched_BP


FAMILY = Family("prompt_lookup", PromptLookupOptions, PromptLookup)
