"""EAGLE: one decoder layer that predicts the target's next feature, read by the target's own head (arXiv 2401.15077).

With `tree=dynamic` it is EAGLE-2 (arXiv 2406.16858); with `steps` above 1 it is trained on its own features (HASS,
arXiv 2408.15766).

Shapes: B rows, N positions or nodes, T positions, H hidden, M predictions, C a chunk of them, R ranks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drafttrain.drafters import Family
from drafttrain.drafters.common.proposal import TreeProposal
from drafttrain.drafters.common.recurrent import Recurrent
from drafttrain.drafters.options import EagleOptions
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.layers import DecoderLayer, Linear
from drafttrain.model.shapes import LayerOptions
from drafttrain.model.target import FINAL, Taps, Target

CHUNK = 1024  # predictions whose logits the loss on the likeliest tokens holds at once


class Eagle(Recurrent):
    """The state is a feature: an approximation of the target's post-norm output one position on."""

    def __init__(self, options: EagleOptions, target: Target) -> None:
        super().__init__(TreeProposal(options, options.draft_length, target), target, options.steps)
        shape, self.options, self.taps = LayerOptions.of(options.layer).shape(target.shape), options, Taps(final=True)
        self.layer_shape = shape
        shape.check_window(1, max(self.draft_length, options.steps))
        self.fc = Linear(2 * shape.hidden_size, shape.hidden_size, bias=options.bias)
        self.layers = nn.ModuleList([DecoderLayer(shape, input_norm=False)])

    @property
    def layer(self) -> DecoderLayer:
        return self.layers[0]  # type: ignore[return-value]

    def fuse(self, hidden: dict[int, Tensor]) -> Tensor:
        return hidden[FINAL].to(self.fc.weight.dtype)

    def enter(self, token_BN: Tensor, state_BNH: Tensor) -> tuple[Tensor, Tensor]:
        joined_BNH = self.fc(torch.cat([self.embed(token_BN, state_BNH), state_BNH], -1))
        return joined_BNH, joined_BNH

    def normed(self, x_H: Tensor, delta_H: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The layer has no norm after it: its output is a feature."""
        state_H = x_H if delta_H is None else x_H + delta_H
        return state_H, state_H

    def head(self, normed_H: Tensor) -> Tensor:
        """By the target's head, in the target's dtype."""
        target = self._target.module
        return target.head(normed_H.to(target.head_weight.dtype))

    def resolved_options(self) -> dict[str, Any]:
        return {"layer": asdict(LayerOptions.between(self.layer_shape, self._target.module.shape))}

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """Step i's feature at source t approximates the target's at t + 1 + i, from which label t + 2 + i is predicted."""
        state_BTH, options = self.fuse(batch.hidden), self.options
        final_PH = state_BTH.flatten(0, 1)
        steps, start_BTH = self.predicted_steps, self._noisy(state_BTH, batch)
        for step, pairs, hidden_MH in self.unroll(batch, start_BTH, steps, detach=True):
            target_MH = final_PH[batch.teacher_index(pairs.label_M)]
            feature_loss_M = F.smooth_l1_loss(hidden_MH.float(), target_MH.float(), reduction="none").mean(-1)
            aux = options.feature_weight * feature_loss_M.sum()
            if options.top_weight:
                aux = aux + options.top_weight * self._top_loss(hidden_MH, target_MH)
            yield Prediction(step, pairs.source_M, pairs.label_M, hidden_MH, self.logits, options.distribution_weight, aux=aux)

    def _noisy(self, state_BTH: Tensor, batch: TrainBatch) -> Tensor:
        """Noise that is a function of the batch alone: the same in a run that was resumed."""
        if not (self.training and self.options.noise):
            return state_BTH
        token_BT = (batch.host or batch).token_BT
        seed = int((token_BT * torch.arange(1, token_BT.shape[1] + 1, device=token_BT.device)).sum())
        generator = torch.Generator(state_BTH.device).manual_seed(seed)
        noise_BTH = torch.rand(state_BTH.shape, generator=generator, device=state_BTH.device, dtype=state_BTH.dtype)
        return state_BTH + (2 * noise_BTH - 1) * (self.options.noise * 512 / batch.longest)

    def _top_loss(self, hidden_MH: Tensor, target_MH: Tensor) -> Tensor:
        """The sum of - p log q over the target's likeliest tokens (arXiv 2408.15766, section 3.1)."""

        def chunk(hidden_CH: Tensor, target_CH: Tensor) -> Tensor:
            with torch.no_grad():
                p_CR, token_CR = self.logits(target_CH).float().softmax(-1).topk(self.options.top_k)
            return -(p_CR * self.logits(hidden_CH).float().log_softmax(-1).gather(1, token_CR)).sum()

        chunks = zip(hidden_MH.split(CHUNK), target_MH.split(CHUNK), strict=True)
        total: Tensor = sum((checkpoint(chunk, *p, use_reentrant=False) for p in chunks), start=hidden_MH.new_zeros(()))
        return total


FAMILY = Family("eagle", EagleOptions, Eagle, early=2)
