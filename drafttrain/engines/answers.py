"""What a serving engine answers while it is timed, whoever asks it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """One text. count: its tokens. said: token ids, or letters where an engine tells no ids; equal texts are equal. first,
    ended: seconds from when its wave was handed over to the first token and to the last; ahead: how many tokens were there at
    `first`, more than one where drafts come with it.
    """

    count: int
    said: Hashable
    first: float
    ended: float
    ahead: int = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """The texts of one wave, and what the engine counted of them together; None where it does not tell.

    verifications: of the target; drafted, accepted: draft tokens.
    """

    texts: list[Text]
    verifications: int | None = None
    drafted: int | None = None
    accepted: int | None = None


@dataclass(frozen=True, slots=True)
class About:
    """What an engine says of itself. versions: by name, its own first. begins: `drafted` where its first drafts follow the
    prompt itself, `plain` where the prefill yields a token before them. ids: whether `Text.said` are token ids.
    """

    versions: dict[str, str] = field(default_factory=dict)
    begins: str = "plain"
    ids: bool = True
    notes: list[str] = field(default_factory=list)


class Side(Protocol):
    """An engine that stands ready, with speculation or without."""

    @property
    def about(self) -> About: ...

    def answer(self, wave: Sequence[int]) -> Answer:
        """The prompts of these numbers, decoded together. Raises UserError where the engine fails."""
        ...
