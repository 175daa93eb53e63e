"""The options of cascade."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class CascadeOptions:
    """The options of two families, each with its `family`."""

    family: str = "cascade"
    middle: Any = field(default_factory=lambda: {"family": "draft_model"})  # trained; the figures are its own
    inner: Any = field(default_factory=lambda: {"family": "prompt_lookup"})  # drafts for the middle's model, or for the target
    join: str = "auto"  # verify: the middle's model verifies the inner's drafts. merge: one tree. auto: verify where it has one


OPTIONS = CascadeOptions
