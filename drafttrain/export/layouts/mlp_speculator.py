"""MLP speculator: the authors' layout (fms-extras), which text-generation-inference reads too."""

from __future__ import annotations

from drafttrain.export.files import ExportSource, Files
from drafttrain.export.layouts.renames import Renames

RENAMES = Renames({"{rest}": "speculator.{rest}"})
PARTS = {"emb": ["weight"], "proj": ["weight"], "ln": ["weight", "bias"], "head": ["weight"]}


def files(source: ExportSource) -> Files:
    """Every stage has all its tensors, shared ones too."""
    options, count = source.options, source.options["n_predict"]
    tensors = {}
    for part, names in PARTS.items():
        own = sum(name.startswith(f"{part}.") and name.endswith(".weight") for name in source.tensors)
        for stage in range(count):
            for name in names:
                theirs = str(RENAMES.theirs(f"{part}.{stage}.{name}"))
                tensors[theirs] = source.tensors[f"{part}.{min(stage, own - 1)}.{name}"]
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "base_model_name_or_path": source.target_name,
        "vocab_size": source.shape.vocab_size,
        "emb_dim": source.shape.hidden_size,
        "inner_dim": tensors["speculator.proj.0.weight"].shape[0],
        "n_predict": count,
        # settings of decoding: candidates tried at once, and tokens of each stage in them
        "n_candidates": 5,
        "top_k_tokens_per_head": [5] + [1] * (count - 1),
        "tie_weights": options["tie_weights"],
        "scale_input": options["scale_input"],
        "torch_dtype": source.dtype,
    }
    return Files(config, tensors, facts={"stages of the drafter": count})
