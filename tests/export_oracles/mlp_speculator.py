"""An MLP speculator as the authors' code (fms-extras) and text-generation-inference read it.

Shapes: V vocabulary, H hidden, I inner width, n stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.export_oracles.parts import Config, Point, Reading, TargetParts, Tensors, each

Stage = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def read(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """The authors' layout."""
    config, tensors = Config.of(directory), Tensors(directory)
    vocab, width = target.head.shape
    config.expect("architectures", ["MLPSpeculatorPreTrainedModel"], "architecture")
    config.expect("model_type", "mlp_speculator", "architecture")
    config.expect("vocab_size", vocab, "vocabulary")
    config.expect("emb_dim", width, "config")
    inner, count = config.get("inner_dim", "config"), config.get("n_predict", "config")
    scaled, tied = config.get("scale_input", "config"), config.get("tie_weights", "config")
    inner = inner or width
    stages = [_stage(tensors, i, inner, inner if i else width, vocab) for i in range(count)]
    tensors.finish()
    if tied:
        stages = _tied(stages)
    kept = 0.5 ** (0.5 / count)
    weight = math.sqrt((1 - kept**2) * inner / 2) / kept

    def draft(point: Point) -> Tensor:
        state, logits = point.last()[-1], []
        if scaled:
            state = _unit(state) / math.sqrt(2)
        for (emb, proj, scale, shift, head), token in zip(stages, torch.cat([point.root[None], point.drafts]), strict=False):
            state = F.gelu(scale * _unit(F.linear(state, proj) + weight * emb[token]) + shift)
            logits.append(F.linear(state, head))
        return torch.stack(logits)

    return Reading(each(points, draft), {"vocabulary": vocab, "stages of the drafter": count})


def _stage(tensors: Tensors, i: int, inner: int, into: int, vocab: int) -> Stage:
    return (
        tensors.take(f"speculator.emb.{i}.weight", vocab, inner),
        tensors.take(f"speculator.proj.{i}.weight", inner, into),
        tensors.take(f"speculator.ln.{i}.weight", inner),
        tensors.take(f"speculator.ln.{i}.bias", inner),
        tensors.take(f"speculator.head.{i}.weight", vocab, inner),
    )


def _tied(stages: list[Stage]) -> list[Stage]:
    """Use the first stage's tensors for all stages, except that projections from the second stage on are the second's."""
    (emb, first, scale, shift, head), later = stages[0], stages[min(1, len(stages) - 1)][1]
    return [(emb, later if i else first, scale, shift, head) for i in range(len(stages))]


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
