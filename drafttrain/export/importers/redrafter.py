"""ReDrafter: the authors' layout."""

from __future__ import annotations

from typing import Any

from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import Importer, same_size
from drafttrain.model.target import Target


def _options(found: Foreign, target: Target) -> dict[str, Any]:
    """num_lookback_tokens is the length of its beams."""
    config, width = found.config, target.shape.hidden_size
    same_size(found, "hidden size", config.get("hidden_size"), width)
    same_size(found, "vocabulary", config.get("vocab_size"), target.shape.vocab_size)
    found.wants("rnn", config.get("rnn", True), (True,), "but drafters of this family are recurrent")
    found.wants("exit_dim", config.get("exit_dim", 2 * width), (2 * width,), "after a projection that is not supported here")
    return {"layers": found.number("num_draft_layers"), "length": found.number("num_lookback_tokens")}


ROWS = [Importer("recurrent_drafting", "redrafter", lambda f: f.has("rnn_u.weight", "rnn_w.weight"), _options)]
