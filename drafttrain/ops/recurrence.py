"""The states of recurrent layers after some positions, from the inputs of their scans. Outputs are not computed.

Positions are taken in chunks. A position that must not count is an identity: decay 0 and beta 0, or step 0.

Shapes: B rows, N positions, h heads, g groups of heads, K key width, V value width, S state width, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64  # positions at once


def delta_state(state_BhKV: Tensor, k_BNhK: Tensor, v_BNhV: Tensor, decay_BNh: Tensor, beta_BNh: Tensor) -> Tensor:
    """The state of the gated delta rule, S <- exp(decay) (I - beta k k') S + beta k v', in float32 (arXiv 2412.06464).

    Keys are normalised already. Key heads may serve several value heads each.
    """
    state_BhKV, shared = state_BhKV.float(), v_BNhV.shape[2] // k_BNhK.shape[2]
    k_BhNK = k_BNhK.float().repeat_interleave(shared, 2).transpose(1, 2)
    v_BhNV, decay_BhN, beta_BhN = v_BNhV.float().transpose(1, 2), decay_BNh.float().mT, beta_BNh.float().mT
    for start in range(0, k_BhNK.shape[2], CHUNK):
        chunk = slice(start, start + CHUNK)
        k, v, sum_BhN, beta = (
            k_BhNK[:, :, chunk],
            v_BhNV[:, :, chunk],
            decay_BhN[..., chunk].cumsum(-1),
            beta_BhN[..., chunk, None],
        )
        decay_ratio_BhNN = (sum_BhN[..., None] - sum_BhN[..., None, :]).tril(-1).exp().tril(-1)
        delta_BhNV = beta * (v - sum_BhN.exp()[..., None] * (k @ state_BhKV))
        added_BhNV = torch.linalg.solve_triangular(
            beta * (k @ k.mT) * decay_ratio_BhNN, delta_BhNV, upper=False, unitriangular=True
        )
        decay_to_end_BhN = (sum_BhN[..., -1:] - sum_BhN).exp()
        state_BhKV = sum_BhN[..., -1].exp()[..., None, None] * state_BhKV + (k * decay_to_end_BhN[..., None]).mT @ added_BhNV
    return state_BhKV


def state_space_state(state_BhVS: Tensor, x_BNhV: Tensor, step_BNh: Tensor, rate_h: Tensor, b_BNgS: Tensor) -> Tensor:
    """The state of Mamba-2, S <- exp(rate step) S + step x b', in float32 (arXiv 2405.21060, section 6)."""
    heads = x_BNhV.shape[2] // b_BNgS.shape[2]
    x_BhNV, step_BhN = x_BNhV.float().transpose(1, 2), step_BNh.float().mT
    b_BhNS = b_BNgS.float().transpose(1, 2).repeat_interleave(heads, 1)
    sum_BhN = (step_BhN * rate_h.float()[:, None]).cumsum(-1)
    weight_BhN = (sum_BhN[..., -1:] - sum_BhN).exp() * step_BhN
    return sum_BhN[..., -1].exp()[..., None, None] * state_BhVS.float() + (x_BhNV * weight_BhN[..., None]).mT @ b_BhNS


def selective_state(state_BCS: Tensor, x_BCN: Tensor, step_BCN: Tensor, rate_CS: Tensor, b_BSN: Tensor) -> Tensor:
    """The state of Mamba, S <- exp(rate step) S + step x b', in float32 (arXiv 2312.00752, section 3.2)."""
    state_BCS, rate_CS = state_BCS.float(), rate_CS.float()
    input_BCN, b_BNS = (x_BCN * step_BCN).float(), b_BSN.float().mT
    for start in range(0, x_BCN.shape[2], CHUNK):
        chunk = slice(start, start + CHUNK)
        sum_BCN = step_BCN[..., chunk].float().cumsum(-1)
        decay_to_end_BCNS = ((sum_BCN[..., -1:] - sum_BCN)[..., None] * rate_CS[:, None]).exp()
        added_BCS = torch.einsum("bcn,bcns,bns->bcs", input_BCN[..., chunk], decay_to_end_BCNS, b_BNS[:, chunk])
        state_BCS = (sum_BCN[..., -1:] * rate_CS).exp() * state_BCS + added_BCS
    return state_BCS


def steps(raw: Tensor, bias: Tensor | None, softplus: bool, limits: tuple[float, float] = (0.0, float("inf"))) -> Tensor:
    """The step sizes that a state space model makes of its raw ones; the bias has the shape of the raw ones' other sizes."""
    step = raw if bias is None else raw + bias.to(raw.dtype)
    return (F.softplus(step) if softplus else step).clamp(*limits)
