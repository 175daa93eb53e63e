"""ReDrafter as the authors' `recurrent_drafting` package reads it.

Shapes: L blocks, V vocabulary, H hidden, E exit width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.export_oracles.parts import Config, Point, Reading, TargetParts, Tensors, each


def read(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """The authors' layout."""
    config, tensors = Config.of(directory), Tensors(directory)
    vocab, width = target.head.shape
    config.expect("model_type", "recurrent_drafting_drafter", "architecture")
    config.expect("vocab_size", vocab, "vocabulary")
    config.expect("hidden_size", width, "config")
    config.expect("rnn", True, "config")
    exit_dim = config.get("exit_dim", "config")
    project = None
    if exit_dim != 2 * width:
        project = tensors.linear("input_proj", exit_dim, 2 * width)
    layers = config.get("num_draft_layers", "config")
    blocks = [tensors.linear(f"lm_head.{j}.linear", exit_dim, exit_dim) for j in range(layers)]
    output = tensors.take(f"lm_head.{layers}.weight", vocab, exit_dim, fails="vocabulary")
    w, u = tensors.take("rnn_w.weight", width, width), tensors.linear("rnn_u", width, width)
    tensors.finish()

    def draft(point: Point) -> Tensor:
        recurrent_H, logits = torch.zeros(width), []
        for token in torch.cat([point.root[None], point.drafts[:-1]]):
            recurrent_H = F.silu(F.linear(target.embed[token], w) + F.linear(recurrent_H, *u))
            x_E = torch.cat([point.last()[-1], recurrent_H])
            x_E = x_E if project is None else F.linear(x_E, *project)
            for block in blocks:
                x_E = x_E + F.silu(F.linear(x_E, *block))
            logits.append(F.linear(x_E, output))
        return torch.stack(logits)

    return Reading(each(points, draft), {"vocabulary": vocab})
