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
    """Each slot's text. All work is on the device: a proposal compares the end of the text with every place in it."""

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
        drafter, text_BP, root_B = self.drafter, self.token_SP[slot_B], self.length_S[slot_B]
        max_ngram = drafter.most
        matched_BP = suffixes(text_BP, root_B, self.power_P) if max_ngram is None else ngrams(text_BP, root_B, max_ngram)
        source_B, matched_B = latest_longest(matched_BP, root_B, drafter.least)
        steps = min(drafter.draft_length, depth or drafter.draft_length)
        copied_B = torch.where(matched_B, (root_B - source_B).clamp_max(steps), 0)
        index_BK = source_B[:, None] + torch.arange(1, steps + 1, device=slot_B.device)
        draft_BK = text_BP.gather(1, index_BK.clamp_max(text_BP.shape[1] - 1))
        return DraftTree.chain(torch.cat([text_BP.gather(1, root_B[:, None]), draft_BK], 1), 1 + copied_B)

    def snapshot(self, slot_B: Tensor) -> Tensor:
        return self.length_S[slot_B]

    def restore(self, slot_B: Tensor, snapshot: Tensor) -> None:
        self.length_S[slot_B] = snapshot  # later positions are written again before they are read


def latest_longest(matched_BP: Tensor, root_B: Tensor, least: int) -> tuple[Tensor, Tensor]:
    """(end_B, matched_B): where the longest match before the root ends, the last of equally long ones; whether it has `least`
    tokens."""
    index_P = torch.arange(matched_BP.shape[1], device=root_B.device)
    possible_BP = (matched_BP >= least) & (index_P < root_B[:, None])
    best_B, end_B = torch.where(possible_BP, matched_BP * len(index_P) + index_P, -1).max(1)
    return end_B, best_B >= 0


def ngrams(text_BP: Tensor, root_B: Tensor, most: int) -> Tensor:
    """[B, P] how many of the last tokens up to the root, `most` at most, also end at each place.

    In `a b c a b` with root the last `b`: 0 2 0 0 2.
    """
    index_P = torch.arange(text_BP.shape[1], device=text_BP.device)
    matched_BP, equal_BP = torch.zeros_like(text_BP), torch.ones_like(text_BP, dtype=torch.bool)
    for offset in range(most):
        token_B1 = text_BP.gather(1, (root_B - offset).clamp_min(0)[:, None])
        inside_BP = (index_P >= offset) & (root_B >= offset)[:, None]
        equal_BP = equal_BP & inside_BP & (text_BP.roll(offset, 1) == token_B1)
        matched_BP = matched_BP + equal_BP
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
    index_BP = torch.arange(P, device=text_BP.device).expand_as(text_BP)
    prefix_hash_BP = torch.nn.functional.pad(((text_BP + 1) * power_P).cumsum(1), (1, 0))  # of the first p tokens, p to P
    end_hash_BP, root_B1 = prefix_hash_BP[:, 1:], root_B[:, None]
    root_hash_B1, shift_BP = prefix_hash_BP.gather(1, root_B1 + 1), power_P[(root_B1 - index_BP).clamp_min(0)]
    matched_BP = torch.zeros_like(text_BP)
    for bit in reversed(range(P.bit_length())):
        longer_BP = matched_BP + (1 << bit)
        piece_hash_BP = end_hash_BP - prefix_hash_BP.gather(1, (index_BP + 1 - longer_BP).clamp_min(0))
        suffix_hash_BP = root_hash_B1 - prefix_hash_BP.gather(1, (root_B1 + 1 - longer_BP).clamp_min(0))
        equal_BP = (longer_BP <= index_BP + 1) & (index_BP <= root_B1) & (piece_hash_BP * shift_BP == suffix_hash_BP)
        matched_BP = torch.where(equal_BP, longer_BP, matched_BP)
    return matched_BP


FAMILY = Family("prompt_lookup", PromptLookupOptions, PromptLookup)
