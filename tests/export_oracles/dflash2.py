"""DFlash2 as serving stacks and speculators read it: DFlash's block with convolutions, and a selector of candidates.

z-lab's own model and vLLM multiply the target's embedding by `input_embedding_scale` of `dflash_config`; SGLang does not. All
three multiply the logits of the target's head by `output_multiplier`, or cap them at `final_logit_softcapping`, before they add
the selector's scores. The golden drafts are made without either.

Shapes: K drafts, C candidates, H hidden, R rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.export_oracles.dflash import DraftBlockShape, Reader, of_speculators, of_zlab, slots, tokens_before
from tests.export_oracles.parts import Config, Point, Reading, TargetParts, Tensors, each, scaled

SELECTOR = "candidate_selector"


def zlab(stack: str) -> Reader:
    """The authors' layout, as this stack reads it: the fields are in `dflash_config`."""

    def read(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
        _, own, block = of_zlab(directory, "DFlash2DraftModel", target, stack)
        factor = None if stack == "sglang" else own.values.get("input_embedding_scale")
        found = _selected(own, block, Tensors(directory), scaled(target, factor), points)
        ends = {"factor of logits": own.values.get("output_multiplier"), "soft cap": own.values.get("final_logit_softcapping")}
        return replace(found, facts=found.facts | ends)

    return read


def speculators(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """speculators' layout."""
    config, block = of_speculators(directory, "dflash2", "DFlash2DraftModel", target)
    return _selected(config, block, Tensors(directory), target, points)


def _selected(
    config: Config, block: DraftBlockShape, tensors: Tensors, target: TargetParts, points: Sequence[Point]
) -> Reading:
    """config: has the fields of the convolutions and of the selector."""
    config.expect("conv_kernel_size", 2, "config")
    block = replace(block, group=config.get("conv_group_size", "config"))
    rank, candidates = config.get("selector_rank", "config"), config.get("selector_top_k", "config")
    return reading(block, tensors, ("fc", "hidden_norm"), rank, candidates, target, points)


def reading(
    block: DraftBlockShape,
    tensors: Tensors,
    names: tuple[str, str],
    rank: int,
    candidates: int,
    target: TargetParts,
    points: Sequence[Point],
) -> Reading:
    """Draft by the selector's scores from the states of a block. names: as for `slots`."""
    vocab, width = len(target.embed), block.shape.width
    states = slots(block, tensors, names, target)
    before_VR, after_VR = (
        tensors.take(f"{SELECTOR}.{name}_codebook", vocab, rank, fails="config") for name in ("predecessor", "successor")
    )
    reads_RH = tensors.take(f"{SELECTOR}.hidden_projection.weight", rank, width, fails="config")
    tensors.finish()

    def draft(point: Point) -> Tensor:
        state_KH = states(point)
        before_K = tokens_before(point, len(state_KH))
        logits_KV, joint_KR = F.linear(state_KH, target.head), before_VR[before_K] * F.linear(state_KH, reads_RH)
        best_KC, token_KC = logits_KV.topk(candidates)
        score_KC = best_KC + (after_VR[token_KC] * joint_KR[:, None]).sum(-1)
        return torch.full_like(logits_KV, -torch.inf).scatter(1, token_KC, score_KC)

    return Reading(each(points, draft), block.facts())
