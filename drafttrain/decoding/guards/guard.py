"""Guards: output monitors that act. They stop a text, or continue it by plain decoding, when it loops or breaks its format.

Monitors (`drafttrain.measure.monitors`) count the same faults in finished texts; they never act.
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
    """The actions on faults: off, plain (plain decoding from there on), or stop (end of the text)."""

    loop: str = "off"  # action on a loop
    json: str = "off"  # action on a text that can no longer become JSON
    fence: bool = True  # a ``` fence may enclose the JSON
    decode: Decode | None = None  # token ids into text without special tokens; only `json` needs it

    def __post_init__(self) -> None:
        for name in (LOOP, JSON):
            action = getattr(self, name)
            if action not in ACTIONS:
                raise ValueError(f"decode.guard.{name} is {action!r}; choose one of {', '.join(ACTIONS)} (quote 'off' in YAML)")
        if self.json != "off" and self.decode is None:
            raise ValueError("a guard of JSON reads text; give it the tokenizer's decode")

    @property
    def idle(self) -> bool:
        return self.loop == self.json == "off"

    def without(self, action: str) -> Guard:
        """The guard without this action."""
        return replace(self, loop="off" if self.loop == action else self.loop, json="off" if self.json == action else self.json)

    def of(self, as_json: bool) -> Guard | None:
        """The guard of one text; None: nothing is watched. as_json: the text is meant to be JSON."""
        guard = self if as_json else replace(self, json="off")
        return None if guard.idle else guard


@dataclass(frozen=True, slots=True)
class Act:
    """One action of a guard."""

    guard: str  # loop or json
    action: str  # plain or stop
    kept: int  # tokens of the text before the action


class Watch:
    """Watches one text. A guard that has acted is off. After a first `plain` there is no second one."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._reader = None if guard.json == "off" or guard.decode is None else _Reader(guard.decode, guard.fence)

    def act(self, tokens: list[int], new: int) -> Act | None:
        """The action on the first fault within the last `new` tokens; None: no fault.

        A loop keeps the token that makes it one. JSON loses the token that breaks it, unless it is the text's first.
        """
        for end in range(len(tokens) - new + 1, len(tokens) + 1):
            if self._guard.loop != "off" and loops(tokens[max(0, end - REACH) : end]):
                return self._acted(LOOP, self._guard.loop, end)
            if self._reader is not None and not self._reader.goes_on(tokens, end):
                return self._acted(JSON, self._guard.json, max(1, end - 1))
        return None

    def _acted(self, name: str, action: str, kept: int) -> Act:
        self._guard = replace(self._guard, loop="off") if name == LOOP else replace(self._guard, json="off")
        if action == "plain":
            self._guard = self._guard.without("plain")
        if self._guard.json == "off":
            self._reader = None
        return Act(name, action, kept)


class _Reader:
    """Reads tokens as JSON, one after the other. A part of a character waits for the rest of it."""

    def __init__(self, decode: Decode, fence: bool) -> None:
        self._decode, self._json = decode, JsonText(fence)
        self._from = self._read = 0  # tokens [_from, _read) have been read, and are decoded again before those that follow

    def goes_on(self, tokens: list[int], end: int) -> bool:
        """Whether the first `end` tokens can become JSON; called with 1, 2, 3, ..."""
        known, text = (self._decode(tokens[self._from : stop]) for stop in (self._read, end))
        if text.endswith(UNFINISHED):
            return True
        self._from, self._read = self._read, end
        return self._json.feed(text[len(known) :]) is None
