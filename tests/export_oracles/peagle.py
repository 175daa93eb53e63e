"""P-EAGLE as vLLM reads it: the portable layout with `pard_token`, and the layout of speculators with `mask_token_id`.

Shapes: c tokens of a text, K drafts, N = c + K - 1 positions fed, H hidden.

It takes one causal pass: the text with the root, then K - 1 mask tokens with the mask state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.export_oracles import eagle3
from tests.export_oracles.layer import rms
from tests.export_oracles.parts import Config, MismatchError, Point, Reading, TargetParts, Tensors, each, over_target


@dataclass(frozen=True, slots=True)
class Parallel:
    """A loaded drafter."""

    first: eagle3.Head  # the part that EAGLE-3 has too
    embed: Tensor
    mask_state: Tensor
    mask: int


def portable(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """The portable layout."""
    config, tensors = Config.of(directory), Tensors(directory)
    layers = eagle3.portable_layers("vllm", config, target.blocks)
    return _reading(config, config, tensors, target, layers, config.get("pard_token", "mask token"), points)


def speculators(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """vLLM ignores `fc_norm` in this layout."""
    config, tensors = Config.of(directory), Tensors(directory)
    inner = eagle3.speculators_layer(config, "peagle", "PEagleSpeculator", target)
    config.expect("embed_requires_grad", True, "config")
    config.expect("fc_norm", None, "norm flags")
    layers, mask = config.get(eagle3.IDS, "layer ids"), config.get("mask_token_id", "mask token")
    return _reading(config, inner, tensors, target, layers, mask, points)


def _reading(
    config: Config, inner: Config, tensors: Tensors, target: TargetParts, layers: list[int], mask: int, points: Sequence[Point]
) -> Reading:
    first = eagle3.head_of(config, inner, tensors, "layers.0", target, layers)
    shape, (vocab, target_width) = first.shape, target.embed.shape
    embed = tensors.take("embed_tokens.weight", vocab, shape.width)
    mask_state = tensors.take("mask_hidden", 1, 1, len(layers) * target_width, fails="layer ids")[0, 0]
    tensors.finish()
    if not 0 <= mask < vocab:
        raise MismatchError("mask token", f"{mask} is not a token of the embedding")
    drafter = Parallel(first, embed, mask_state, mask)
    found = eagle3.reading(first, target, points[:0])
    return replace(found, logits=each(points, lambda point: _draft(drafter, point)), facts=found.facts | {"mask token": mask})


def _draft(drafter: Parallel, point: Point) -> Tensor:
    first, shape, slots = drafter.first, drafter.first.shape, len(point.drafts) - 1
    states = [torch.cat([point.layer(k), mask.expand(slots, -1)]) for k, mask in zip(
        first.layers, drafter.mask_state.chunk(len(first.layers)), strict=True
    )]  # fmt: skip
    token_N = torch.cat([point.shifted, torch.full((slots,), drafter.mask)])
    position_N = torch.arange(len(token_N))
    x_NH = eagle3.step(first, first.caches(), drafter.embed[token_N], first.fused(states), position_N)
    logits_KD = F.linear(rms(x_NH[len(point.text) - 1 :], first.norm, shape.eps), first.lm_head)
    return over_target(logits_KD, first.ids, len(drafter.embed))
