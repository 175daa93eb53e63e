"""The answers of a serving engine that is timed, the same for processes and servers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TimedText:
    """One prompt's output. Times are seconds since its wave was sent."""

    count: int  # its tokens
    output: Hashable  # token ids, or characters where the engine gives no ids; equal outputs compare equal
    first: float  # time of the first token
    ended: float  # time of the last token
    ahead: int = 1  # tokens that arrived at `first`: more than one where drafts come with it


@dataclass(frozen=True, slots=True)
class WaveOutputs:
    """The outputs of one wave, with the engine's own counts for all of them; None where it does not count."""

    texts: list[TimedText]
    verifications: int | None = None  # decode steps of the target
    drafted: int | None = None  # draft tokens
    accepted: int | None = None  # accepted draft tokens
    accepted_by_position: tuple[int, ...] | None = None  # [i]: decode steps that accepted the draft at position i + 1
    notes: tuple[str, ...] = ()  # counts that are missing, and why

    @property
    def lengths(self) -> list[int]:
        """Tokens of each output."""
        return [text.count for text in self.texts]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine's description of itself."""

    versions: dict[str, str] = field(default_factory=dict)  # by name, its own first
    begins: str = "plain"  # `drafted`: its first drafts follow the prompt; `plain`: the prefill yields a token before them
    ids: bool = True  # whether `TimedText.output` holds token ids
    notes: list[str] = field(default_factory=list)


class TimedEngine(Protocol):
    """An engine that is ready to answer, with or without speculation."""

    @property
    def about(self) -> EngineInfo: ...

    def answer(self, wave: Sequence[int]) -> WaveOutputs:
        """Decode the prompts of these numbers together. Raises UserError where the engine fails."""
        ...
