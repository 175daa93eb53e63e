"""FP8 products: against float64 by the definition, and torch's product where a stand-in takes a CPU for a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from drafttrain.decoding.graph_runner import WeightReads
from drafttrain.ops import fp8
from drafttrain.ops.fp8 import Fp8Linear
from drafttrain.ops.fp8_rows import E4M3, LARGEST, fp8_rows

CPU = torch.device("cpu")


def exact(x: Tensor, linear: Fp8Linear) -> Tensor:
    """In float64: each row divided by its scale, rounded to e4m3, multiplied, and scaled again."""
    scale = (x.float().abs().amax(-1, keepdim=True) / LARGEST).masked_fill(x.abs().amax(-1, keepdim=True) == 0, 1.0)
    wide = (x.float() / scale).to(E4M3).double() * scale
    return wide @ (linear.code.double() * linear.scale[:, None]).T + (0.0 if linear.bias is None else linear.bias.double())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU counts as a GPU of capability 9.0. torch computes `_scaled_mm` on both."""
    monkeypatch.setattr(fp8, "_kind", lambda x: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    fp8.fault.cache_clear()
    yield
    fp8.fault.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_product_equals_definition_with_zero_rows_and_bias(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 40)
    linear.weight.data[3] = 0.0
    made, x = Fp8Linear.of(linear.to(dtype), CPU), torch.randn(2, 3, 48).to(dtype)
    x[0, 1] = 0.0
    found = made(x)
    assert found.dtype == dtype and found.shape == (2, 3, 40) and torch.equal(found[0, 1], made.bias)
    torch.testing.assert_close(found, exact(x, made).to(dtype))
    plain = linear(x).detach()
    assert float((found - plain).norm() / plain.norm()) < 0.06
    torch.testing.assert_close(made(x[1:, :1]), found[1:, :1])


def test_fp8_scales_map_largest_magnitude_of_each_row_to_448() -> None:
    code, scale = fp8_rows(torch.tensor([[1.0, -896.0], [0.0, 0.0], [2.0**-20, 0.0]]))
    assert scale.flatten().tolist() == [2.0, 1.0, float(torch.tensor(2.0**-20) / 448)]
    assert code.float().tolist() == [[0.5, -448.0], [0.0, 0.0], [448.0, 0.0]]


def test_fp8_joined_parts_are_views_and_ordered_parts_are_not() -> None:
    parts = [Fp8Linear.of(nn.Linear(32, rows, bias=rows == 16), CPU) for rows in (16, 8)]
    x, before = torch.randn(3, 32), [part.code.data_ptr() for part in parts]
    wanted, order = torch.cat([part(x) for part in parts], -1), torch.arange(24).flip(0)
    torch.testing.assert_close(Fp8Linear.joined(parts, order)(x), wanted[:, order])
    assert [part.code.data_ptr() for part in parts] == before
    joined = Fp8Linear.joined(parts)
    torch.testing.assert_close(joined(x), wanted)
    assert parts[0].code.data_ptr() == joined.code.data_ptr()
    torch.testing.assert_close(torch.cat([part(x) for part in parts], -1), wanted)
    assert Fp8Linear.joined(parts[:1]) is parts[0]


def test_fp8_torch_product_serves_bfloat16_and_whole_tiles(gpu: None) -> None:
    torch.manual_seed(0)
    made, x = Fp8Linear.of(nn.Linear(64, 48, bias=False), CPU), torch.randn(2, 5, 64).bfloat16()
    for way in fp8.WAYS:
        assert fp8.fault(way, CPU) is None
        code, scale = fp8_rows(x.view(-1, 64))
        found = way(code, scale, made.code, made.scale)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, exact(x, made).bfloat16().view(10, 48), rtol=0.01, atol=0.05)
    assert fp8._way(x, made) is fp8.WAYS[0]
    assert fp8._way(x.float(), made) is None and fp8._way(x, Fp8Linear.of(nn.Linear(64, 40), CPU)) is None


def test_weight_reads_count_one_byte_for_each_fp8_weight(gpu: None) -> None:
    made, x = Fp8Linear.of(nn.Linear(64, 48, bias=False), CPU), torch.randn(3, 64).bfloat16()
    made(x)  # tries the product
    with WeightReads() as reads:
        made(x)
    assert reads.bytes() == 64 * 48 + 4 * 48


def test_fp8_wrong_or_missing_torch_product_falls_back(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch._scaled_mm

    def refused(code: Tensor, *rest: Tensor, out_dtype: torch.dtype) -> Tensor:
        if out_dtype == torch.bfloat16:
            raise NotImplementedError("rowwise scaling is not supported\nand so on")
        return original(code, *rest, out_dtype=out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", refused)
    made, x = Fp8Linear.of(nn.Linear(64, 48, bias=False), CPU), torch.randn(3, 64).bfloat16()
    assert fp8._way(x, made) is fp8.WAYS[1]
    assert fp8.fault(fp8.WAYS[0], CPU) == "rowwise scaling is not supported"
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, out_dtype: 1.1 * original(*a, out_dtype=torch.float32).to(out_dtype))
    fp8.fault.cache_clear()
    assert fp8._way(x, made) is None
    assert all("off by" in str(fp8.fault(way, CPU)) for way in fp8.WAYS)
    torch.testing.assert_close(made(x), exact(x, made).bfloat16())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    fp8.fault.cache_clear()
    assert fp8.why_widened(torch.device("cuda"), torch.bfloat16) == "an FP8 product needs a GPU of capability 8.9"
    assert fp8.why_widened(torch.device("cuda"), torch.float32) == "torch's FP8 product gives bfloat16, not float32"
    assert fp8.why_widened(CPU, torch.bfloat16) == "torch's FP8 product runs on GPUs, this is a cpu"


def test_fp8_whole_activations_multiply_widened_weights() -> None:
    made, x = Fp8Linear.of(nn.Linear(32, 16), CPU), torch.randn(3, 32)
    with fp8.whole_activations():
        found = made(x)
    torch.testing.assert_close(found, x @ fp8.widened(made.code, made.scale).T + made.bias)
    assert not torch.allclose(found, made(x), rtol=1e-3, atol=1e-3)


def test_fp8_product_with_gradient_is_refused() -> None:
    with pytest.raises(AssertionError, match="no gradient"):
        Fp8Linear.of(nn.Linear(32, 16), CPU)(torch.randn(1, 32, requires_grad=True))


def test_fp8_block_product_receives_layout_of_torch_and_pads_rows_if_it_must(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in checks what torch's source demands of scales: [M, G] and [Q, P], one group's in a row in memory."""
    whole_rows = [1]

    def product(code: Tensor, weight: Tensor, scale: Tensor, blocks: Tensor, out_dtype: torch.dtype) -> Tensor:
        (M, K), N = code.shape, weight.shape[1]
        assert scale.shape == (M, K // 128) and (M == 1 or scale.stride(0) == 1) and scale.stride(1) == M
        assert blocks.shape == (K // 128, N // 128) and blocks.stride() == (1, K // 128)
        if M % whole_rows[0]:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        return fp8.reference(code, scale, weight.T, blocks.T).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    torch.manual_seed(0)
    code, _ = fp8_rows(torch.randn(256, 512))
    made, x = Fp8Linear(code, torch.rand(2, 4)), torch.randn(3, 512).bfloat16()
    wide = code.double() * made.scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    parts = x.float().view(3, 4, 128)
    scale = parts.abs().amax(-1, keepdim=True) / LARGEST
    wanted = ((parts / scale).to(E4M3).double() * scale).flatten(1) @ wide.T
    for rows, way in zip((1, 16), fp8.BLOCK_WAYS, strict=True):
        whole_rows[0] = rows
        fp8.fault.cache_clear()
        assert fp8._way(x, made) is way
        torch.testing.assert_close(made(x), wanted.bfloat16())
    assert fp8._way(x[:, :384], Fp8Linear(code[:, :384], torch.rand(2, 3))) is None
