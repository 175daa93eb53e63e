"""MTP: multi-token prediction as DeepSeek-V3 has it, distilled for a target that has none (arXiv 2412.19437, section 2.2).

Shapes: B rows, N positions or nodes, T positions, H hidden, V vocabulary.

    x[t+1] -- target's embedding -- enorm --.
                                            eh_proj (2H -> H) -- a block like the target's -- h' -- the target's norm, head
    h[t], the target's ------------ hnorm --'                                                 |
      ^                                                                                       |
      '--- one depth further: the block's own output, before that norm  <---------------------'

One module makes every depth, as serving stacks run it, and is trained on its own outputs so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafters import Family
from drafttrain.drafters.common.proposal import TreeProposal
from drafttrain.drafters.common.recurrent import Recurrent
from drafttrain.drafters.options import MTPOptions
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.layers import DecoderLayer, Linear, RMSNorm
from drafttrain.model.shapes import LayerOptions, TargetShape
from drafttrain.model.target import FINAL, Taps, Target


class MTPModule(DecoderLayer):
    """Named as in DeepSeek's checkpoints."""

    def __init__(self, shape: TargetShape, qk_norm: bool) -> None:
        super().__init__(shape, qk_norm=qk_norm)
        width, eps = shape.hidden_size, shape.norm_eps
        self.enorm, self.hnorm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.eh_proj = Linear(2 * width, width, bias=False)


class MTP(Recurrent):
    """The target's embedding, final norm and head are shared and frozen."""

    def __init__(self, options: MTPOptions, target: Target) -> None:
        super().__init__(TreeProposal(options, options.draft_length, target), target, options.steps)
        shape, self.taps = LayerOptions.of(options.layer).shape(target.shape), Taps(final=True)
        self.layer_shape, self.decay = shape, options.step_decay
        self.norm_output = options.norm_output
        shape.check_window(1, max(self.draft_length, options.steps))
        self.module = MTPModule(shape, options.qk_norm)

    @property
    def layer(self) -> DecoderLayer:
        return self.module

    def resolved_options(self) -> dict[str, Any]:
        return {"layer": asdict(LayerOptions.between(self.layer_shape, self._target.module.shape))}

    def fuse(self, hidden: dict[int, Tensor]) -> Tensor:
        return hidden[FINAL].to(self.module.eh_proj.weight.dtype)

    def enter(self, token_BN: Tensor, state_BNH: Tensor) -> tuple[Tensor, Tensor]:
        module, embedded_BNH = self.module, self.embed(token_BN, state_BNH)
        joined_BNH = module.eh_proj(torch.cat([module.enorm(embedded_BNH), module.hnorm(state_BNH)], -1))
        return joined_BNH, module.input_layernorm(joined_BNH)

    def normed(self, x_H: Tensor, delta_H: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """By the target's norm, in the target's dtype."""
        target, state_H = self._target.module, x_H if delta_H is None else x_H + delta_H
        return state_H, target.norm(state_H.to(target.head_weight.dtype))

    def head(self, normed_H: Tensor) -> Tensor:
        """By the target's head, in its dtype."""
        target = self._target.module
        return target.head(normed_H.to(target.head_weight.dtype))

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """Each step's state feeds the next, at the same index, not detached."""
        for step, pairs, hidden_MH in self.unroll(batch, self.fuse(batch.hidden), self.predicted_steps):
            yield Prediction(step, pairs.source_M, pairs.label_M, hidden_MH, self.logits, self.decay**step)


FAMILY = Family("mtp", MTPOptions, MTP)
