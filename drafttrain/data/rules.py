"""Named rules for the target's replies. Each finds one fault; `prepare.drop` selects the rules that drop a reply."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drafttrain.decoding.guards import tail_run

LONGEST_PERIOD = 400  # characters: a paragraph
LEAST_CHARACTERS = 120  # shorter repetition is ordinary text: a ruler, a row of a table
OPENING = 300  # characters in which a refusal is searched for
REFUSAL = re.compile(
    r"as an ai( language)? model"
    r"|\bi(['’]m| am) (really |so |very )?sorry,? (but )?(i|as an)\b"
    r"|\bi (can['’]t|cannot|can not|won['’]t|will not)"
    r" (assist|help|fulfil|comply|provide|create|generate|write|answer|discuss|engage|support|continue|do that)"
    r"|\bi(['’]m| am) (unable|not able) to (assist|help|fulfil|comply|provide|create|generate|write|answer|discuss|engage)"
    r"|\bi must (respectfully )?decline",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of the target."""

    text: str
    finish: str  # stop, length if it ran out of tokens, or another finish reason of the server


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on a conversation."""

    kept: int  # number of replies before the first dropped one
    fault: str | None  # the rule that drops that reply
    found: frozenset[str]  # all rules that any reply breaks


def truncated(reply: Reply) -> bool:
    """The reply is cut off. A template would append an end of turn that the target did not write."""
    return reply.finish != "stop"


def loop(reply: Reply) -> bool:
    """The reply ends in three or more copies of one piece of text, over 120 characters or more."""
    text = reply.text.rstrip()
    return any(tail_run(text, n) >= LEAST_CHARACTERS for n in range(1, LONGEST_PERIOD + 1))


def refusal(reply: Reply) -> bool:
    """The reply begins with a refusal, in English."""
    return REFUSAL.search(reply.text[:OPENING]) is not None


def empty(reply: Reply) -> bool:
    """The reply is blank."""
    return not reply.text.strip()


RULES: dict[str, Callable[[Reply], bool]] = {"empty": empty, "truncated": truncated, "loop": loop, "refusal": refusal}


def judge(replies: Sequence[Reply], drop: Sequence[str]) -> Judged:
    """Judge a conversation's replies, in order. It is kept up to the first reply that breaks a rule of `drop`."""
    broken_rules = [[name for name, is_broken in RULES.items() if is_broken(reply)] for reply in replies]
    violations = frozenset(name for names in broken_rules for name in names)
    for kept_count, names in enumerate(broken_rules):
        if fault := next((name for name in names if name in drop), None):
            return Judged(kept_count, fault, violations)
    return Judged(len(replies), None, violations)
