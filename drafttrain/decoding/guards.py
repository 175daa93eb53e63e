"""Output monitors. They count loops, missing stop tokens and broken JSON in finished texts; guards also watch a text while it
is decoded, and act when it starts to loop or can no longer become JSON.

A loop is a run of one n-gram that repeats without gaps. JSON is checked against its grammar (RFC 8259), with llguidance: can
the text still become one whole value? Blanks may surround the value, and so may a ``` fence with or without a language's name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

ACTIONS = ("off", "plain", "stop")
LOOP, JSON = "loop", "json"
QUALITY = ("loops", "stop_misses", "longest_repeat", "json_valid")  # what is counted in finished texts
UNFINISHED = "\ufffd"  # a tokenizer decodes a part of a character to this

Decode = Callable[[list[int]], str]
LEAST_REPEATS = 3
LONGEST_PERIOD = 32  # longest n-gram that is searched for
LEAST_TOKENS = 16  # shorter repetition is ordinary text
REACH = LEAST_REPEATS * LONGEST_PERIOD  # number of last tokens that are enough to detect a loop
TICKS = "```"
BLANKS = " \t\n\r"
GRAMMAR = r"""
value: object | array | STRING | NUMBER | "true" | "false" | "null"
object: "{" WS? (member ("," WS? member)*)? "}"
member: STRING WS? ":" WS? value WS?
array: "[" WS? (element ("," WS? element)*)? "]"
element: value WS?
STRING: /"([^"\\\x00-\x1f]|\\(["\\\/bfnrt]|u[0-9a-fA-F]{4}))*"/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
WS: /[ \t\n\r]+/
"""
BARE = "start: WS? value WS?" + GRAMMAR
FENCED = (
    r"""start: WS? value WS? | WS? "```" NAME? "\n" WS? value WS? "```" WS?
NAME: /[\p{L}\p{N} \r_+.\-]+/"""
    + GRAMMAR
)


@dataclass(frozen=True, slots=True)
class Guard:
    """What to do about a loop, and about a text that can no longer become JSON.

    The actions are nothing (off), plain decoding of the target from there on (plain), or the end of the text (stop).
    """

    loop: str = "off"  # action for a loop
    json: str = "off"  # action for a text that can no longer become JSON
    fence: bool = True  # whether a ``` fence may surround the JSON
    decode: Decode | None = None  # token ids to text without special tokens; needed for JSON only

    def __post_init__(self) -> None:
        for name in (LOOP, JSON):
            action = getattr(self, name)
            if action not in ACTIONS:
                raise ValueError(f"decode.guard.{name} is {action!r}; choose one of {', '.join(ACTIONS)} (quote 'off' in YAML)")
        if self.json != "off" and self.decode is None:
            raise ValueError("a guard of JSON reads text; give it the tokenizer's decode")

    @property
    def idle(self) -> bool:
        """Whether no action is set."""
        return self.loop == self.json == "off"

    def without(self, action: str) -> Guard:
        """The same without this action."""
        return replace(self, loop="off" if self.loop == action else self.loop, json="off" if self.json == action else self.json)

    def of(self, as_json: bool) -> Guard | None:
        """The guard of one text; None if nothing is watched. as_json: the text is meant to be JSON."""
        guard = self if as_json else replace(self, json="off")
        return None if guard.idle else guard


@dataclass(frozen=True, slots=True)
class Act:
    """An action on one text."""

    guard: str  # loop or json
    action: str  # plain or stop
    kept: int  # number of tokens that stay; the text continues or ends after them


class Watch:
    """Watches one text. A guard that has acted is off, and after the first `plain` all `plain` actions are off."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._reader = None if guard.json == "off" or guard.decode is None else _Reader(guard.decode, guard.fence)

    def act(self, tokens: list[int], new: int) -> Act | None:
        """The action for the first fault within the last `new` tokens; None if there is none.

        A loop keeps the token that completes it. JSON drops the token that breaks it, unless that is the text's first token.
        """
        for end in range(len(tokens) - new + 1, len(tokens) + 1):
            if self._guard.loop != "off" and loops(tokens[max(0, end - REACH) : end]):
                return self._acted(LOOP, self._guard.loop, end)
            if self._reader is not None and not self._reader.goes_on(tokens, end):
                return self._acted(JSON, self._guard.json, max(1, end - 1))
        return None

    def _acted(self, name: str, action: str, kept_count: int) -> Act:
        self._guard = replace(self._guard, loop="off") if name == LOOP else replace(self._guard, json="off")
        if action == "plain":
            self._guard = self._guard.without("plain")
        if self._guard.json == "off":
            self._reader = None
        return Act(name, action, kept_count)


class _Reader:
    """Feeds tokens to the JSON checker. An incomplete character waits for its remaining tokens."""

    def __init__(self, decode: Decode, fence: bool) -> None:
        self._decode, self._json = decode, JsonText(fence)
        self._from = self._read = 0  # tokens [_from, _read) are read already; they are decoded again as context for the next

    def goes_on(self, tokens: list[int], end: int) -> bool:
        """Whether the first `end` tokens can become JSON. Call it with 1, 2, 3, ..."""
        previous_text, text = (self._decode(tokens[self._from : stop]) for stop in (self._read, end))
        if text.endswith(UNFINISHED):
            return True
        self._from, self._read = self._read, end
        return self._json.feed(text[len(previous_text) :]) is None


def tail_run(items: Sequence[object], n: int) -> int:
    """Length of the run of one n-gram that ends the sequence; 0 if it repeats fewer than three times.

    Example: `c a b a b a b` ends in three times `a b`, 6 items.
    """
    equal = 0
    while equal + n < len(items) and items[-1 - equal] == items[-1 - equal - n]:
        equal += 1
    return whole_run(equal, n)


def loops(tokens: Sequence[int]) -> bool:
    """Whether the tail repeats one n-gram of at most 32 tokens at least three times, over at least 16 tokens."""
    tail = tokens[-REACH:]
    return any(tail_run(tail, n) >= LEAST_TOKENS for n in range(1, LONGEST_PERIOD + 1))


def whole_run(equal: int, n: int) -> int:
    """Length of a run in which `equal` items agree with the item n earlier: equal + n, or 0 if it repeats too rarely."""
    run = equal + n
    return run if equal and run // n >= LEAST_REPEATS else 0


class JsonText:
    """One text that grows. fence: whether a ``` fence may surround the value; its name, if any, ends with the line."""

    def __init__(self, fence: bool = True) -> None:
        self._matcher, self._text, self._broken = _start(fence).deep_copy(), "", False

    def feed(self, text: str) -> int | None:
        """Append `text`. Returns the index of the first character with which the text can no longer become JSON, or None.

        Raises RuntimeError when the text exceeds a limit of llguidance.
        """
        if self._broken or not text:
            return 0 if self._broken and text else None
        content = text.encode("utf-8", "surrogatepass")
        accepted = self._matcher.try_consume_tokens(list(content))
        if self._matcher.is_error():
            raise RuntimeError(f"llguidance cannot read this JSON text: {self._matcher.get_error()}")
        self._text += text
        self._broken = accepted < len(content)
        return len(content[:accepted].decode(errors="ignore")) if self._broken else None

    @property
    def complete(self) -> bool:
        """Whether the text is one whole value and nothing is left to close."""
        return not self._broken and bool(self._matcher.is_accepting())

    @property
    def value(self) -> str:
        """The value without the fence and the blanks around it, once the text is complete."""
        text = self._text.strip(BLANKS)
        return text.partition("\n")[2].removesuffix(TICKS).strip(BLANKS) if text.startswith(TICKS) else text


@cache
def _start(fence: bool) -> LLMatcher:
    """A matcher at the beginning of a text; to be copied."""
    from llguidance import LLMatcher, LLTokenizer  # only here: the GPU suites run without it

    matcher = LLMatcher(LLTokenizer("byte"), FENCED if fence else BARE)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def longest_repeat(tokens: Sequence[int]) -> int:
    """Length in tokens of the longest run of one n-gram, repeated back to back at least three times; 0 when there is none.

    Example: `a b a b a b c` holds `a b` three times, 6 tokens.
    """
    return max((_longest_run(tokens, n) for n in range(1, LONGEST_PERIOD + 1)), default=0)


def ends_in_loop(tokens: Sequence[int], stop_ids: frozenset[int] = frozenset()) -> bool:
    """Whether the output's tail is a loop (`loops`). A stopped output has none."""
    return bool(tokens) and tokens[-1] not in stop_ids and loops(tokens)


def missed_stop(tokens: Sequence[int], stop_ids: frozenset[int]) -> bool:
    """Whether the output reached its length limit without a stop token."""
    return not tokens or tokens[-1] not in stop_ids


def valid_json(text: str, required: Sequence[str] = (), fence: bool = True) -> bool:
    """Whether the text is one JSON value, with blanks and, if allowed, a ``` fence around it.

    required: keys that it must have; then it must be an object.
    """
    checker = JsonText(fence)
    if checker.feed(text) is not None or not checker.complete:
        return False
    if not required:
        return True
    try:
        value = json.loads(checker.value)
    except RecursionError:
        return False
    return isinstance(value, dict) and all(key in value for key in required)


def counted(outputs: Sequence[Sequence[int]], stop_ids: frozenset[int]) -> dict[str, int]:
    """Number of outputs that end in a loop, number without a stop token, and the longest repetition in tokens."""
    return {
        "loops": sum(ends_in_loop(o, stop_ids) for o in outputs),
        "stop_misses": sum(missed_stop(o, stop_ids) for o in outputs),
        "longest_repeat": max((longest_repeat(o) for o in outputs), default=0),
    }


def _longest_run(tokens: Sequence[int], n: int) -> int:
    best = equal = 0
    for i in range(n, len(tokens)):
        equal = equal + 1 if tokens[i] == tokens[i - n] else 0
        best = max(best, equal)
    return whole_run(best, n)
