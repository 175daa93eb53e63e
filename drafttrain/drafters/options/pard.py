"""The options of pard."""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.drafters.options.draft_model import DraftModelOptions


@dataclass
class PardOptions(DraftModelOptions):
    """The model is chosen as a draft model is."""

    family: str = "pard"
    width: int = 4
    draft_length: int = 8
    mask_token: int | None = None  # an id that the model embeds; None: the last one
    retention: float = 0.7  # in training a share retention ** d of the anchors has a mask d
    least_retention: float = 0.2  # and no less than this


OPTIONS = PardOptions
