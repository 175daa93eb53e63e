"""XPress as vLLM reads it: DFlash's block, and a refiner of its slots.

Shapes: S slots, K drafts, R rank, H hidden, V vocabulary.

After as many passes as there are drafts, each draft's logits are those of one pass that reads the drafts themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.export_oracles.dflash import of_zlab, slots
from tests.export_oracles.parts import Config, Point, Reading, TargetParts, Tensors, each


def vllm(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """vLLM's layout."""
    config, _, block = of_zlab(directory, "Qwen3XPressModel", target, "vllm")
    config.expect("sample_from_anchor", False, "config")
    config.expect("xpress_block_size", block.size, "block size")
    config.expect("xpress_topc", 0, "config")
    tensors = Tensors(directory)
    states = slots(replace(block, first=0), tensors, ("fc", "hidden_norm"), target)
    refiner = _Refiner(tensors, config, block.size, block.shape.width, len(target.embed))
    tensors.finish()

    def draft(point: Point) -> Tensor:
        state_SH = states(point)
        before_S = torch.cat([point.root[None], point.root[None], point.drafts[:-1]])
        return F.linear(state_SH[1:], target.head) + refiner(state_SH, before_S)[1:]

    facts = {"passes": config.get("xpress_num_passes", "config")}
    return Reading(each(points, draft), block.facts() | facts)


class _Refiner:
    """[S, V] what the refiner adds to the logits of each slot. vLLM adds the identity to mix.L and drops its upper triangle."""

    def __init__(self, tensors: Tensors, config: Config, slots: int, width: int, vocab: int) -> None:
        rank, inner = (config.get(f"xpress_{name}", "config") for name in ("rank", "mlp_hidden"))

        def take(name: str, *shape: int) -> Tensor:
            return tensors.take(f"xpress_head.{name}", *shape, fails="config")

        self.first_VR, self.last_VR = (take(f"{name}.weight", vocab, rank) for name in ("w1", "w2"))
        self.own_RH, self.block_RH = (take(f"{name}.weight", rank, width) for name in ("down_h", "down_g"))
        self.into_RX = take("in_proj.weight", rank, 3 * rank)
        self.mix_RSS = take("mix.L", rank, slots, slots).tril() + torch.eye(slots)
        self.gate, self.up = (take(f"mlp.{name}_proj.weight", inner, rank) for name in ("gate", "up"))
        self.down = take("mlp.down_proj.weight", rank, inner)

    def __call__(self, state_SH: Tensor, before_S: Tensor) -> Tensor:
        block_SR = F.linear(state_SH.mean(0), self.block_RH).expand(len(state_SH), -1)
        read_SX = torch.cat([F.linear(state_SH, self.own_RH), block_SR, self.first_VR[before_S]], -1)
        mixed_SR = torch.stack(
            [mix_SS @ own_S for mix_SS, own_S in zip(self.mix_RSS, F.linear(read_SX, self.into_RX).T, strict=True)], 1
        )
        gated_SI = F.silu(F.linear(mixed_SR, self.gate)) * F.linear(mixed_SR, self.up)
        return F.linear(mixed_SR + F.linear(gated_SI, self.down), self.last_VR)
