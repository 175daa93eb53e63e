"""Attention of a drafter that is trained on its own outputs, to its later steps: each query sees one key of each, that of its
own index (`model.unrolled_attention`). Merged with the attention to step 0 by log-sum-exp.

Shapes: B rows, T positions, I later steps, h heads, g KV heads, x = h / g, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.ops import jit, library

DOT = 1024  # positions whose vectors are float32 at once


def merged(
    q_BhTD: Tensor, first_BhTD: Tensor, lse_BhT: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """(output in q's dtype [B, h, T, D], log-sum-exp of all scores [B, h, T]).

    first, lse: output and log-sum-exp of the attention to step 0. keys, values: [B, g, T, D] of each later step, at least one.
    Scores are scaled by D ** -0.5.
    """
    if not _serves(q_BhTD, first_BhTD, *keys, *values):
        return reference(q_BhTD, first_BhTD, lse_BhT, keys, values)
    from drafttrain.kernels.triton import later_steps as kernels

    out_BhTD, joint_BhT = torch.empty_like(q_BhTD), torch.empty(lse_BhT.shape, dtype=torch.float32, device=q_BhTD.device)
    kernels.merge(
        q_BhTD, first_BhTD, lse_BhT.contiguous(), torch.stack([*keys]), torch.stack([*values]), out_BhTD, joint_BhT
    ).run()
    return out_BhTD, joint_BhT


def merged_backward(
    grad_BhTD: Tensor,
    q_BhTD: Tensor,
    out_BhTD: Tensor,
    joint_BhT: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    to_q_BhTD: Tensor,
) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
    """Gradients of q, of each step's keys and of each step's values. to_q: the queries' gradient from step 0, to which the rest
    is added; it may be written to.
    """
    if not _serves(q_BhTD, grad_BhTD, out_BhTD, to_q_BhTD, *keys, *values):
        return reference_backward(grad_BhTD, q_BhTD, out_BhTD, joint_BhT, keys, values, to_q_BhTD)
    from drafttrain.kernels.triton import later_steps as kernels

    keys_IBgTD, values_IBgTD = torch.stack([*keys]), torch.stack([*values])
    to_keys_IBgTD, to_values_IBgTD = torch.empty_like(keys_IBgTD), torch.empty_like(values_IBgTD)
    gradients = (to_q_BhTD, to_keys_IBgTD, to_values_IBgTD)
    kernels.merge_backward(grad_BhTD, q_BhTD, out_BhTD, joint_BhT.contiguous(), keys_IBgTD, values_IBgTD, *gradients).run()
    return to_q_BhTD, to_keys_IBgTD.unbind(), to_values_IBgTD.unbind()


def _serves(*inputs: Tensor) -> bool:
    same_layout = all(x.dtype == inputs[0].dtype and x.stride(-1) == 1 for x in inputs)
    return same_layout and inputs[0].dtype in library.DTYPES and bool(inputs[0].numel()) and jit.serves(inputs[0])


def reference(
    q_BhTD: Tensor, first_BhTD: Tensor, lse_BhT: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The plain-torch twin of `merged`."""
    score_IBhT = [dot(q_BhTD, k) * q_BhTD.shape[-1] ** -0.5 for k in keys]
    joint_BhT = torch.stack([lse_BhT, *score_IBhT]).logsumexp(0)
    out_BhTD = first_BhTD * (lse_BhT - joint_BhT).exp()[..., None]
    for score_BhT, value_BgTD in zip(score_IBhT, values, strict=True):
        out_BhTD = out_BhTD + _scaled((score_BhT - joint_BhT).exp(), value_BgTD)
    return out_BhTD.to(q_BhTD.dtype), joint_BhT


def reference_backward(
    grad_BhTD: Tensor,
    q_BhTD: Tensor,
    out_BhTD: Tensor,
    joint_BhT: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    to_q_BhTD: Tensor,
) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
    """The plain-torch twin of `merged_backward`."""
    mean_BhT, scale = dot(grad_BhTD, out_BhTD), q_BhTD.shape[-1] ** -0.5
    to_keys, to_values = list[Tensor](), list[Tensor]()
    for key_BgTD, value_BgTD in zip(keys, values, strict=True):
        share_BhT = (dot(q_BhTD, key_BgTD) * scale - joint_BhT).exp()
        slope_BhT = (share_BhT * (dot(grad_BhTD, value_BgTD) - mean_BhT) * scale).to(q_BhTD.dtype)
        to_q_BhTD = to_q_BhTD + _scaled(slope_BhT, key_BgTD)
        to_keys.append(_summed(slope_BhT, q_BhTD, key_BgTD))
        to_values.append(_summed(share_BhT.to(q_BhTD.dtype), grad_BhTD, value_BgTD))
    return to_q_BhTD, to_keys, to_values


def dot(a_BhTD: Tensor, b_BgTD: Tensor) -> Tensor:
    """[B, h, T] inner products, in float32 or float64; each of b's heads serves h / g of a's. No copy of b's is made."""
    chunks = zip(torch.split(_grouped(a_BhTD, b_BgTD), DOT, 3), torch.split(b_BgTD[:, :, None], DOT, 3), strict=True)
    rows = [torch.linalg.vecdot(wide(a), wide(b)) for a, b in chunks]
    return torch.cat(rows, 3).flatten(1, 2)


def _scaled(scale_BhT: Tensor, x_BgTD: Tensor) -> Tensor:
    """[B, h, T, D] each position's vector times its head's scale."""
    return (_grouped(scale_BhT, x_BgTD)[..., None] * x_BgTD[:, :, None]).flatten(1, 2)


def _summed(scale_BhT: Tensor, x_BhTD: Tensor, like_BgTD: Tensor) -> Tensor:
    """[B, g, T, D] the sum of the scaled vectors over the heads that share a KV head."""
    scaled_BhTD = scale_BhT[..., None] * x_BhTD
    same_heads = x_BhTD.shape[1] == like_BgTD.shape[1]
    return scaled_BhTD if same_heads else _grouped(scaled_BhTD, like_BgTD).sum(2)


def _grouped(x_Bh: Tensor, like_Bg: Tensor) -> Tensor:
    """[B, g, x, ...]: heads by the KV head that they share. Trailing dimensions stay."""
    return x_Bh.view(x_Bh.shape[0], like_Bg.shape[1], -1, *x_Bh.shape[2:])


def wide(x: Tensor) -> Tensor:
    """In float32, or float64 where it is."""
    return x if x.dtype == torch.float64 else x.float()
