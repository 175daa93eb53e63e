"""P-EAGLE: EAGLE-3's portable layout with more layers, an embedding, a mask token and a mask state; speculators' layout."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from drafttrain.export.files import ExportSource, Files
from drafttrain.export.layouts import eagle3
from drafttrain.export.layouts.llama import refuse_last_block, refuse_windows
from drafttrain.export.layouts.renames import Renames
from drafttrain.export.layouts.speculators import header

RENAMES = Renames({"mask.hidden": "mask_hidden", "{rest}": "{rest}"})
MASK = "pard_token"  # key in the portable layout; in speculators' layout it is `mask_token_id`


def refuse(source: ExportSource) -> str | None:
    """Why this stack cannot load this drafter; None where it can."""
    for flag, why in (("fc_norm", "vLLM drops"), ("norm_before_fc", "vLLM is not known to read")):
        if source.stack == "speculators" and source.options.get(flag):
            return f"it was trained with {flag}, which {why} from these files; export it with format=vllm"
    if source.stack == "vllm" and source.options.get("qk_norm"):
        return "it was trained with qk_norm, which vllm is not known to read here; train with drafter.qk_norm=false"
    return refuse_last_block(source, ("vllm",)) or refuse_windows(source, eagle3.WINDOWS)


def portable(source: ExportSource) -> Files:
    """The portable layout."""
    tensors = _weights(source)
    config = eagle3.portable_config(source, tensors, source.options["layers"]) | {MASK: mask_token(source)}
    return Files(config, tensors, facts=_facts(source))


def speculators(source: ExportSource) -> Files:
    """speculators' layout."""
    tensors = _weights(source)
    config = header(source, "peagle", "PEagleSpeculator")
    config |= eagle3.speculators_config(source, tensors, source.options["layers"])
    config |= {"mask_token_id": mask_token(source), "embed_requires_grad": True}
    return Files(config, tensors, facts=_facts(source))


def mask_token(source: ExportSource) -> int:
    """The mask token that the drafter was trained with."""
    return int(source.drafter.resolved_options()["mask_token"])


def _weights(source: ExportSource) -> dict[str, Tensor]:
    return {str(RENAMES.theirs(name)): x for name, x in eagle3.weights(source).items()}


def _facts(source: ExportSource) -> dict[str, Any]:
    return eagle3.facts(source) | {"mask token": mask_token(source)}
