"""The prompts of a measurement, encoded, and in an order whose every prefix is a fair sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from drafttrain.core.errors import UserError
from drafttrain.data.prompts import Prompt, encode_prompt


@dataclass(frozen=True, slots=True)
class Case:
    """One turn of a prompt as token ids: what was said before it, and what is asked.

    turns: all that the user says; replies: the target's to those before this one. as_json: the reply is to be JSON, with the
    keys in `required`. origin: the public set that the prompt is of.
    """

    question_id: str
    category: str
    tokens: list[int]
    turns: tuple[str, ...] = ()
    replies: tuple[str, ...] = ()
    as_json: bool = False
    required: tuple[str, ...] = ()
    origin: str | None = None

    @property
    def turn(self) -> int:
        """From 1."""
        return len(self.replies) + 1


def encode_cases(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, room: int) -> tuple[list[Case], int]:
    """(cases of at most `room` tokens, number of prompts left out as longer). Raises UserError when none is left."""
    every = [_case(p, tokenizer) for p in prompts]
    kept = [c for c in every if 0 < len(c.tokens) <= room]
    if not kept:
        shortest = min((len(c.tokens) for c in every), default=0)
        raise UserError(
            f"none of the {len(every)} prompts fits: the shortest has {shortest} tokens, the target leaves room for "
            f"{max(room, 0)} beside decode.max_new_tokens; give shorter prompts or lower decode.max_new_tokens"
        )
    return alternate_categories(kept), len(every) - len(kept)


def _case(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> Case:
    return Case(
        str(prompt.question_id),
        str(prompt.category),
        encode_prompt(tokenizer, prompt.turns),
        tuple(prompt.turns),
        as_json=prompt.format == "json",
        required=prompt.required,
        origin=prompt.origin,
    )


def follow_ups(
    cases: Sequence[Case], texts: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase, room: int, most: int | None
) -> tuple[list[Case], int]:
    """(the next turns of these cases, behind the replies `texts`; how many do not fit into `room`). most: turns in all."""
    found = []
    for case, text in zip(cases, texts, strict=True):
        if case.turn < len(case.turns) and (most is None or case.turn < most):
            replies = (*case.replies, str(tokenizer.decode(text, skip_special_tokens=True)).strip())
            found.append(replace(case, tokens=encode_prompt(tokenizer, case.turns, replies), replies=replies))
    fitting = [case for case in found if len(case.tokens) <= room]
    return fitting, len(found) - len(fitting)


def interleaved_turns(cases: Sequence[Case]) -> list[int]:
    """Their numbers, first and later turns alternating, so that a beginning has its share of each."""
    piles: dict[int, list[int]] = {}
    for number, case in enumerate(cases):
        piles.setdefault(case.turn, []).append(number)
    longest = max((len(pile) for pile in piles.values()), default=0)
    return [pile[i] for i in range(longest) for pile in piles.values() if i < len(pile)]


def alternate_categories(cases: Sequence[Case]) -> list[Case]:
    """Round robin over the categories, in order of first appearance; the order within a category stays."""
    piles: dict[str, list[Case]] = {}
    for case in cases:
        piles.setdefault(case.category, []).append(case)
    longest = max((len(p) for p in piles.values()), default=0)
    return [pile[i] for i in range(longest) for pile in piles.values() if i < len(pile)]


def waves(count: int, batch_size: int) -> list[list[int]]:
    """Case numbers 0..count-1 in waves of `batch_size`, the last one maybe smaller."""
    return [list(range(start, min(start + batch_size, count))) for start in range(0, count, batch_size)]
