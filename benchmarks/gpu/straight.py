"""The training loss of two families in its simplest form, the comparison in `throughput.py`: transformers' own forward with
all hidden states and logits, all logits of the drafter as [T, V] tensors, attention under a dense mask.

The drafter's modules are its own. No row is padded and every token is supervised.

Shapes: B rows, T positions, k steps, h heads, D head width or the drafter's vocabulary, H hidden, V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.model.batch import TrainBatch


@dataclass(frozen=True, slots=True)
class TargetOutputs:
    """All outputs of the target: the embedding, then every block's output, the last one normed; and its logits."""

    states: tuple[Tensor, ...]
    logits_BTV: Tensor


@torch.no_grad()
def told(target: Any, batch: TrainBatch) -> TargetOutputs:
    out = target.model(input_ids=batch.token_BT, output_hidden_states=True, use_cache=False)
    return TargetOutputs(out.hidden_states, out.logits)


def divergence(logits_BTV: Tensor, target_logits_BTV: Tensor) -> Tensor:
    """[B, T] KL(p || q)."""
    log_q_BTV, log_p_BTV = (x.float().log_softmax(-1) for x in (logits_BTV, target_logits_BTV))
    return F.kl_div(log_q_BTV, log_p_BTV, reduction="none", log_target=True).sum(-1)


def heads(drafter: Any, target: Any, batch: TrainBatch) -> Tensor:
    """The loss of heads on the target's last state; head k, from 0, predicts the token k + 2 positions on."""
    found, total = told(target, batch), torch.zeros((), device=batch.token_BT.device)
    for k, head in enumerate(drafter.heads):
        logits_BTV = head.output(head(found.states[-1]))
        total = total + drafter.decay ** (k + 1) * divergence(logits_BTV[:, : -2 - k], found.logits_BTV[:, 1 + k : -1]).sum()
    return total


def unrolled(drafter: Any, target: Any, batch: TrainBatch) -> Tensor:
    """The loss of a layer trained on its own outputs. At step i the queries see step 0's keys causally, and the keys of later
    steps at their own index, under one mask over all keys.
    """
    found, attention, T = told(target, batch), drafter.layer.self_attn, batch.token_BT.shape[1]
    state_BTH = drafter.fuse({block: found.states[block + 1] for block in drafter.taps.blocks})
    own_TT = torch.eye(T, dtype=torch.bool, device=state_BTH.device)
    mask_TP, total = torch.ones_like(own_TT).tril(), torch.zeros((), device=state_BTH.device)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for step in range(drafter.steps):
        token_BT = F.pad(batch.token_BT[:, 1 + step :], (0, 1 + step))
        residual_BTH, read_BTI = drafter.enter(token_BT, state_BTH)
        q_BhTD, k_BhTD, v_BhTD = attention.qkv(read_BTI, batch.position_BT + step)
        keys, values = [*keys, attention.grouped(k_BhTD)], [*values, attention.grouped(v_BhTD)]
        mixed_BhTD = F.scaled_dot_product_attention(q_BhTD, torch.cat(keys, 2), torch.cat(values, 2), mask_TP)
        state_BTH = drafter.leave(residual_BTH, attention.out(mixed_BhTD))
        total = total + drafter.decay**step * _restricted(drafter, drafter.logits(state_BTH), found.logits_BTV, step)
        mask_TP = torch.cat([mask_TP, own_TT], 1)
    return total


def _restricted(drafter: Any, logits_BTD: Tensor, target_logits_BTV: Tensor, step: int) -> Tensor:
    """The sum over positions whose most likely token is in the drafter's vocabulary, with the target distribution over that
    vocabulary.
    """
    logits_BTD, target_logits_BTV = logits_BTD[:, : -2 - step], target_logits_BTV[:, 1 + step : -1]
    learnt_BT = drafter.t2d[target_logits_BTV.argmax(-1)]
    return (divergence(logits_BTD, target_logits_BTV[..., drafter.ids]) * learnt_BT).sum()


LOSSES: dict[str, Callable[[Any, Any, TrainBatch], Tensor]] = {"eagle3": unrolled, "medusa": heads}
