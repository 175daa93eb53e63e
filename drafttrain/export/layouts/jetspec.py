"""JetSpec: DFlash's layout with causal blocks.

Three keys say so, because each loader reads its own: the authors' code `dflash_config.causal_head`, vLLM
`dflash_config.causal`, SGLang `is_causal` at the top level.
"""

from __future__ import annotations

from drafttrain.export.files import ExportSource, Files
from drafttrain.export.layouts import dflash
from drafttrain.export.layouts.llama import refuse_last_block, refuse_windows
from drafttrain.export.layouts.target_ends import refuse_bias, refuse_embedding


def refuse(source: ExportSource) -> str | None:
    """Why this stack cannot load this drafter; None where it can."""
    if not source.options["causal"]:
        return "its slots see later ones, but in files of this family they do not; train with drafter.causal=true"
    if source.stack != "official":
        return dflash.refuse(source)
    reason = dflash.refuse_shifted(source) or refuse_last_block(source, ()) or refuse_windows(source)
    return reason or refuse_embedding(source) or refuse_bias(source)


def files(source: ExportSource) -> Files:
    """The layout of all stacks that read safetensors."""
    config = dflash.zlab_config(source, "DFlashDraftModel", causal_head=True)
    return Files(config, source.tensors, facts=dflash.facts(source))
