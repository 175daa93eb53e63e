"""Output monitors that act: they watch a text while it is decoded, and act when it starts to loop or can no longer become JSON.

The monitors of `drafttrain.measure.monitors` count the same faults in finished texts and never act.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from drafttrain.decoding.guards.json_text import JsonText
from drafttrain.decoding.guards.repetition import REACH, loops

ACTIONS = ("off", "plain", "stop")
LOOP, JSON = "loop", "json"
UNFINISHED = "\ufffd"  # a tokenizer decodes a part of a character to this

Decode = Callable[[list[int]], str]


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
