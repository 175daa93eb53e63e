"""Norm, gate and rotary positions in training: gradients by differences in float64, and the results of plain operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.ops.gated import gate
from drafttrain.ops.rms_norm import trained_norm
from drafttrain.ops.rotary import rotate, rotate_signed

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def plain_norm(x_H: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    wide_H = x_H.float()
    return (wide_H * torch.rsqrt(wide_H.pow(2).mean(-1, keepdim=True) + eps)).to(x_H.dtype) * weight_H


def test_gate_and_trained_norm_pass_gradcheck() -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(gate, (x, y))
    assert torch.autograd.gradcheck(lambda x, weight: trained_norm(x, weight, 1e-2), (x, weight))


def test_rotate_passes_gradcheck_and_equals_formula() -> None:
    torch.manual_seed(0)
    x_BhND = torch.randn(2, 3, 5, 6, dtype=torch.float64, requires_grad=True)
    cos_BND, sin_BND = torch.randn(2, 2, 5, 6, dtype=torch.float64)
    signed_BND = torch.cat([-sin_BND[..., :3], sin_BND[..., 3:]], -1)

    def by_position(x_BhND: Tensor) -> Tensor:
        return rotate_signed(x_BhND.transpose(1, 2), cos_BND, signed_BND).transpose(1, 2)

    assert torch.autograd.gradcheck(lambda x: rotate(x, cos_BND, sin_BND), x_BhND)
    assert torch.autograd.gradcheck(by_position, x_BhND)
    found = rotate(x_BhND, cos_BND, sin_BND)
    torch.testing.assert_close(found, by_position(x_BhND))
    pair, at = x_BhND[1, 2, 4, [1, 4]], (1, 4, [1, 4])
    turned = torch.stack([-pair[1], pair[0]])
    torch.testing.assert_close(found[1, 2, 4, [1, 4]], pair * cos_BND[at] + turned * sin_BND[at])


@pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
@pytest.mark.parametrize("contiguous", [True, False])
def test_gate_and_trained_norm_equal_plain_operators(dtype: torch.dtype, contiguous: bool) -> None:
    torch.manual_seed(0)
    x, y, grad = (torch.randn(4, 7, 33, dtype=dtype) for _ in range(3))
    if not contiguous:
        x, y = (given.transpose(0, 1).contiguous().transpose(0, 1) for given in (x, y))
    weight = torch.randn(33, dtype=dtype)
    inputs = [given.detach().requires_grad_() for given in (x, y, weight)]
    both = (
        (lambda: gate(inputs[0], inputs[1]), lambda: F.silu(inputs[0]) * inputs[1], inputs[:2]),
        (lambda: trained_norm(inputs[0], inputs[2], 1e-5), lambda: plain_norm(inputs[0], inputs[2], 1e-5), inputs[::2]),
    )
    for ours, theirs, of in both:
        for found, wanted in zip(*([out, *torch.autograd.grad(out, of, grad)] for out in (ours(), theirs())), strict=True):
            torch.testing.assert_close(found, wanted, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def test_gate_saves_only_its_inputs_for_backward() -> None:
    """Autograd's own graph keeps a third tensor, SiLU of the gate."""
    gate_I, up_I = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    kept = list[int]()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        gate(gate_I, up_I)
    assert kept == [32, 32]
