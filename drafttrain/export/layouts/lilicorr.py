"""LiLiCorr: DFlash's layout with the network's shape in `dflash_config`, as SGLang and vLLM read it."""

from __future__ import annotations

from typing import Any

from drafttrain.export.files import ExportSource, Files
from drafttrain.export.layouts import dflash
from drafttrain.export.layouts.dflash import facts, zlab_config
from drafttrain.export.layouts.renames import Renames
from drafttrain.export.layouts.target_ends import refuse_logits

ARCHITECTURE = "LiLiCorrDraftModel"
FIELDS = {  # our options by their names in `dflash_config`
    "lilicorr_candidate_topk": "candidates",
    "lilicorr_hidden_size": "hidden_size",
    "lilicorr_factor_dim": "factor_dim",
    "lilicorr_num_layers": "corrector_layers",
    "lilicorr_num_heads": "heads",
    "lilicorr_mlp_ratio": "mlp_ratio",
    "lilicorr_logit_scale": "logit_scale",
    "lilicorr_vector_eps": "vector_eps",
}
ATTENTION = {"lilicorr.layers.{i}.attn.in_proj.{part}": "lilicorr.layers.{i}.attn.in_proj_{part}"}
RENAMES = Renames(ATTENTION | {"{rest}": "{rest}"})


def refuse(source: ExportSource) -> str | None:
    """Why no stack can load this drafter; None where one can."""
    if source.options["causal"]:
        return "its slots see no later slots, but loaders let them see their whole block; train with drafter.causal=false"
    return dflash.refuse(source) or refuse_logits(source)


def files(source: ExportSource) -> Files:
    """The layout of ModelOpt's exports."""
    own: dict[str, Any] = {theirs: source.options[ours] for theirs, ours in FIELDS.items()}
    config = zlab_config(source, ARCHITECTURE, projector_type="lilicorr", **own)
    return Files(config, source.named(RENAMES), facts=facts(source) | own)
