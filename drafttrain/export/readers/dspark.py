"""DSpark as speculators and vLLM read it: DFlash's block, a bias from the token before, a confidence head.

Shapes: K drafts, H hidden, R rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.export.readers.dflash import of_speculators, slots
from drafttrain.export.readers.parts import Point, Reading, TargetParts, Tensors, each


def speculators(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """speculators' layout."""
    config, block = of_speculators(directory, "dspark", "DSparkSpeculator", target, per_layer=True)
    config.expect("markov_head_type", "vanilla", "config")
    for key in ("enable_confidence_head", "confidence_head_with_markov"):
        config.expect(key, True, "config")
    tensors, rank, vocab = Tensors(directory), config.get("markov_rank", "config"), len(target.embed)
    states = slots(block, tensors, ("fc", "hidden_norm"), target)
    first_VR = tensors.take("markov_head.markov_w1.weight", vocab, rank, fails="config")
    second_VR = tensors.take("markov_head.markov_w2.weight", vocab, rank, fails="config")
    tensors.take("confidence_head.proj.weight", 1, block.shape.width + rank)
    tensors.take("confidence_head.proj.bias", 1)
    tensors.finish()

    def draft(point: Point) -> Tensor:
        before_K = torch.cat([point.root[None], point.drafts[:-1]])
        return F.linear(states(point), target.head) + F.linear(first_VR[before_K], second_VR)

    return Reading(each(points, draft), block.facts())
