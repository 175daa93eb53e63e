"""Hydra heads as the authors' code reads them: `HydraMLP` with grounded heads.

Shapes: K heads, V vocabulary, H hidden, I = (i + 2) H.

Head i reads the target's post-norm state and the embeddings of the i + 1 tokens after it. In a head's first block a linear map
replaces the identity. The other blocks are one object repeated, so that the last one's weights count for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.export_oracles.parts import Config, Linear, Point, Reading, TargetParts, Tensors, each

Head = tuple[Linear, Linear, list[Linear], Linear]


def read(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """The authors' layout."""
    config, tensors = Config.of(directory), Tensors(directory, "hydra_lm_head.safetensors")
    config.expect("hydra_head_arch", "mlp", "architecture")
    config.expect("grounded_heads", True, "architecture")
    config.expect("hidden_state_offset", 0, "config")
    config.get("base_model_name_or_path", "config")
    vocab, width = target.head.shape
    layers, heads = config.get("hydra_num_layers", "config"), []
    for i in range(config.get("hydra_num_heads", "config")):
        joined, name = (i + 2) * width, f"hydra_mlp.{i}"
        first, kept = (tensors.linear(f"{name}.0.{part}", width, joined) for part in ("linear", "res_connection"))
        rest = [tensors.linear(f"{name}.{j}.linear", width, width) for j in range(1, layers)]
        output = tensors.linear(f"hydra_lm_head.{i}", vocab, width)
        heads.append((first, kept, rest[-1:] * len(rest), output))
    if "input_embed_fn.weight" in tensors.left:  # saved with the heads; the authors' loader drops it
        tensors.take("input_embed_fn.weight", vocab, width)
    tensors.finish()
    facts: dict[str, Any] = {"vocabulary": vocab, "heads of the drafter": len(heads)}
    return Reading(each(points, lambda point: _draft(heads, target, point)), facts)


def _draft(heads: list[Head], target: TargetParts, point: Point) -> Tensor:
    logits, known = [], torch.cat([point.root[None], point.drafts])
    for i, (first, kept, rest, output) in enumerate(heads):
        joined_I = torch.cat([point.last()[-1], target.embed[known[: i + 1]].flatten()])
        x_H = F.linear(joined_I, *kept) + F.silu(F.linear(joined_I, *first))
        for block in rest:
            x_H = x_H + F.silu(F.linear(x_H, *block))
        logits.append(F.linear(x_H, *output))
    return torch.stack(logits)
