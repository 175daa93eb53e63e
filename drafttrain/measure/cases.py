"""A measurement's prompts, as token ids, and its time budget. Categories and turns alternate: any prefix is a fair sample."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from time import monotonic
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from drafttrain.core.errors import UserError
from drafttrain.data.chat import Encoded
from drafttrain.data.pictures import Content
from drafttrain.data.prompts import Prompt, encode_prompt
from drafttrain.targets.images import TEXT_ONLY, Images

Item = TypeVar("Item")
NAMED = 8  # names in a note at most


@dataclass(frozen=True, slots=True)
class Case:
    """One turn of a prompt."""

    question_id: str
    category: str
    tokens: list[int]  # the dialogue up to and including this turn
    turns: tuple[Content, ...] = ()  # all messages of the user
    replies: tuple[str, ...] = ()  # the target's replies to the turns before this one
    as_json: bool = False  # the prompt asks for JSON
    required: tuple[str, ...] = ()  # keys that the JSON must have
    origin: str | None = None  # the public set that the prompt is from
    tools: tuple[dict[str, Any], ...] = ()  # JSON schemas for the template
    adapter: str | None = None  # LoRA adapter of the target that is asked; None: the target itself

    @property
    def turn(self) -> int:
        """Number of this turn, from 1."""
        return len(self.replies) + 1


def encode_cases(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, room: int, images: Images = TEXT_ONLY
) -> tuple[list[Case], list[str]]:
    """(cases of at most `room` tokens, names of longer prompts, which are left out). Raises UserError when none is left."""
    encoded = [_case(p, tokenizer, images) for p in prompts]
    fitting = [c for c in encoded if 0 < len(c.tokens) <= room]
    if not fitting:
        shortest = min((len(c.tokens) for c in encoded), default=0)
        raise UserError(
            f"none of the {len(encoded)} prompts fits: the shortest has {shortest} tokens, and with decode.max_new_tokens the "
            f"target has room for {max(room, 0)}; give shorter prompts or lower decode.max_new_tokens"
        )
    return alternate_categories(fitting), [c.question_id for c in encoded if not 0 < len(c.tokens) <= room]


def held_out_cases(rows: Sequence[Encoded], room: int) -> list[Case]:
    """The prompts of conversations, each up to its last reply; of plain text, which has none, the first half.

    Prompts of more than `room` tokens are left out.
    """
    cases = []
    for number, row in enumerate(rows, start=1):
        end = row.last_reply if row.last_reply > 1 else len(row.token_ids) // 2
        if 0 < end <= room:
            cases.append(Case(f"held-out {number}", "held-out", row.token_ids[:end].tolist(), adapter=row.adapter))
    return cases


def left_out_notes(names: Sequence[str], count: int, room: int, what: str = "prompts") -> list[str]:
    """A note on the prompts that are left out; none where all fit. count: of all prompts. room: tokens of the longest."""
    if not names:
        return []
    listed_names = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    return [f"{len(names)} of {count} {what} have more than the {room} tokens that fit, and were left out: {listed_names}"]


def _case(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, images: Images) -> Case:
    return Case(
        str(prompt.question_id),
        str(prompt.category),
        encode_prompt(tokenizer, prompt.turns, images=images, tools=prompt.tools),
        tuple(prompt.turns),
        as_json=prompt.format == "json",
        required=prompt.required,
        origin=prompt.origin,
        tools=prompt.tools,
        adapter=prompt.adapter,
    )


def follow_ups(
    cases: Sequence[Case],
    outputs: Sequence[list[int]],
    tokenizer: PreTrainedTokenizerBase,
    room: int,
    most: int | None,
    images: Images = TEXT_ONLY,
) -> tuple[list[Case], list[str]]:
    """(the next turns of these cases, names of those whose next turn is left out as longer than `room` tokens).

    outputs: the replies to these cases, as token ids. most: turns of a dialogue at most.
    """
    next_turns = []
    for case, output in zip(cases, outputs, strict=True):
        if case.turn < len(case.turns) and (most is None or case.turn < most):
            replies = (*case.replies, str(tokenizer.decode(output, skip_special_tokens=True)).strip())
            tokens = encode_prompt(tokenizer, case.turns, replies, images, case.tools)
            next_turns.append(replace(case, tokens=tokens, replies=replies))
    fitting = [case for case in next_turns if len(case.tokens) <= room]
    return fitting, [case.question_id for case in next_turns if len(case.tokens) > room]


def interleaved_turns(cases: Sequence[Case]) -> list[int]:
    """The cases' numbers, alternating between first and further turns."""
    return _alternating(range(len(cases)), lambda number: cases[number].turn)


def alternate_categories(cases: Sequence[Case]) -> list[Case]:
    """The cases, alternating between categories in order of first appearance. The order within a category stays."""
    return _alternating(cases, lambda case: case.category)


def _alternating(items: Sequence[Item], group: Callable[[Item], Hashable]) -> list[Item]:
    """Round robin over the groups."""
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(group(item), []).append(item)
    return [item for turn in zip_longest(*groups.values(), fillvalue=None) for item in turn if item is not None]


def waves(count: int, batch_size: int) -> list[list[int]]:
    """Case numbers 0..count-1 in waves of `batch_size`. The last wave may be smaller."""
    return [list(range(start, min(start + batch_size, count))) for start in range(0, count, batch_size)]


def by_adapter(cases: Sequence[Case]) -> dict[str | None, list[int]]:
    """The cases' numbers, by adapter."""
    numbers: dict[str | None, list[int]] = {}
    for number, case in enumerate(cases):
        numbers.setdefault(case.adapter, []).append(number)
    return numbers


def waves_of(cases: Sequence[Case], chosen: Sequence[int], batch_size: int) -> list[list[int]]:
    """The chosen cases' numbers in waves of `batch_size`, each of one adapter. Waves alternate between adapters."""
    groups = by_adapter([cases[i] for i in chosen]).values()
    grouped = [[chosen[group[i]] for i in wave] for group in groups for wave in waves(len(group), batch_size)]
    return _alternating(grouped, lambda wave: cases[wave[0]].adapter)


LEAST_PROMPTS = 40  # a report's acceptance is measured on at least this many prompts, or on all when there are fewer
ACCEPTANCE_SHARE = 0.5  # largest share of the budget for acceptance on further prompts


@dataclass
class Budget:
    """The time budget of a whole measurement."""

    seconds: float
    least: int = LEAST_PROMPTS  # prompts on which acceptance is measured, whatever they take
    began: float = field(default_factory=monotonic)
    notes: list[str] = field(default_factory=list)  # for the report: what was cut or left out

    @property
    def used(self) -> float:
        return monotonic() - self.began

    @property
    def left(self) -> float:
        return max(0.0, self.seconds - self.used)

    def enough(self, done: int, seconds_so_far: float, passes: int) -> bool:
        """Whether acceptance should stop after `done` prompts: `passes` such passes would exceed their share of the budget."""
        return done >= self.least and seconds_so_far * passes > ACCEPTANCE_SHARE * self.seconds


@dataclass(frozen=True, slots=True)
class Plan:
    """How many waves of prompts to time, and how many times each."""

    waves: int
    repeats: int


def plan(seconds_per_wave: float, seconds: float, waves: int, repeats: int, least: int = 1) -> Plan:
    """As many of the wanted waves and repeats as fit into `seconds`. Waves are cut first, then repeats; one of each remains.

    seconds_per_wave: all contenders once over one wave. least: waves, once each, that are timed whatever they take.
    """
    least = min(least, waves)
    passes = max(least, int(seconds / seconds_per_wave)) if seconds_per_wave > 0 else waves * repeats
    if passes >= waves * repeats:
        return Plan(waves, repeats)
    timed = max(1, min(waves, max(passes // repeats, least)))
    return Plan(timed, max(1, min(repeats, passes // timed)))
