"""XPress: vLLM's layout, DFlash's with the refiner's sizes. speculators' own layout of this family is read, not written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drafttrain.export.files import ExportSource, Files
from drafttrain.export.layouts import dflash
from drafttrain.export.layouts.renames import Renames
from drafttrain.export.layouts.target_ends import refuse_logits

ARCHITECTURE, HEAD = "Qwen3XPressModel", "xpress_head"
SPECULATORS = Renames(
    {
        f"{HEAD}.w1.weight": "refiner_head.token_embed.weight",
        f"{HEAD}.w2.weight": "refiner_head.readout.weight",
        f"{HEAD}.mix.L": "refiner_head.mix_l",
        f"{HEAD}.mlp.gate_proj.weight": "refiner_head.mlp_gate.weight",
        f"{HEAD}.mlp.up_proj.weight": "refiner_head.mlp_up.weight",
        f"{HEAD}.mlp.down_proj.weight": "refiner_head.mlp_down.weight",
        f"{HEAD}.{{rest}}": "refiner_head.{rest}",
        "{rest}": "{rest}",
    }
)


def refuse(source: ExportSource) -> str | None:
    """Why vLLM cannot load this drafter; None where it can."""
    return dflash.refuse(source) or refuse_logits(source)


def vllm(source: ExportSource) -> Files:
    """vLLM's layout. Its drafts are the decoder's if it scores the whole vocabulary and runs a pass for each draft."""
    files, slots = dflash.zlab(source), source.options["block_size"]
    own: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "xpress_block_size": slots,
        "xpress_rank": source.options["rank"],
        "xpress_mlp_hidden": source.drafter.resolved_options()["mlp_hidden"],
        "xpress_topc": 0,
        "xpress_num_passes": slots - 1,
        "sample_from_anchor": False,
    }
    return replace(files, config=files.config | own, facts=files.facts | {"passes": slots - 1})
