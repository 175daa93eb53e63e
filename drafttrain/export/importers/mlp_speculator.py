"""MLP speculator: the layout of the authors and of text-generation-inference."""

from __future__ import annotations

from typing import Any

import torch

from drafttrain.core.errors import UserError
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import ConvertedDrafter, Importer, same_size
from drafttrain.export.layouts.mlp_speculator import RENAMES
from drafttrain.model.target import Target


def _options(found: Foreign, target: Target) -> dict[str, Any]:
    config, width = found.config, target.shape.hidden_size
    same_size(found, "emb_dim", config.get("emb_dim"), width)
    same_size(found, "vocabulary", config.get("vocab_size"), target.shape.vocab_size)
    return {
        "n_predict": found.number("n_predict"),
        "inner_dim": found.number("inner_dim") if config.get("inner_dim") else width,
        **{key: found.flag(key, config.get(key) or False) for key in ("tie_weights", "scale_input")},
    }


def _mend(draft: ConvertedDrafter) -> None:
    """Keep shared weights once; the files may have them once or for every stage."""
    if not draft.options["tie_weights"]:
        return
    apart = draft.options["inner_dim"] != draft.target.shape.hidden_size
    for name in list(draft.tensors):
        part, stage, what = name.split(".", 2) if name.count(".") >= 2 else (name, "0", "")
        last = 1 if part == "proj" and apart else 0
        if not stage.isdigit() or int(stage) <= last:
            continue
        first = draft.tensors.get(f"{part}.{last}.{what}")
        if int(stage) >= draft.options["n_predict"] or first is None or not torch.equal(first, draft.tensors[name]):
            raise UserError(
                f"{draft.found.origin}: config.json says tie_weights, but {RENAMES.theirs(name)} is not that of stage {last}; "
                "set tie_weights to false there, or fetch it again"
            )
        del draft.tensors[name]


ROWS = [Importer("MLPSpeculator", "mlp_speculator", lambda f: f.has("speculator.emb.0.weight"), _options, RENAMES, mend=_mend)]
