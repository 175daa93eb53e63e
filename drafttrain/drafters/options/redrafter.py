"""The options of redrafter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ReDrafterOptions:
    """The head, how far it is unrolled in training, and the beam search."""

    family: str = "redrafter"
    layers: int = 2  # residual blocks before the output matrix
    steps: int = 5  # unrolled in training
    width: int = 10  # beams
    length: int = 4  # drafts in a beam; the official length counts the root too
    nodes: int | None = None  # most drafts of a proposal, the likeliest first; None: decode.tree_nodes, set after training
    dropped: bool = True  # offer also the states that the search had among its beams once and left; officially not


OPTIONS = ReDrafterOptions
