"""Training on own outputs, written position by position, for the tests of the families that are trained so."""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.drafters.common.recurrent import Recurrent
from drafttrain.features.online import Online
from drafttrain.model.batch import TrainBatch
from drafttrain.model.target import FINAL
from drafttrain.targets.hf import HFTarget
from tests.tiny import shake


def states(drafter: Recurrent, batch: TrainBatch, steps: int, detach: bool) -> dict[tuple[int, int, int], Tensor]:
    """By (step, row, index t): the state that comes out where the token t + 1 + step is read at rotary position t + step."""
    layers, found = [drafter.layer, *drafter.further], {}
    B, T = batch.token_BT.shape
    fused = drafter.fuse(batch.hidden)
    for row in range(B):
        keys: list[list[list[Tensor]]] = [[] for _ in layers]
        values: list[list[list[Tensor]]] = [[] for _ in layers]
        before = [fused[row, t] for t in range(T)]
        for step in range(steps):
            for both in (*keys, *values):
                both.append([])
            after = []
            for t in range(T):
                token = batch.token_BT[row, t + 1 + step] if t + 1 + step < T else torch.tensor(0)
                residual, read = drafter.enter(token[None, None], before[t][None, None])
                seen = [(0, s) for s in range(t + 1) if batch.document_BT[row, s] == batch.document_BT[row, t]]
                seen += [(i, t) for i in range(1, step + 1)]
                for number, layer in enumerate(layers):
                    attention, own_keys, own_values = layer.self_attn, keys[number], values[number]
                    q, k, v = (x[0, :, 0] for x in attention.qkv(read, batch.position_BT[row, t][None, None] + step))
                    groups = q.shape[0] // k.shape[0]
                    own_keys[step].append(k.repeat_interleave(groups, 0))
                    own_values[step].append(v.repeat_interleave(groups, 0))
                    scores = torch.stack([(q * own_keys[i][s]).sum(-1) for i, s in seen]) * q.shape[-1] ** -0.5
                    sinks = scores[:0] if attention.sinks is None else attention.sinks[None]
                    shares = torch.cat([scores, sinks]).softmax(0)[: len(seen), :, None]
                    mixed = (shares * torch.stack([own_values[i][s] for i, s in seen])).sum(0)
                    residual = drafter.leave(residual, attention.out(mixed[None, :, None]), number)
                    if number + 1 < len(layers):
                        read = layers[number + 1].input_layernorm(residual)
                after.append(residual[0, 0])
                found[step, row, t] = after[-1]
            before = [x.detach() for x in after] if detach else after
    return found


def labels(batch: TrainBatch, step: int) -> list[tuple[int, int]]:
    """(row, t) of the predictions of a step: the token t + 2 + step is of t's document and supervised."""
    B, T = batch.token_BT.shape
    return [
        (row, t)
        for row in range(B)
        for t in range(T - 2 - step)
        if batch.document_BT[row, t] == batch.document_BT[row, t + 2 + step] >= 0 and batch.mask_BT[row, t + 2 + step]
    ]


def packed_batch(drafter: Recurrent, target: HFTarget) -> TrainBatch:
    """Two documents in the first row, a padded one in the second; the target's states of every document by itself."""
    generator = torch.Generator().manual_seed(3)
    token_BT = torch.randint(0, 64, (2, 12), generator=generator)
    document_BT = torch.tensor([[4] * 7 + [9] * 5, [2] * 8 + [-1] * 4])
    position_BT = torch.tensor([[*range(7), *range(5)], range(12)])
    mask_BT = (torch.rand(2, 12, generator=generator) < 0.8) & (document_BT >= 0)
    hidden = {k: torch.randn(2, 12, 32, generator=generator) for k in (*drafter.taps.keys, FINAL)}
    for row, span in ((0, slice(0, 7)), (0, slice(7, 12)), (1, slice(0, 8))):
        one = [x[row : row + 1, span] for x in (token_BT, position_BT, document_BT, mask_BT)]
        for key, state in Online(target, drafter.taps).fill(TrainBatch(*one)).hidden.items():
            hidden[key][row, span] = state[0]
    return TrainBatch(token_BT, position_BT, document_BT, mask_BT, hidden)


def shaken(drafter: Recurrent, amount: float = 0.3) -> Recurrent:
    torch.manual_seed(2)
    shake(drafter.parameters(), amount, least=0.05)
    return drafter
