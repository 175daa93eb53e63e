"""MLP speculator: a small recurrent network, one stage for each draft, without attention (arXiv 2404.19124).

Shapes: B rows, T positions, W nodes scored at once, P = B T, M predictions, S slots, H the target's hidden size, I the
speculator's own, V vocabulary.

At index t stage i (from 0) knows the tokens x[t+1 .. t+1+i] and predicts x[t+2+i]. Its state is made from that of the stage
before, which for the first is h[t]:

    state_i = GELU(norm_i(proj_i(state_(i-1)) + weight * emb_i(x[t+1+i])))        logits = head_i(state_i)

weight keeps the part of h[t] in the last state at one half in the square, whatever the number of stages (section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.drafters import Family
from drafttrain.drafters.common.dynamic_tree import Scored, TreeLevel
from drafttrain.drafters.common.pending import LastState
from drafttrain.drafters.common.proposal import TreeProposal
from drafttrain.drafters.options import MLPSpeculatorOptions
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.drafter import Drafter
from drafttrain.model.layers import Linear, recomputed
from drafttrain.model.target import FINAL, Taps, Target

EPS = 1e-6


class ShiftedNorm(nn.Module):
    """An RMS norm with a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x_I: Tensor) -> Tensor:
        out_I: Tensor = self.weight * unit_rms(x_I) + self.bias
        return out_I


def unit_rms(x_I: Tensor) -> Tensor:
    """Of root mean square 1, computed in fp32."""
    wide_I = x_I.float()
    return (wide_I * torch.rsqrt(wide_I.square().mean(-1, keepdim=True) + EPS)).to(x_I.dtype)


class MLPSpeculator(Drafter):
    """emb, proj, ln and head are named as in the official code."""

    proposal: TreeProposal
    revertible = True

    def __init__(self, options: MLPSpeculatorOptions, target: Target) -> None:
        shape, count = target.shape, options.n_predict
        inner = shape.hidden_size if options.inner_dim is None else options.inner_dim
        if count + 2 > shape.max_positions:
            raise UserError(
                f"drafter.n_predict is {count}; a context of {shape.max_positions} allows {shape.max_positions - 2}"
            )
        super().__init__(TreeProposal(options, count, target))
        self.taps, self.width, self.scaled = Taps(final=True), shape.hidden_size, options.scale_input
        state_share = 0.5 ** (0.5 / count)  # of a state's weight, from one stage to the next
        self.weight = math.sqrt((1 - state_share**2) * inner / 2) / state_share
        module_sets = 1 if options.tie_weights else count
        widths = [shape.hidden_size] + [inner] * (min(1, count - 1) if options.tie_weights else count - 1)
        self.emb = nn.ModuleList(nn.Embedding(shape.vocab_size, inner) for _ in range(module_sets))
        self.proj = nn.ModuleList(Linear(width, inner, bias=False) for width in widths)
        self.ln = nn.ModuleList(ShiftedNorm(inner) for _ in range(module_sets))
        self.head = nn.ModuleList(Linear(inner, shape.vocab_size, bias=False) for _ in range(module_sets))
        self._initialise(target, inner)

    def _initialise(self, target: Target, inner: int) -> None:
        """From the target's own embeddings and head where the widths allow; embeddings at the scale that `weight` assumes."""
        for proj in self.proj:
            nn.init.normal_(proj.weight, std=inner**-0.5)  # type: ignore[arg-type]
        for emb, head in zip(self.emb, self.head, strict=True):
            for module in (emb, head):
                nn.init.normal_(module.weight, std=inner**-0.5)  # type: ignore[arg-type]
            if inner == self.width:
                token_V = torch.arange(target.shape.vocab_size, device=target.device)
                emb.weight.data.copy_(unit_rms(target.embed(token_V).detach().float()) * inner**-0.5)  # type: ignore[operator]
                head.weight.data.copy_(target.head_weight.detach())  # type: ignore[operator]

    def resolved_options(self) -> dict[str, Any]:
        return {"inner_dim": self.head[0].in_features}

    def first_input(self, hidden_H: Tensor) -> Tensor:
        """The input of the first stage."""
        return unit_rms(hidden_H) / math.sqrt(2) if self.scaled else hidden_H

    def stage(self, stage: int, state: Tensor, token: Tensor) -> Tensor:
        """[..., I] the state of stage `stage` (from 0), after one more token."""
        proj, emb, ln = (modules[min(stage, len(modules) - 1)] for modules in (self.proj, self.emb, self.ln))
        out_I: Tensor = F.gelu(ln(proj(state) + self.weight * emb(token)))
        return out_I

    def head_of(self, stage: int) -> nn.Module:
        return self.head[min(stage, len(self.head) - 1)]

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        state_P = self.first_input(batch.hidden[FINAL].flatten(0, 1))
        for stage in range(self.draft_length):
            state_P = recomputed(self.recomputes, self.stage, stage, state_P, batch.after(1 + stage).flatten())
            pairs = batch.future(2 + stage)
            yield Prediction(stage, pairs.source_M, pairs.label_M, state_P[pairs.source_M], self.head_of(stage))

    def open(self, slots: int, max_len: int) -> MLPSpeculatorState:
        return MLPSpeculatorState(self, slots)


class MLPSpeculatorState(LastState):
    """The state that the first stage reads. A node's state is the one that the node was chosen from."""

    def __init__(self, drafter: MLPSpeculator, slots: int) -> None:
        parameter = next(drafter.parameters())
        super().__init__(slots, drafter.width, parameter)
        self.drafter, self.grower = drafter, drafter.proposal.grower(parameter.device)

    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        drafter = self.drafter

        def scored(stage: int, above_BWI: Tensor, token_BW: Tensor) -> Scored:
            state_BWI = drafter.stage(stage, above_BWI, token_BW)
            return Scored(drafter.head_of(stage)(state_BWI), state_BWI)

        def score(nodes: TreeLevel) -> Scored:
            return scored(nodes.depth, nodes.state_BWH, nodes.token_BW)

        root_B, first_B1H = self.root_S[slot_B], drafter.first_input(self.hidden_SH[slot_B])[:, None]
        return self.grower.grow(root_B, scored(0, first_B1H, root_B[:, None]), score, None, sampling, depth)


FAMILY = Family("mlp_speculator", MLPSpeculatorOptions, MLPSpeculator)
