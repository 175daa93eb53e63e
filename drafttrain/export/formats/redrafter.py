"""ReDrafter: the authors' layout. Our drafter's tensors already have its names."""

from __future__ import annotations

from typing import Any

from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.files import ExportSource, Files
from drafttrain.export.format import ENGINE_ENDED, Format, Importer, Rows, StackRow
from drafttrain.export.target_ends import refuse_embedding, same_size
from drafttrain.model.target import Target

CODE = "recurrent_drafting.modeling_drafter.Drafter.from_pretrained({directory!r})"


def files(source: ExportSource) -> Files:
    """exit_dim is the width of [state; recurrent state], so that the layout has no input_proj before the blocks."""
    shape = source.shape
    config = {
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "exit_dim": 2 * shape.hidden_size,
        "num_draft_layers": source.options["layers"],
        "num_lookback_tokens": source.options["length"],
        "rnn": True,
        "torch_dtype": source.dtype,
    }
    return Files(config, source.tensors)


def _options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    """num_lookback_tokens is the length of its beams."""
    config, width = checkpoint.config, target.shape.hidden_size
    same_size(checkpoint, "hidden size", config.get("hidden_size"), width)
    same_size(checkpoint, "vocabulary", config.get("vocab_size"), target.shape.vocab_size)
    checkpoint.wants("rnn", config.get("rnn", True), (True,), "but drafters of this family are recurrent")
    checkpoint.wants(
        "exit_dim", config.get("exit_dim", 2 * width), (2 * width,), "after a projection that is not supported here"
    )
    return {"layers": checkpoint.number("num_draft_layers"), "length": checkpoint.number("num_lookback_tokens")}


IMPORTER = Importer("recurrent_drafting", "redrafter", lambda f: f.has("rnn_u.weight", "rnn_w.weight"), _options)
IMPORTERS = [IMPORTER]
ROWS: Rows = {
    "redrafter": {"trtllm": ENGINE_ENDED, "official": StackRow(Format(IMPORTER.name, files, IMPORTER, refuse_embedding), CODE)}
}
