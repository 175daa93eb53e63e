"""Floor 3: conversations in, supervised token batches out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DataOptions:
    """Where the training conversations come from."""

    path: str = "embedded"  # embedded: replies of the embedded target. Else a .jsonl, .json, .parquet ... file or a hub id
    split: str = "train"  # of a hub data set
    max_length: int = 1024  # tokens; longer conversations are cut
    limit: int | None = None  # at most so many conversations
    held_out: int = 64  # conversations set apart for tuning the draft's shape and for expected tau
    seed: int = 0
