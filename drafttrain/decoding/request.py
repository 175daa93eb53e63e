"""Decoding requests and their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from drafttrain.decoding.guards import Act, Guard, Watch

CONTEXT = 5  # tokens of the prompt that a text's first token is decoded after


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue, and its limits."""

    prompt: Sequence[int]
    key: int = 0  # seeds the request's noise: equal keys and seeds give equal samples
    max_new_tokens: int = 128
    min_new_tokens: int = 0  # no stop token before so many tokens
    stop_ids: frozenset[int] = frozenset()  # tokens that end a text, and are part of it
    stop_text: StopText | None = None
    samples: int = 1  # sequences of this prompt, with keys from `key` on; they share the prompt's pages
    guard: Guard | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a prompt has no tokens; give each at least one")
        if self.max_new_tokens < 1 or self.samples < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, samples {self.samples}; both must be 1 or more")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens}; set it within 0 and max_new_tokens, {self.max_new_tokens}"
            )


@dataclass(slots=True)
class Result:
    """One generated sequence. Times are seconds of perf_counter."""

    request: int  # its key
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)  # new tokens; the first comes from the prefill
    verifications: int = 0
    emitted: int = 0  # tokens that came from verifications
    offered: list[int] = field(default_factory=list)  # by depth from 1: verifications that reached a draft of this depth
    accepted: list[int] = field(default_factory=list)  # by depth from 1: verifications that accepted it
    nodes: int = 0  # draft nodes verified, roots excluded
    ended_by: str | None = None  # stop, text, length, or the guard that ended it (loop, json); None while it runs
    queued: float = 0.0
    started: float = 0.0  # its prefill began
    first: float = 0.0  # first token
    ended: float = 0.0  # last token
    runs: list[int] = field(default_factory=list)  # accepted drafts of each verification, in order
    lengths: list[int] = field(default_factory=list)  # tokens of each verification that stayed in the text
    acts: list[Act] = field(default_factory=list)  # the actions of guards
    fell_back: bool = False  # a guard has just cut the text; the scheduler has not switched it to plain decoding yet
    plain: bool = False  # plain decoding continues it
    _watch: Watch | None = None

    @property
    def tau(self) -> float:
        """Tokens per verification; NaN before the first."""
        return self.emitted / self.verifications if self.verifications else float("nan")

    def begin(self, request: Request, token: int, now: float) -> None:
        """Add the first token, from the prefill."""
        self.tokens, self.first, self.ended = [token], now, now
        self._watch = None if request.guard is None else Watch(request.guard)
        self._cut(request, 1)

    def take(self, request: Request, tokens: list[int], nodes: int, open: bool, now: float) -> Chunk:
        """Add the tokens of one decode step, all but the last of them accepted drafts, cut where the text ends.

        open: whether the last accepted node had children, so that one more draft was offered than accepted.
        """
        self.tokens += tokens
        emitted = self._cut(request, len(tokens))
        drafts = min(emitted, len(tokens) - 1)
        _add(self.offered, drafts + (1 if emitted == len(tokens) and open else 0))
        _add(self.accepted, drafts)
        self.runs.append(drafts)
        self.lengths.append(emitted)
        self.emitted += emitted
        self.verifications += 1
        self.nodes += nodes
        self.ended = now
        return Chunk(self, tokens[:emitted], drafts)

    def _cut(self, request: Request, new: int) -> int:
        """End the text if it ends within its `new` last tokens. Gives how many of them stay."""
        tokens, previous_length = self.tokens, len(self.tokens) - new
        ends = [(i + 1, "stop") for i in range(previous_length, len(tokens)) if tokens[i] in request.stop_ids][:1]
        if request.stop_text is not None and (end := request.stop_text.end(request.prompt, tokens, new)) is not None:
            ends.append((end, "text"))
        if len(tokens) >= request.max_new_tokens:
            ends.append((request.max_new_tokens, "length"))
        if ends:
            end, self.ended_by = min(ends, key=lambda e: e[0])
            del tokens[end:]
        if self._watch is not None and (act := self._watch.act(tokens, len(tokens) - previous_length)) is not None:
            self._apply(act)
        return len(tokens) - previous_length

    def _apply(self, act: Act) -> None:
        """Cut the text. Do nothing if it ends at the same token anyway."""
        if self.ended_by and act.kept == len(self.tokens):
            return
        self.acts.append(act)
        del self.tokens[act.kept :]
        self.ended_by = act.guard if act.action == "stop" else None
        self.fell_back = act.action == "plain"
        self.plain = self.plain or self.fell_back


def _add(counts: list[int], depth_reached: int) -> None:
    counts.extend([0] * (depth_reached - len(counts)))
    for i in range(depth_reached):
        counts[i] += 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that one decode step added to a result. The first `drafted` of them are accepted drafts."""

    result: Result
    tokens: list[int]
    drafted: int


@dataclass(frozen=True, slots=True)
class StopText:
    """Strings that end a text. The text keeps the token that completes one; `decode` turns token ids into text."""

    strings: tuple[str, ...]
    decode: Callable[[list[int]], str]

    def __post_init__(self) -> None:
        if not self.strings or not all(self.strings):
            raise ValueError(f"stop strings are {list(self.strings)}; give at least one, none of them empty")

    def end(self, prompt: Sequence[int], tokens: list[int], new: int) -> int | None:
        """How many tokens the text keeps, if one of its last `new` tokens completes a string; else None."""
        lookback = 4 * max(map(len, self.strings)) + 4  # a character takes up to four byte tokens
        if not self._within(prompt, tokens, max(0, len(tokens) - new - lookback)):
            return None
        for end in range(len(tokens) - new + 1, len(tokens) + 1):
            if self._within(prompt, tokens[:end], max(0, end - 1 - lookback)):
                return end
        return None

    def _within(self, prompt: Sequence[int], tokens: list[int], start: int) -> bool:
        """Whether a string is in the text of the tokens from `start` on.

        Tokenizers of SentencePiece leave out the space of the first token that they decode. So the first token is decoded after
        the prompt's last ones, whose own text does not count.
        """
        context = [] if start else list(prompt[-CONTEXT:])
        text, context_text = self.decode(context + tokens[start:]), self.decode(context) if context else ""
        text = text[len(context_text) :] if text.startswith(context_text) else self.decode(tokens[start:])
        return any(string in text for string in self.strings)
