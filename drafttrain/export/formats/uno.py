"""UNO: a peft adapter of the target, without the target's weights.

Only an export of ours says that it is one: an adapter of a draft model looks the same.
"""

from __future__ import annotations

from typing import Any

from drafttrain.export.external import Foreign
from drafttrain.export.files import ExportSource, Files
from drafttrain.export.format import Format, Importer, Renames, Rows, StackRow
from drafttrain.export.formats.transformers import MODEL_TYPES
from drafttrain.export.peft import CONFIG, PEFT, WEIGHTS, check_plain, config_of, usual_lora
from drafttrain.model.target import Target

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
    tensors, options = RENAMES.named(source.tensors), source.options
    return Files(
        config_of(tensors, options["lora_rank"], options["lora_alpha"], source.target_name),
        tensors,
        WEIGHTS,
        config_file=CONFIG,
    )


def _knows(found: Foreign) -> bool:
    return found.adapter and found.record.get("family") == "uno"


def _options(found: Foreign, target: Target) -> dict[str, Any]:
    check_plain(found)
    kinds = sorted(found.field("target_modules"))
    return {"lora_rank": found.number("r"), "lora_alpha": float(found.field("lora_alpha")), "lora_targets": kinds}


IMPORTER = Importer("peft adapter", "uno", _knows, _options, RENAMES, usual=usual_lora)
IMPORTERS = [IMPORTER]
ROWS: Rows = {
    "uno": {
        "vllm": "its loader is an open pull request (55947); SGLang serves it",
        "sglang": StackRow(
            Format(IMPORTER.name, files, IMPORTER, refuse),
            "UNO",
            note="SGLang takes it with one process: leave tensor and pipeline parallelism at 1.",
        ),
        "official": "SGLang serves it; format=sglang writes it",
    }
}
