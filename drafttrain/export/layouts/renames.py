"""Our names of tensors and those of a layout, as pairs of patterns that work in both directions."""

from __future__ import annotations

import re
from collections.abc import Mapping

PLACE = re.compile(r"\{(\w+)\}")
PIECES = {"rest": ".+", "path": ".+", "part": "weight|bias"}  # what a placeholder matches; any other one matches a number


def compiled(pattern: str) -> re.Pattern[str]:
    """The regular expression of a pattern with placeholders."""
    before, *others = PLACE.split(pattern)
    text = re.escape(before)
    for name, after in zip(others[::2], others[1::2], strict=True):
        text += f"(?P<{name}>{PIECES.get(name, '[0-9]+')})" + re.escape(after)
    return re.compile(text)


class Renames:
    """Pairs of patterns, ours to theirs, with placeholders as in `heads.{i}.output.weight`. The first pattern that fits
    counts.
    """

    def __init__(self, pairs: Mapping[str, str]) -> None:
        self._out = [(compiled(ours), theirs) for ours, theirs in pairs.items()]
        self._back = [(compiled(theirs), ours) for ours, theirs in pairs.items()]

    def theirs(self, name: str) -> str | None:
        """Their name of our tensor; None where they have none."""
        return _renamed(name, self._out)

    def ours(self, name: str) -> str | None:
        """Our name of their tensor; None where we have none."""
        return _renamed(name, self._back)


def _renamed(name: str, pairs: list[tuple[re.Pattern[str], str]]) -> str | None:
    for pattern, other in pairs:
        if match := pattern.fullmatch(name):
            return other.format(**match.groupdict())
    return None


SAME = Renames({"{rest}": "{rest}"})
