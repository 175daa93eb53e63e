"""Domino: DFlash's layout with the head's shape in `dflash_config`, as SGLang reads it."""

from __future__ import annotations

from drafttrain.export.files import ExportSource, Files
from drafttrain.export.layouts.dflash import facts, refuse_last, zlab_config
from drafttrain.export.layouts.target_ends import refuse_logits

PREFIX = 1  # drafts from their slot alone; SGLang refuses another number


def refuse(source: ExportSource) -> str | None:
    """Why SGLang cannot load this drafter; None where it can."""
    return refuse_last(source) or refuse_logits(source)


def files(source: ExportSource) -> Files:
    """SGLang's layout. `shift_label` says whether slots are shifted."""
    options = source.options
    head = {
        "projector_type": "domino",
        "shift_label": options["slots"] == "shifted",
        "pure_draft_prefix_len": PREFIX,
        "gru_hidden_dim": options["state"],
        "emb_dim": options["rank"],
    }
    return Files(zlab_config(source, "DFlashDraftModel", **head), source.tensors, facts=facts(source))
