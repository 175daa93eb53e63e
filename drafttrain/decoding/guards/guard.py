"""Guards watch a text as its tokens come to the host, and act where it begins to loop or breaks its format.

Monitors (`drafttrain.measure.monitors`) count the same faults in texts that are done; they never act.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from drafttrain.decoding.guards.json_text import JsonText
from drafttrain.decoding.guards.repetition import REACH, loops

ACTIONS = ("off", "plain", "stop")
LOOP, JSON = "loop", "json"
UNFINISHED = "\ufffd"  # what a tokenizer decodes a part of a character to

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True)
class Guard:
    """loop, json: what is done about a loop, and about a text that can no longer become JSON: nothing (off), plain decoding of
    the target from there on (plain), or the end of the text (stop).

    fence: a ``` fence may stand around the JSON. decode: token ids into text without special tokens; JSON alone needs it.
    """

    loop: str = "off"
    json: str = "off"
    fence: bool = True
    decode: Decode | None = None

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
        """Guards that would act so are off."""
        return replace(self, loop="off" if self.loop == action else self.loop, json="off" if self.json == action else self.json)

    def of(self, as_json: bool) -> Guard | None:
        """The guard of one text; None where nothing is watched. as_json: it is meant to be JSON."""
        guard = self if as_json else replace(self, json="off")
        return None if guard.idle else guard


@dataclass(frozen=True, slots=True)
class Act:
    """guard: loop or json. action: plain or stop. kept: tokens of the text, which goes on, or ends, behind them."""

    guard: str
    action: str
    kept: int


class Watch:
    """Watches one text. A guard that has acted is off; behind a first `plain` there is nothing left to fall back to."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._reader = None if guard.json == "off" or guard.decode is None else _Reader(guard.decode, guard.fence)

    def act(self, tokens: list[int], new: int) -> Act | None:
        """What is done about the first fault within the last `new` tokens; None where there is none.

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
