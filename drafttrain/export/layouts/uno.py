"""UNO: a peft adapter of the target, without the target's weights."""

from __future__ import annotations

from typing import Any

from drafttrain.export.files import ExportSource, Files
from drafttrain.export.layouts.adapter import CONFIG, PEFT, WEIGHTS, config_of
from drafttrain.export.layouts.renames import Renames
from drafttrain.export.readers.causal_lm import MODEL_TYPES

RENAMES = Renames({f"matrices.{{path}}.lora_{x}.weight": f"{PEFT}{{path}}.lora_{x}.weight" for x in "AB"})


def refuse(source: ExportSource) -> str | None:
    """Why this drafter cannot be exported; None where it can."""
    model: Any = source.target.model
    config = model.config
    if config.model_type not in MODEL_TYPES:
        return f"the target is a {config.model_type}, but exports can be checked only for {', '.join(MODEL_TYPES)}"
    if getattr(config, "mlp_bias", False) or getattr(config, "attention_bias", False):
        return "the target's linear maps have biases, but exports can be checked only without them"
    return None


def files(source: ExportSource) -> Files:
    """The matrices under peft's names."""
    tensors, options = source.named(RENAMES), source.options
    return Files(
        config_of(tensors, options["lora_rank"], options["lora_alpha"], source.target_name),
        tensors,
        WEIGHTS,
        config_file=CONFIG,
    )
