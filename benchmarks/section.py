"""What a section of `benchmarks/train.py` is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table


@dataclass(frozen=True)
class Settings:
    """divide: all sizes are divided by it. say: shows a line of progress."""

    device: torch.device
    repeats: int
    divide: int = 1
    say: Callable[[str], None] = lambda text: None

    def of(self, size: int, least: int = 1) -> int:
        """This size, as much smaller as is asked for."""
        return max(least, size // self.divide)

    @property
    def limit(self) -> int | None:
        """Conversations of the embedded data to be read; None: all."""
        return None if self.divide == 1 else max(512 // self.divide, 96)


@dataclass(frozen=True)
class Found:
    """tables: for the reader. record: plain data, for a file. plot: draws into a file, where that is worth looking at."""

    tables: list[Table]
    record: dict[str, Any]
    plot: Callable[[Path], None] | None = None
