"""Domino: DFlash's slots, corrected one after the other by a recurrent state over the tokens above (arXiv 2605.29707).

Shapes: B rows, A anchors, P = B A, S slots, W nodes of a depth, K drafts, M predictions, H hidden, G recurrent state, V
vocabulary.

Draft j (from 0) has the slot's state h_j and the state g_j of a GRU that read the root and the j drafts above:

    logits_0 = target's head(h_0)
    logits_j = target's head(h_j) + W2 SiLU(W1 [h_j; g_j])

Training begins with the loss of the slots alone and ends with that of the corrected logits, by a linear schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafttrain.drafters import Family
from drafttrain.drafters.common.block_drafter import BlockDrafter, Inputs, Walk
from drafttrain.drafters.common.dynamic_tree import Scored, TreeLevel
from drafttrain.drafters.options import DominoOptions
from drafttrain.model.batch import Anchors, Pairs, Prediction, TrainBatch
from drafttrain.model.drafter import Commit
from drafttrain.model.layers import Linear
from drafttrain.model.target import Target

STD = 0.02  # of the correction's matrices at the start


class PrefixGRU(nn.Module):
    """One layer of `torch.nn.GRU` without biases, with its names: ZeRO-3 and captured steps cannot use torch's own."""

    def __init__(self, width: int, state: int) -> None:
        super().__init__()
        self.weight_ih_l0, self.weight_hh_l0 = (
            nn.Parameter(torch.empty(3 * state, width)),
            nn.Parameter(torch.empty(3 * state, state)),
        )
        for weight in (self.weight_ih_l0, self.weight_hh_l0):
            nn.init.uniform_(weight, -(state**-0.5), state**-0.5)

    def forward(self, read_LH: Tensor, state_G: Tensor) -> Tensor:
        """[..., L, G] the state after each of L inputs. state_G: before the first."""
        gates_L3G, states = F.linear(read_LH, self.weight_ih_l0), []
        for gates_3G in gates_L3G.unbind(-2):
            state_G = self.after(gates_3G, state_G)
            states.append(state_G)
        return torch.stack(states, -2)

    def after(self, gates_3G: Tensor, state_G: Tensor) -> Tensor:
        """[..., G] the state after one input, whose product with `weight_ih_l0` is given."""
        reset_update_2G, new_G = gates_3G.tensor_split([2 * state_G.shape[-1]], -1)
        hidden_reset_update_2G, hidden_new_G = F.linear(state_G, self.weight_hh_l0).tensor_split([2 * state_G.shape[-1]], -1)
        reset_G, update_G = (reset_update_2G + hidden_reset_update_2G).sigmoid().chunk(2, -1)
        new_G = (new_G + reset_G * hidden_new_G).tanh()
        return new_G + update_G * (state_G - new_G)


class Domino(BlockDrafter):
    """prefix_gru and embed_proj are named as in the official code."""

    def __init__(self, options: DominoOptions, target: Target) -> None:
        super().__init__(options, target, walks=True)
        width, vocab = target.shape.hidden_size, target.shape.vocab_size
        self.width, self.recurrent_width, self.base = width, options.state, (options.base_share, options.base_until)
        self.prefix_gru = PrefixGRU(width, options.state)
        correction = (Linear(width + options.state, options.rank, bias=False), Linear(options.rank, vocab, bias=False))
        for linear in correction:
            nn.init.normal_(linear.weight, std=STD)
        self.embed_proj = nn.Sequential(correction[0], nn.SiLU(), correction[1])

    def read(self, token: Tensor) -> Tensor:
        """[..., H] what the recurrent state reads of a token."""
        return self._target.module.embed(token).to(self.prefix_gru.weight_ih_l0.dtype)

    def head(self, input_X: Tensor) -> Tensor:
        logits_V = self.slot_logits(input_X[..., : self.width])
        correction_V: Tensor = self.embed_proj(input_X)
        return logits_V + correction_V.to(logits_V.dtype)

    def head_inputs(self, batch: TrainBatch, anchors: Anchors, state_BASH: Tensor) -> Inputs:
        previous_token_PK = torch.stack(
            [batch.after(1 + j).gather(1, anchors.source_BA).flatten() for j in range(self.draft_length)], 1
        )
        embedded_PKH = self.read(previous_token_PK)
        recurrent_PKG = self.prefix_gru(embedded_PKH, embedded_PKH.new_zeros(len(embedded_PKH), self.recurrent_width))

        def of(draft: int, index_M: Tensor, pairs: Pairs) -> Tensor:
            state_MH = state_BASH[:, :, self.shape.first + draft].flatten(0, 1)[index_M]
            return torch.cat([state_MH, recurrent_PKG[index_M, draft].to(state_MH.dtype)], -1)

        return of

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """In training each slot's own logits too (not counted), with a share of the loss that falls to 0."""
        start, until = self.base
        share = start * max(0.0, 1.0 - batch.progress / until) if self.training else 0.0
        for prediction in super().predict(batch):
            slot_prediction = replace(prediction, hidden_MH=prediction.hidden_MH[:, : self.width], head=self.slot_logits)
            if prediction.step == 0:
                yield slot_prediction
                continue
            if share:
                yield replace(slot_prediction, weight=share * prediction.weight, counted=False)
            yield replace(prediction, weight=(1.0 - share) * prediction.weight)

    def walk(self, state_BSH: Tensor, drafts: int, pending: Commit) -> Walk:
        state_BKH = self.drafting(state_BSH, drafts)
        slot_BKV = self.slot_logits(state_BKH)

        def score(nodes: TreeLevel) -> Scored:
            gates_BW3G = F.linear(self.read(nodes.token_BW), self.prefix_gru.weight_ih_l0)
            prefix_state_BWG = self.prefix_gru.after(gates_BW3G, nodes.state_BWH)
            if not nodes.depth:
                return Scored(slot_BKV[:, :1], prefix_state_BWG)
            state_BWH = state_BKH[:, nodes.depth, None].expand(*nodes.token_BW.shape, -1)
            correction_BWV = self.embed_proj(torch.cat([state_BWH, prefix_state_BWG.to(state_BWH.dtype)], -1))
            return Scored(slot_BKV[:, nodes.depth, None] + correction_BWV.to(slot_BKV.dtype), prefix_state_BWG)

        return Walk(score)

    def root_state(self, state_BSH: Tensor) -> Tensor:
        return self.prefix_gru.weight_hh_l0.new_zeros(len(state_BSH), 1, self.recurrent_width)


FAMILY = Family("domino", DominoOptions, Domino)
