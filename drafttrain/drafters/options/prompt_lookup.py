"""The options of prompt_lookup."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PromptLookupOptions:
    """How much of the text must occur again, and how much is copied."""

    family: str = "prompt_lookup"
    max_ngram: int | None = 3  # tokens matched at most; null: the longest suffix of the text that occurred before
    min_ngram: int = 1  # tokens matched at least
    draft_length: int = 10  # tokens copied at most


OPTIONS = PromptLookupOptions
