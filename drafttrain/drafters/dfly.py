"""DFly: DFlash with a context for each layer, and each slot's state corrected by the token before it (arXiv 2607.25852).

Shapes: B rows, W nodes of a depth, K drafts, L layers, H hidden, X width of two states.

Layer i has its own context of a position with the tapped states h_1 to h_T. Keys and values are those of DFlash, by one map for
context and block:

    c_i = context_norm(context_proj([h_1; ...; h_T]) + sum over t of softmax(w_i)_t h_t)

A draft is chosen from the state h of its slot and from the token before it, with the embedding e:

    z  = [hidden_norm(h); embed_norm(e)]
    h' = h + down_proj(SiLU(gate_proj z) * up_proj z)
    logits = target's head(h')
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafttrain.drafters import Family
from drafttrain.drafters.common.block_drafter import STD, BlockDrafter, Choices
from drafttrain.drafters.common.own_modules import LayerFusion, falling
from drafttrain.drafters.options import DFlyOptions
from drafttrain.model.layers import Linear, RMSNorm
from drafttrain.model.target import Target


class HiddenCorrection(nn.Module):
    """Its parts are named as in the official code. down_proj is zero at the start: slots alone choose the drafts then."""

    def __init__(self, width: int, inner: int, eps: float) -> None:
        super().__init__()
        self.hidden_norm, self.embed_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.gate_proj, self.up_proj = Linear(2 * width, inner, bias=False), Linear(2 * width, inner, bias=False)
        self.down_proj = Linear(inner, width, bias=False)
        for linear in (self.gate_proj, self.up_proj):
            nn.init.normal_(linear.weight, std=STD)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, state_H: Tensor, embedded_H: Tensor) -> Tensor:
        """[..., H] the corrected states of slots. embedded_H: of the tokens before them."""
        input_X = torch.cat([self.hidden_norm(state_H), self.embed_norm(embedded_H)], -1)
        corrected_H: Tensor = state_H + self.down_proj(F.silu(self.gate_proj(input_X)) * self.up_proj(input_X))
        return corrected_H


class DFly(BlockDrafter):
    """context_proj, context_norm and hidden_correction are named as in the official code."""

    def __init__(self, options: DFlyOptions, target: Target) -> None:
        super().__init__(options, target, walks=True)
        width, inner = self.layer_shape.hidden_size, options.hidden_correction_size
        self.inner = width if inner is None else inner
        self.hidden_correction = HiddenCorrection(width, self.inner, self.layer_shape.norm_eps)

    def add_context(self) -> list[nn.Linear]:
        width, taps = self.layer_shape.hidden_size, len(self.shape.taps)
        self.context_proj = Linear(taps * width, width, bias=False)
        self.layer_fusion = LayerFusion(falling(self.shape.layers, taps))
        self.context_norm = RMSNorm(width, self.layer_shape.norm_eps)
        return [self.context_proj]

    def resolved_options(self) -> dict[str, Any]:
        return super().resolved_options() | {"hidden_correction_size": self.inner}

    def contexts(self, hidden: dict[int, Tensor]) -> list[Tensor]:
        tapped = self.tapped(hidden)
        return list(self.context_norm(self.context_proj(torch.cat(tapped, -1)) + self.layer_fusion(tapped)))

    def head_input(self, state_H: Tensor, before: Tensor) -> Tensor:
        corrected_H: Tensor = self.hidden_correction(state_H, self._target.module.embed(before).to(state_H.dtype))
        return corrected_H

    def choices(self, state_BKH: Tensor) -> Choices:
        def choose(draft: int, before_BW: Tensor) -> Tensor:
            state_BWH = state_BKH[:, draft, None].expand(*before_BW.shape, -1)
            return self.head(self.head_input(state_BWH, before_BW))

        return choose


FAMILY = Family(
    "dfly",
    DFlyOptions,
    DFly,
    unserved="no released engine loads it (vLLM's pull request 50246 is open); engines load dflash, dflash2 and dspark",
)
