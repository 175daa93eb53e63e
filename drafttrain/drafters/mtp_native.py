"""Native MTP: the module that a target comes with, taken from its checkpoint and trained further for several depths.

Shapes: B rows, N positions or nodes, T positions, H hidden, V vocabulary.

    x[t+1] -- target's embedding -- enorm --.
                                            eh_proj (2H -> H) -- a block of the target's class -- h' -- norm -- target's head
    h[t], the target's ------------ hnorm --'                                                             |
      ^                                                                                                   |
      '--- one depth further: the output of the norm, or h', as the layout says  <------------------------'

`common/own_modules.py` has the layouts. One module makes every depth and is trained on its own outputs so (arXiv 2509.18362).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from drafttrain.core.errors import UserError
from drafttrain.drafters import Family
from drafttrain.drafters.common.own_modules import LAYOUTS, fill, layout_of, open_source
from drafttrain.drafters.common.proposal import TreeProposal
from drafttrain.drafters.common.recurrent import FeedsBack
from drafttrain.drafters.options.mtp_native import MTPNativeOptions
from drafttrain.model.batch import Pairs, Prediction, TrainBatch
from drafttrain.model.frozen_ref import FrozenRef
from drafttrain.model.layers import recomputed
from drafttrain.model.target import FINAL, Taps, Target
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.one_block import (
    BlockPass,
    BlockPositions,
    StepKeys,
    UnrolledMasks,
    forward,
    new_block,
    new_norm,
)
from drafttrain.targets.stored import directory_of


class OwnMTPModule(nn.Module):
    """The module's parts."""

    def __init__(self, target: HFTarget) -> None:
        super().__init__()
        width, eps = target.shape.hidden_size, target.shape.norm_eps
        self.block = new_block(target)
        self.enorm, self.hnorm, self.norm = (new_norm(self.block, width, eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OwnMTPModule:
        """Buffers keep their precision: a router's biases choose the experts, and transformers keeps them in float32."""
        before = {name: buffer for name, buffer in self.named_buffers() if buffer.is_floating_point()}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            owner, _, last = name.rpartition(".")
            setattr(self.get_submodule(owner), last, buffer.to(self.get_buffer(name).device))
        return self


class MTPNative(FeedsBack):
    """The target's embedding and head are shared and frozen."""

    captured = False  # transformers' block may ask the host
    splits = False

    def __init__(self, options: MTPNativeOptions, target: Target) -> None:
        super().__init__(TreeProposal(options, options.draft_length, target), target, options.steps)
        if options.steps < 1 or options.step_decay <= 0:
            raise UserError(
                f"drafter.steps is {options.steps}, drafter.step_decay {options.step_decay:g}; set steps to 1 or more, "
                "step_decay above 0"
            )
        whole, self.taps = cast(HFTarget, target), Taps(final=True)
        model_type = str(whole.backbone.module.config.model_type)
        fresh = options.source == "fresh"
        layout = LAYOUTS.get(model_type) if fresh else layout_of(model_type)
        self.hidden_first = layout is not None and layout.hidden_first
        normed = layout is None or layout.norm_output
        self.norm_output = normed if options.norm_output is None else options.norm_output
        decays = [options.step_decay**step for step in range(options.steps)]
        self.decay, self.first_weight = options.step_decay, 1.0 / sum(decays)
        self.rotary: FrozenRef[Any] = FrozenRef(whole.backbone.module.rotary_emb)
        self.module, self.starts_usable = OwnMTPModule(whole), not fresh
        if layout is not None and not fresh and not whole.outline:
            own = options.source == "target"
            directory = directory_of(whole.model) if own else Path(options.source).expanduser()
            if not own and not (directory and directory.is_dir()):
                raise UserError(f"drafter.source is {options.source!r}; set it to target, fresh, or a checkpoint's directory")
            fill(self.module, open_source(directory, f"drafter.source={options.source}"), layout, whole.shape.blocks)

    def resolved_options(self) -> dict[str, Any]:
        return {"norm_output": self.norm_output}

    def fuse(self, hidden: dict[int, Tensor]) -> Tensor:
        return hidden[FINAL].to(self.module.eh_proj.weight.dtype)

    def enter(self, token_BN: Tensor, state_BNH: Tensor) -> tuple[Tensor, Tensor]:
        module = self.module
        parts = [module.enorm(self.embed(token_BN, state_BNH)), module.hnorm(state_BNH)]
        joined_BNH = module.eh_proj(torch.cat(parts[::-1] if self.hidden_first else parts, -1))
        return joined_BNH, joined_BNH

    def normed(self, x_H: Tensor, delta_H: Tensor | None = None) -> tuple[Tensor, Tensor]:
        state_H = x_H if delta_H is None else x_H + delta_H
        return state_H, self.module.norm(state_H)

    def head(self, normed_H: Tensor) -> Tensor:
        """By the target's head, in its dtype."""
        target = self._target.module
        return target.head(normed_H.to(target.head_weight.dtype))

    # -- the block in decoding

    @property
    def decoding_layers(self) -> MTPNative:
        return self

    def run(self, x_BNH: Tensor, meta: BlockPass, read_BNX: Tensor | None = None) -> tuple[Tensor, None]:
        """(the block's output, None)."""
        return forward(self.module.block, self.rotary.module, x_BNH, meta), None

    def passes(self, slots: int, positions: int) -> BlockPositions:
        return BlockPositions(slots, positions, self.module.eh_proj.weight)

    # -- the block in training

    def unroll(
        self, batch: TrainBatch, state_BTH: Tensor, steps: int, detach: bool = False
    ) -> Iterator[tuple[int, Pairs, Tensor]]:
        masks, keys, values = UnrolledMasks(batch, state_BTH.dtype), list[Tensor](), list[Tensor]()

        def advance(token_BT: Tensor, state_BTH: Tensor, *past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            cache, step = StepKeys(past), len(past) // 2
            joined_BTH, _ = self.enter(token_BT, state_BTH)
            out_BTH, _ = self.run(joined_BTH, BlockPass(batch.position_BT + step, masks.step(step), cache))
            return self.fed_back(out_BTH), cache.keys[-1], cache.values[-1]

        for step in range(steps):
            inputs = (batch.after(1 + step), state_BTH, *keys, *values)
            state_BTH, key_BhTD, value_BhTD = recomputed(self.recomputes, advance, *inputs)
            keys, values = [*keys, key_BhTD], [*values, value_BhTD]
            pairs = batch.future(2 + step)
            yield step, pairs, state_BTH.flatten(0, 1)[pairs.source_M]
            state_BTH = state_BTH.detach() if detach else state_BTH

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """Each step's state feeds the next, at the same index, not detached."""
        for step, pairs, hidden_MH in self.unroll(batch, self.fuse(batch.hidden), self.predicted_steps):
            weight = self.first_weight * self.decay**step
            yield Prediction(step, pairs.source_M, pairs.label_M, hidden_MH, self.logits, weight)


FAMILY = Family("mtp_native", MTPNativeOptions, MTPNative)
