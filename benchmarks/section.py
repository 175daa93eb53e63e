"""The input and output of a section of `benchmarks/train.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table


@dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    device: torch.device
    repeats: int
    divide: int = 1  # all sizes are divided by it
    say: Callable[[str], None] = lambda text: None  # shows a line of progress
    base: Path | None = None  # an older checkout to compare with
    rivals: Path | None = None  # an interpreter with other toolkits

    def of(self, size: int, least: int = 1) -> int:
        """A size, divided."""
        return max(least, size // self.divide)

    @property
    def limit(self) -> int | None:
        """Number of conversations of the embedded data to read; None: all."""
        return None if self.divide == 1 else max(512 // self.divide, 96)


@dataclass(frozen=True)
class Found:
    """The result of a section."""

    tables: list[Table]  # for the reader
    record: dict[str, Any]  # plain data for a file
    plot: Callable[[Path], None] | None = None  # draws into a file; None: no plot
