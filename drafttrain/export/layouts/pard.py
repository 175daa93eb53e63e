"""PARD: an ordinary transformers directory whose configuration names the mask token."""

from __future__ import annotations

from dataclasses import replace

from drafttrain.export.files import ExportSource, Files
from drafttrain.export.layouts import draft_model
from drafttrain.export.layouts.peagle import MASK, mask_token


def files(source: ExportSource) -> Files:
    """A transformers directory with the mask token, as the authors' code writes it."""
    made, mask = draft_model.files(source), mask_token(source)
    return replace(made, config=made.config | {MASK: mask, "spd_type": "pard"}, facts={"mask token": mask})
