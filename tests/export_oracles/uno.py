"""UNO: a peft adapter that a stack adds to its own target, at the random tokens of a drafting pass alone.

The stack chooses its own random tokens. Here they are those of the checkpoint's drafts.

Shapes: N positions, K drafts, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.export_oracles.causal_lm import add_matrices, layers_of, plan_of
from tests.export_oracles.layer import Cache, rms
from tests.export_oracles.parts import Config, Point, Reading, TargetParts, Tensors, each

MOST = (1 << 64) - 1
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64 (Steele et al. 2014)
KEY = 0, 0, 4  # seed, request, and what the numbers are for


def random_tokens(position_N: Tensor, vocab: int) -> Tensor:
    """[N] the token that the checkpoint reads at each position."""
    return torch.tensor([_number(position) * vocab >> 53 for position in position_N.tolist()])


def _number(position: int) -> int:
    """53 random bits."""
    word, request, purpose = KEY
    for part in (request, position, purpose):
        word = _mixed(word ^ _mixed(part + GOLDEN))
    return word >> 11


def _mixed(word: int) -> int:
    word = (word + GOLDEN) & MOST
    word = (word ^ word >> 30) * FIRST & MOST
    word = (word ^ word >> 27) * SECOND & MOST
    return word ^ word >> 31


def sglang(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """Two sets of layers: the target's own for the text and its root, those with the products for random tokens."""
    config, matrices = Config.of(directory, "adapter_config.json"), Tensors(directory, "adapter_model.safetensors")
    assert target.model is not None, "given for every export"
    (about, own), (_, added) = target.model(), target.model()
    plan, vocab, width = plan_of(about, len(target.embed)), len(target.embed), len(target.embed[0])
    add_matrices(config, matrices, added)
    layers, changed = layers_of(plan, own), layers_of(plan, added)
    norm = own.take("model.norm.weight", width)

    def draft(point: Point) -> Tensor:
        known_N, slots = torch.cat([point.text, point.root[None]]), len(point.drafts) - 1
        position_N = torch.arange(len(known_N) + slots)
        parts = position_N.split([len(known_N), slots])
        states = [target.embed[known_N], target.embed[random_tokens(parts[1], vocab)]]
        for (layer, input_norm), (other, _) in zip(layers, changed, strict=True):
            cache = Cache(layer)
            for part, weights in enumerate((layer, other)):
                cache.layer = weights
                x_NH = states[part]
                x_NH = x_NH + cache.feed(rms(x_NH, input_norm, plan.shape.eps), parts[part])
                states[part] = x_NH + weights.mlp(x_NH)
        drafting_KH = torch.cat([states[0][-1:], states[1]])
        return F.linear(rms(drafting_KH, norm, plan.shape.eps), target.head)

    return Reading(each(points, draft), {"vocabulary": vocab})
