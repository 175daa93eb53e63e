"""DFlash2 as speculators and vLLM read it: DFlash's block with convolutions, and a selector among each slot's candidates.

Shapes: K drafts, C candidates, H hidden, R rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.export.readers.dflash import of_speculators, slots
from drafttrain.export.readers.parts import Point, Reading, TargetParts, Tensors, each

SELECTOR = "candidate_selector"


def speculators(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """speculators' layout."""
    config, block = of_speculators(directory, "dflash2", "DFlash2DraftModel", target)
    config.expect("conv_kernel_size", 2, "config")
    block = replace(block, group=config.get("conv_group_size", "config"))
    tensors, vocab, width = Tensors(directory), len(target.embed), block.shape.width
    rank, candidates = config.get("selector_rank", "config"), config.get("selector_top_k", "config")
    states = slots(block, tensors, ("fc", "hidden_norm"), target)
    before_VR, after_VR = (
        tensors.take(f"{SELECTOR}.{name}_codebook", vocab, rank, fails="config") for name in ("predecessor", "successor")
    )
    reads_RH = tensors.take(f"{SELECTOR}.hidden_projection.weight", rank, width, fails="config")
    tensors.finish()

    def draft(point: Point) -> Tensor:
        state_KH, before_K = states(point), torch.cat([point.root[None], point.drafts[:-1]])
        logits_KV, joint_KR = F.linear(state_KH, target.head), before_VR[before_K] * F.linear(state_KH, reads_RH)
        best_KC, token_KC = logits_KV.topk(candidates)
        score_KC = best_KC + (after_VR[token_KC] * joint_KR[:, None]).sum(-1)
        return torch.full_like(logits_KV, -torch.inf).scatter(1, token_KC, score_KC)

    return Reading(each(points, draft), block.facts())
