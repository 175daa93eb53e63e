"""The options of suffix."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SuffixOptions:
    """How long matches are, and how much of a continuation is drafted."""

    family: str = "suffix"
    depth: int = 32  # tokens of a text's end matched at most
    draft_length: int = 16
    factor: float = 1.0  # after a match of m tokens at most factor * m + offset are drafted
    offset: float = 0.0
    min_probability: float = 0.1  # a draft ends where its frequencies multiply to less
    past: int = 65536  # tokens of earlier texts kept, about; 0: each text by itself


OPTIONS = SuffixOptions
