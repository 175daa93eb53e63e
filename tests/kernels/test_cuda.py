"""The CUDA kernels without a GPU: run by the emulator against their twins, and compiled by nvcc where it is found."""

from __future__ import annotations

import pytest
import torch

from drafttrain.ops import rms_norm as norm_op
from tests.kernels import emulated

DTYPES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def nan(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 17, 64, 2056])
def test_rms_norm(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(width)
    x, delta, weight = (torch.randn(*shape, width).to(dtype) for shape in ((3, 2), (3, 2), ()))
    for added in (None, delta):
        wanted = norm_op.reference(x, added, weight, 1e-5)
        summed, out = nan(*x.shape, dtype=dtype), nan(*x.shape, dtype=dtype)
        emulated.ops().rms_norm(x, added, weight, 1e-5, summed, out)
        torch.testing.assert_close(out, wanted[1], rtol=DTYPES[dtype], atol=DTYPES[dtype])
        if added is not None:
            assert torch.equal(summed, wanted[0])
