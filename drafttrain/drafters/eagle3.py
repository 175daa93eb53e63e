"""EAGLE-3: a layer, or few, over fused low, middle and high target states, trained on its own outputs (arXiv 2503.01840).

With `fc_norm` and `norm_output` it is EAGLE 3.1. `norm_before_fc`, `qk_norm`, further layers and an embedding of its own are
those of other trainers' drafters.

Shapes: B rows, N positions or nodes, H hidden, M predictions, V the target's vocabulary, D the drafter's.

At index t the drafter reads the token x[t+1] and the target's states at t; step i of training-time test reads
x[t+1+i] and its own state of step i-1 *at the same index*, and predicts x[t+2+i] (`Recurrent`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drafttrain.core.errors import UserError
from drafttrain.drafters import Family
from drafttrain.drafters.common.draft_vocabulary import DraftVocabulary
from drafttrain.drafters.common.proposal import TreeProposal
from drafttrain.drafters.common.recurrent import Recurrent
from drafttrain.drafters.options import Eagle3Options
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.layers import DecoderLayer, Linear, RMSNorm
from drafttrain.model.shapes import LayerOptions, TargetShape
from drafttrain.model.target import Taps, Target
from drafttrain.ops.rms_norm import norm


class Eagle3Layer(DecoderLayer):
    """A decoder layer whose attention reads [norm(embedding); norm(state)] and whose residual is the state."""

    def __init__(self, shape: TargetShape, qk_norm: bool = False) -> None:
        super().__init__(shape, in_width=2 * shape.hidden_size, qk_norm=qk_norm)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def enter(self, embedded_H: Tensor, state_H: Tensor, before: bool) -> tuple[Tensor, Tensor]:
        """(the residual, the input of attention). before: the residual is the normed state."""
        normed_H = self.hidden_norm(state_H)
        return normed_H if before else state_H, torch.cat([self.input_layernorm(embedded_H), normed_H], -1)


class FusedDrafter(DraftVocabulary):
    """Reads fused states of the target, and has its own head over the target's vocabulary or a part of it."""

    def add_fusion(self, blocks: Sequence[int], fc_norm: bool, shape: TargetShape, norm_before_fc: bool = False) -> None:
        """Make the parts that fuse the outputs of these blocks. fc_norm: each is normed; norm_before_fc: all as one state."""
        if fc_norm and norm_before_fc:
            raise UserError(
                "drafter.fc_norm and drafter.norm_before_fc are true: states are normed one by one or together; choose one"
            )
        self.taps = Taps(tuple(blocks))
        self.taps.check(shape.blocks)
        self.fc_norm = nn.ModuleList(RMSNorm(shape.hidden_size, shape.norm_eps) for _ in (blocks if fc_norm else ()))
        width = len(blocks) * shape.hidden_size
        self.input_norm = RMSNorm(width, shape.norm_eps) if norm_before_fc else nn.Identity()
        self.fc = Linear(width, shape.hidden_size, bias=False)

    def fuse(self, hidden: dict[int, Tensor]) -> Tensor:
        return self.fused([hidden[b].to(self.fc.weight.dtype) for b in self.taps.blocks])

    def fused(self, states: list[Tensor]) -> Tensor:
        if len(self.fc_norm):
            states = [normed(state) for normed, state in zip(self.fc_norm, states, strict=True)]
        fused_H: Tensor = self.fc(self.input_norm(torch.cat(states, -1)))
        return fused_H


class Eagle3(FusedDrafter, Recurrent):
    """Drafts on its own outputs. Layers after the first are named by their number, as in the official code."""

    def __init__(self, options: Eagle3Options, target: Target) -> None:
        super().__init__(TreeProposal(options, options.draft_length, target), target, options.steps)
        shape = LayerOptions.of(options.layer).shape(target.shape, latent=True)
        if options.qk_norm and shape.kv_lora_rank is not None:
            raise UserError(
                "drafter.qk_norm is true with drafter.layer.kv_lora_rank, but latent attention norms latents; set one of them"
            )
        self.norm_output, self.before = options.norm_output, options.norm_before_residual
        self.layer_shape = shape
        self.decay, self.growing_steps = options.step_decay, options.growing_steps
        self.add_fusion(taps_of(options, shape.blocks), options.fc_norm, shape, options.norm_before_fc)
        shape.check_window(options.layers, max(self.draft_length, options.steps))
        self.midlayer = Eagle3Layer(shape, options.qk_norm)
        further_layers = {str(i): DecoderLayer(shape, qk_norm=options.qk_norm, number=i) for i in range(1, options.layers)}
        self.layers = nn.ModuleDict(further_layers)
        self.embed_tokens = own_embedding(target, shape) if options.own_embedding else None
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.add_head(options.draft_vocab)

    @property
    def layer(self) -> DecoderLayer:
        return self.midlayer

    @property
    def further(self) -> Sequence[DecoderLayer]:
        return list(self.layers.values())  # type: ignore[arg-type]

    def embed(self, token_BN: Tensor, like: Tensor) -> Tensor:
        if self.embed_tokens is None:
            return super().embed(token_BN, like)
        embedded_BNH: Tensor = self.embed_tokens(token_BN)
        return embedded_BNH

    def resolved_options(self) -> dict[str, Any]:
        layer_options = LayerOptions.between(self.layer_shape, self._target.module.shape)
        return {"target_layer_ids": list(self.taps.blocks), "layer": asdict(layer_options)}

    def enter(self, token_BN: Tensor, state_BNH: Tensor) -> tuple[Tensor, Tensor]:
        return self.midlayer.enter(self.embed(token_BN, state_BNH), state_BNH, self.before)

    def normed(self, x_H: Tensor, delta_H: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return norm(self.norm, x_H, delta_H)

    def head(self, normed_H: Tensor) -> Tensor:
        logits_D: Tensor = self.lm_head(normed_H)
        return logits_D

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """Training-time test: each step's state feeds the next, at the same index, not detached.

        `growing_steps` is EDSD's schedule of their number (ACL 2026, long 2145; SpecForge PR 696), with steps for its epochs.
        """
        steps = self.predicted_steps
        if self.training and self.growing_steps:
            steps = max(1, math.ceil(steps * batch.progress))
        for step, pairs, hidden_MH in self.unroll(batch, self.fuse(batch.hidden), steps):
            weight = self.decay**step
            yield Prediction(step, pairs.source_M, pairs.label_M, hidden_MH, self.logits, weight, vocab_D=self.ids)


def own_embedding(target: Target, shape: TargetShape) -> nn.Embedding:
    """An embedding that is trained, and begins as the target's."""
    embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
    embedding.weight.data.copy_(target.embed(torch.arange(shape.vocab_size, device=target.device)).detach())
    return embedding


class Tapped(Protocol):
    target_layer_ids: list[int] | None
    target_layer_rule: str


def taps_of(options: Tapped, blocks: int) -> list[int]:
    layer_ids = options.target_layer_ids
    return default_taps(blocks, options.target_layer_rule) if layer_ids is None else list(layer_ids)


def default_taps(blocks: int, rule: str = "official") -> list[int]:
    """Low, middle and high block outputs; shallow targets get what they have."""
    official = sorted({min(1, blocks - 1), max(blocks // 2 - 1, 0), max(blocks - 4, 0)})
    if rule == "official" or (rule == "auto" and len(official) == 3):
        return official
    if rule == "auto" and blocks > 3:  # not the last, whose state few stacks give
        low, high = min(1, blocks - 4), blocks - 2
        return [low, (low + high) // 2, high]
    return sorted({max(blocks * third // 3 - 1, 0) for third in (1, 2, 3)})


FAMILY = Family("eagle3", Eagle3Options, Eagle3, early=3)
