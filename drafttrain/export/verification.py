"""Does an engine draft with an export as our decoder does with its checkpoint?

Its texts must be the target's own, and of every text as many drafts accepted as we accept. The texts alone say little:
verification mends whatever a broken drafter drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from drafttrain.core.errors import ParityError
from drafttrain.engines.process import Counts, Outcome
from drafttrain.export.chain import Ending, Rounds


@dataclass(frozen=True, slots=True)
class Line:
    """One text. differs: the index of the first token that is not the target's own choice. ours: accepted drafts as we count
    them. theirs: as the engine does, None where it tells sums alone.
    """

    prompt: str
    tokens: int
    differs: int | None
    ours: int
    theirs: int | None

    @property
    def holds(self) -> bool:
        return self.differs is None and self.theirs in (None, self.ours)


@dataclass(frozen=True, slots=True)
class Verification:
    """Sums over all texts, and each of them. ours_by_position: as many as the engine tells, else none. tau: tokens of a
    verification in our decoder, those past the texts' ends too; None where nothing was verified.
    """

    engine: str
    versions: dict[str, str]
    draft_length: int
    ours: int
    theirs: int
    tau: float | None
    ours_by_position: list[int]
    theirs_by_position: list[int]
    lines: list[Line]

    @property
    def same_texts(self) -> int:
        return sum(line.differs is None for line in self.lines)

    @property
    def holds(self) -> bool:
        same = self.ours == self.theirs and self.ours_by_position == self.theirs_by_position
        return same and all(line.holds for line in self.lines)

    def check(self) -> None:
        """Raise ParityError, with what differs, unless it holds."""
        if self.same_texts < len(self.lines):
            raise ParityError(
                "output", f"{len(self.lines) - self.same_texts} of {len(self.lines)} texts are not the target's own"
            )
        if not self.holds:
            said = f"{self.engine} accepts {self.theirs}, our decoder {self.ours} of the same chains"
            raise ParityError("accepted drafts", said if self.ours != self.theirs else f"{said}, but {self._apart()}")

    def _apart(self) -> str:
        """Where equal sums are made of other parts."""
        other = [line for line in self.lines if not line.holds]
        if other:
            line = other[0]
            return f"not of the same texts: of prompt {line.prompt} it accepts {line.theirs}, we {line.ours}"
        return f"not at the same positions: {self.theirs_by_position} there, {self.ours_by_position} here"

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"holds": self.holds, "same_texts": self.same_texts}


def verified(
    outcome: Outcome,
    names: Sequence[str],
    own: Sequence[Sequence[int]],
    rounds: Sequence[Rounds],
    ending: Ending,
    draft_length: int,
) -> Verification:
    """names: of the prompts; own: the target's plain greedy texts; rounds: of our own decoder, begun as the engine begins."""
    lines, counts, agreed = [], list[int](), list[int]()
    told: Sequence[Counts | None] = outcome.prompts or [None] * len(names)
    for name, text, output, ours, theirs in zip(names, own, outcome.outputs, rounds, told, strict=True):
        counted = ours.counted(ending, outcome.ends)
        counts += counted
        agreed += ours.counted(ending, "whole")
        differs = first_difference(text, output, ending.stop_ids)
        lines.append(Line(name, len(text), differs, sum(counted), None if theirs is None else theirs.accepted))
    by_position = outcome.accepted_by_position or []
    return Verification(
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
    """Index of the first token that differs; None for the same text. The token that ended it may be left out."""
    ours, theirs = ([*tokens[:-1], *(t for t in tokens[-1:] if t not in stop_ids)] for tokens in (text, output))
    return next((i for i, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b), None)
