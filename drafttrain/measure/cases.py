"""Floor 4: the prompts of a measurement, encoded, and in an order whose every prefix is a fair sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from drafttrain.data.prompts import Prompt, encode_prompt
from drafttrain.errors import UserError


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt's first turn as token ids."""

    question_id: str
    category: str
    tokens: list[int]


def encode_cases(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, room: int) -> tuple[list[Case], int]:
    """(cases of at most `room` tokens, number of prompts left out as longer). Raises UserError when none is left."""
    every = [Case(str(p.question_id), str(p.category), encode_prompt(tokenizer, p.turns)) for p in prompts]
    kept = [c for c in every if 0 < len(c.tokens) <= room]
    if not kept:
        shortest = min((len(c.tokens) for c in every), default=0)
        raise UserError(
            f"none of the {len(every)} prompts fits: the shortest has {shortest} tokens, the target leaves room for "
            f"{max(room, 0)} beside decode.max_new_tokens; give shorter prompts or lower decode.max_new_tokens"
        )
    return spread(kept), len(every) - len(kept)


def spread(cases: Sequence[Case]) -> list[Case]:
    """Round robin over the categories, in order of first appearance; the order within a category stays."""
    piles: dict[str, list[Case]] = {}
    for case in cases:
        piles.setdefault(case.category, []).append(case)
    longest = max((len(p) for p in piles.values()), default=0)
    return [pile[i] for i in range(longest) for pile in piles.values() if i < len(pile)]


def waves(count: int, batch_size: int) -> list[list[int]]:
    """Case numbers 0..count-1 in waves of `batch_size`, the last one maybe smaller."""
    return [list(range(start, min(start + batch_size, count))) for start in range(0, count, batch_size)]
