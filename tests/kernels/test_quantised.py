"""Quantised products: the packed kernels against the widened twin, and the twin against the weight."""

from __future__ import annotations

import pytest
import torch

from drafttrain.ops.quantised import Quantised


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(32, 64), (48, 33), (16, 7), (30, 40), (361, 128)])
def test_a_product_is_its_twins(bits: int, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight_OI, x = torch.randn(shape), torch.randn(2, 3, shape[1])
    weight_OI[1] = 0.0
    plain = Quantised(weight_OI, bits)
    ours = plain(x)
    if plain.packed and bits == 4:  # the twin's codes, as another device has them
        plain = Quantised(torch.nn.functional.pad(weight_OI, (0, 0, 0, 1)), bits)
        assert not plain.packed
        wide_OI = plain.widened(torch.float32)[:-1]
    else:
        wide_OI = plain.widened(torch.float32)
    assert ours.shape == (2, 3, shape[0]) and ours.dtype == torch.float32
    torch.testing.assert_close(ours, x @ wide_OI.T, rtol=0.03, atol=0.03 * shape[1] ** 0.5)
    step_O = weight_OI.abs().amax(1) / (127 if bits == 8 else 7)
    assert ((wide_OI - weight_OI).abs() <= step_O[:, None] / 2 + 1e-6).all()
    assert not ours[..., 1].any()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_wider_type_keeps_its_type(bits: int) -> None:
    x = torch.randn(1, 64, dtype=torch.bfloat16)
    assert Quantised(torch.randn(32, 64), bits)(x).dtype == torch.bfloat16
