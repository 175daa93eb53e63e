"""The engine check: does an engine draft with an export as our decoder does with its checkpoint?

The engine must give the target's own output, and accept as many drafts in every sequence as our decoder. The output alone
tells little, because verification corrects a broken drafter's drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from drafttrain.core.errors import ParityError
from drafttrain.engines.process import EngineResult, PromptCounts
from drafttrain.export.chain import DecodedSequence, Ending


@dataclass(frozen=True, slots=True)
class SequenceCheck:
    """One sequence."""

    prompt: str
    tokens: int  # number of tokens of the target's own output
    differs: int | None  # index of the engine's first token that differs from the target's own; None: equal
    ours: int  # accepted drafts by our count
    theirs: int | None  # accepted drafts by the engine's count; None if it counts only sums

    @property
    def holds(self) -> bool:
        """Whether output and accepted drafts agree."""
        return self.differs is None and self.theirs in (None, self.ours)


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """The sums over all sequences, and each of them."""

    engine: str
    versions: dict[str, str]
    draft_length: int
    ours: int
    theirs: int
    tau: float | None  # tokens per decode step in our decoder, past the sequences' ends too; None without steps
    ours_by_position: list[int]  # accepted drafts by position; as many positions as the engine counts
    theirs_by_position: list[int]
    lines: list[SequenceCheck]

    @property
    def same_texts(self) -> int:
        """The number of sequences with the target's own output."""
        return sum(line.differs is None for line in self.lines)

    @property
    def holds(self) -> bool:
        """Whether everything agrees."""
        same = self.ours == self.theirs and self.ours_by_position == self.theirs_by_position
        return same and all(line.holds for line in self.lines)

    def check(self) -> None:
        """Raise ParityError, naming the difference, unless the check holds."""
        if self.same_texts < len(self.lines):
            raise ParityError(
                "output", f"{len(self.lines) - self.same_texts} of {len(self.lines)} texts are not the target's own"
            )
        if not self.holds:
            sums = f"{self.engine} accepts {self.theirs}, our decoder {self.ours} of the same chains"
            raise ParityError("accepted drafts", sums if self.ours != self.theirs else f"{sums}, but {self._difference()}")

    def _difference(self) -> str:
        """The part that differs although the sums are equal."""
        other = [line for line in self.lines if not line.holds]
        if other:
            line = other[0]
            return f"not of the same texts: of prompt {line.prompt} it accepts {line.theirs}, we {line.ours}"
        return f"not at the same positions: {self.theirs_by_position} there, {self.ours_by_position} here"

    def as_json(self) -> dict[str, Any]:
        """The check as the content of verification.json."""
        return asdict(self) | {"holds": self.holds, "same_texts": self.same_texts}


def engine_check(
    outcome: EngineResult,
    names: Sequence[str],
    own: Sequence[Sequence[int]],
    sequences: Sequence[DecodedSequence],
    ending: Ending,
    draft_length: int,
) -> EngineCheck:
    """Compare an engine's result with our own. names: of the prompts. own: the target's plain greedy output. sequences: our
    decode steps, which begin as the engine's do.
    """
    lines, counts, agreed = [], list[int](), list[int]()
    counted_there: Sequence[PromptCounts | None] = outcome.prompts or [None] * len(names)
    for name, text, output, ours, theirs in zip(names, own, outcome.outputs, sequences, counted_there, strict=True):
        counted = ours.counted(ending, outcome.ends)
        counts += counted
        agreed += ours.counted(ending, "whole")
        differs = first_difference(text, output, ending.stop_ids)
        lines.append(SequenceCheck(name, len(text), differs, sum(counted), None if theirs is None else theirs.accepted))
    by_position = outcome.accepted_by_position or []
    return EngineCheck(
        outcome.engine,
        outcome.versions,
        draft_length,
        sum(counts),
        outcome.accepted,
        1.0 + sum(agreed) / len(agreed) if agreed else None,
        [sum(count > i for count in counts) for i in range(len(by_position))],
        by_position,
        lines,
    )


def first_difference(text: Sequence[int], output: Sequence[int], stop_ids: frozenset[int]) -> int | None:
    """Index of the first token that differs; None for the same output. The token that ended it may be left out."""
    ours, theirs = ([*tokens[:-1], *(t for t in tokens[-1:] if t not in stop_ids)] for tokens in (text, output))
    return next((i for i, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b), None)
