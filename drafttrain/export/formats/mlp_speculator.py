"""MLP speculator: the authors' layout (fms-extras), which text-generation-inference reads too."""

from __future__ import annotations

from typing import Any

import torch

from drafttrain.core.errors import UserError
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.files import ExportSource, Files
from drafttrain.export.format import ConvertedDrafter, Format, Importer, Renames, Rows, StackRow
from drafttrain.export.target_ends import same_size
from drafttrain.model.target import Target

RENAMES = Renames({"{rest}": "speculator.{rest}"})
CODE = "fms_extras.models.hf.modeling_mlp_speculator.MLPSpeculatorPreTrainedModel.from_pretrained({directory!r})"
PARTS = {"emb": ["weight"], "proj": ["weight"], "ln": ["weight", "bias"], "head": ["weight"]}


def files(source: ExportSource) -> Files:
    """Every stage has all its tensors, shared ones too."""
    options, stages = source.options, source.options["n_predict"]
    tensors = {}
    for module, names in PARTS.items():
        stored_stages = sum(name.startswith(f"{module}.") and name.endswith(".weight") for name in source.tensors)
        for stage in range(stages):
            for name in names:
                exported_name = str(RENAMES.theirs(f"{module}.{stage}.{name}"))
                tensors[exported_name] = source.tensors[f"{module}.{min(stage, stored_stages - 1)}.{name}"]
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "base_model_name_or_path": source.target_name,
        "vocab_size": source.shape.vocab_size,
        "emb_dim": source.shape.hidden_size,
        "inner_dim": tensors["speculator.proj.0.weight"].shape[0],
        "n_predict": stages,
        # settings of decoding: candidates tried at once, and tokens of each stage in them
        "n_candidates": 5,
        "top_k_tokens_per_head": [5] + [1] * (stages - 1),
        "tie_weights": options["tie_weights"],
        "scale_input": options["scale_input"],
        "torch_dtype": source.dtype,
    }
    return Files(config, tensors)


def facts(source: ExportSource) -> dict[str, Any]:
    """The settings that a drafter must have again when it is read back."""
    return {"stages of the drafter": source.options["n_predict"]}


def _options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    config, width = checkpoint.config, target.shape.hidden_size
    same_size(checkpoint, "emb_dim", config.get("emb_dim"), width)
    same_size(checkpoint, "vocabulary", config.get("vocab_size"), target.shape.vocab_size)
    return {
        "n_predict": checkpoint.number("n_predict"),
        "inner_dim": checkpoint.number("inner_dim") if config.get("inner_dim") else width,
        **{key: checkpoint.flag(key, config.get(key) or False) for key in ("tie_weights", "scale_input")},
    }


def _mend(draft: ConvertedDrafter) -> None:
    """Keep shared weights once; the files may have them once or for every stage."""
    if not draft.options["tie_weights"]:
        return
    for name in list(draft.tensors):
        module, stage, param_name = name.split(".", 2) if name.count(".") >= 2 else (name, "0", "")
        shared_stage = 1 if module == "proj" else 0  # the first projection reads the target's state
        if not stage.isdigit() or int(stage) <= shared_stage:
            continue
        shared_weight = draft.tensors.get(f"{module}.{shared_stage}.{param_name}")
        if (
            int(stage) >= draft.options["n_predict"]
            or shared_weight is None
            or not torch.equal(shared_weight, draft.tensors[name])
        ):
            raise UserError(
                f"{draft.found.origin}: config.json says tie_weights, but {RENAMES.theirs(name)} is not that of stage "
                f"{shared_stage}; "
                "set tie_weights to false there, or fetch it again"
            )
        del draft.tensors[name]


IMPORTER = Importer(
    "MLPSpeculator", "mlp_speculator", lambda f: f.has("speculator.emb.0.weight"), _options, RENAMES, mend=_mend
)
IMPORTERS = [IMPORTER]
STAGES = Format(IMPORTER.name, files, IMPORTER, facts=facts)
ROWS: Rows = {"mlp_speculator": {"tgi": StackRow(STAGES), "official": StackRow(STAGES, CODE)}}
