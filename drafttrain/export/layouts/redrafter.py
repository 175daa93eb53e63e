"""ReDrafter: the authors' layout. Our drafter's tensors already have its names."""

from __future__ import annotations

from drafttrain.export.files import ExportSource, Files


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
