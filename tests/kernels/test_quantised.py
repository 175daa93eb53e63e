"""Quantised products: the packed kernels against the widened twin, and the twin against the weight."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from drafttrain.drafters import families
from drafttrain.ops import quantised
from drafttrain.ops.quantised import GROUP, Quantised
from drafttrain.targets.fast import FastTarget
from tests.helpers import tiny_model

CPU = torch.device("cpu")


class StandIn:
    """The arithmetic of torch's int4 kernel for GPUs, by its documents: [O, I / 2] bytes, the even input in the upper half,
    stand for (code - 8) scale + zero; groups' scales and zeros are [G, O, 2]. It refuses what the kernel refuses.
    """

    def __init__(self) -> None:
        self.codes: dict[int, Tensor] = {}
        self.tiles: list[int] = []
        self.zero_first = False  # a kernel that computes something else

    def pack(self, pairs_OI: Tensor, tiles: int) -> Tensor:
        outputs, inputs = len(pairs_OI), 2 * pairs_OI.shape[1]
        assert pairs_OI.dtype == torch.uint8 and pairs_OI.is_contiguous()
        assert outputs % 8 == 0 and inputs % (16 * tiles) == 0 and tiles in (2, 4, 8)
        self.tiles.append(tiles)
        packed = torch.zeros(outputs // 8, inputs // (16 * tiles), 32, tiles // 2, dtype=torch.int32)
        wanted = torch.ops.aten._convert_weight_to_int4pack(pairs_OI.to("meta"), tiles)
        assert (packed.shape, packed.dtype) == (wanted.shape, wanted.dtype)
        self.codes[packed.data_ptr()] = torch.stack([pairs_OI >> 4, pairs_OI & 15], -1).flatten(1).int()
        return packed

    def product(self, x_MI: Tensor, packed: Tensor, group: int, pairs_GO2: Tensor) -> Tensor:
        code_OI = self.codes[packed.data_ptr()]
        outputs, inputs = code_OI.shape
        assert x_MI.dtype == pairs_GO2.dtype == torch.bfloat16 and x_MI.is_contiguous() and pairs_GO2.is_contiguous()
        assert x_MI.dim() == 2 and x_MI.shape[1] == inputs and group == GROUP
        assert pairs_GO2.shape == (inputs // group, outputs, 2)
        scale_OG1, zero_OG1 = pairs_GO2.float().permute(2, 1, 0)[..., None]
        code_OGI = code_OI.view(outputs, -1, group) - (0 if self.zero_first else 8)
        return (x_MI.float() @ (code_OGI * scale_OG1 + zero_OG1).flatten(1).T).bfloat16()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Weights count as a GPU's of capability 9.0, whose int4 kernel the stand-in is."""
    found, library = StandIn(), torch.library.Library("aten", "IMPL")
    library.impl("_convert_weight_to_int4pack", found.pack, "CPU")
    library.impl("_weight_int4pack_mm", found.product, "CPU")
    monkeypatch.setattr(quantised, "_kind", lambda x: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    quantised.int4_fault.cache_clear()
    yield found
    quantised.int4_fault.cache_clear()
    library._destroy()


@pytest.mark.parametrize(("inputs", "tiles"), [(256, 8), (64, 4), (96, 2), (33, 4)])
def test_int4_cuda_kernel_receives_documented_layout(gpu: StandIn, inputs: int, tiles: int) -> None:
    torch.manual_seed(inputs)
    weight_OI, x = torch.randn(48, inputs), torch.randn(2, 3, inputs, dtype=torch.float16)
    ours, plain = Quantised(weight_OI, 4), Quantised(weight_OI, 4, packed=False)
    assert ours.packed and gpu.tiles[-1] == tiles and not plain.packed
    wanted = (x.float() @ plain.widened(torch.float32).T).half()
    found = ours(x)
    assert found.dtype == torch.float16 and found.shape == (2, 3, 48)
    torch.testing.assert_close(found, wanted, rtol=0.03, atol=0.03 * inputs**0.5)
    assert not Quantised(torch.randn(44, inputs), 4).packed  # rows that are no multiple of 8
    assert not Quantised(weight_OI, 8).packed


def test_int4_unusable_cuda_kernel_falls_back_to_widening(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    assert quantised.int4_fault(CPU) is None
    gpu.zero_first = True
    assert quantised.int4_fault(CPU) is None, "tried once"
    quantised.int4_fault.cache_clear()
    assert "off by" in str(quantised.int4_fault(CPU))
    x, ours = torch.randn(3, 64), Quantised(torch.randn(16, 64), 4)
    assert not ours.packed
    torch.testing.assert_close(ours(x), x @ ours.widened(torch.float32).T)

    def missing(*_: object) -> Tensor:
        raise NotImplementedError("Could not run 'aten::_convert_weight_to_int4pack'\nand so on")

    monkeypatch.setattr(quantised, "_pack", missing)
    quantised.int4_fault.cache_clear()
    assert quantised.int4_fault(CPU) == "Could not run 'aten::_convert_weight_to_int4pack'"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    quantised.int4_fault.cache_clear()
    assert quantised.int4_fault(CPU) == "it needs a GPU of capability 8.0"


def test_quantised_cost_notes_weights_that_save_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, fault = torch.device("cuda"), [None, "it needs a GPU of capability 8.0"]
    monkeypatch.setattr(quantised, "int4_fault", lambda device: fault[0])
    assert quantised.cost("int8", CPU) == quantised.cost("int4", CPU) == quantised.cost("int4", gpu) == ""
    assert quantised.cost("int8", gpu).startswith("int8 weights save memory here, not time")
    fault.reverse()
    assert quantised.cost("int4", gpu).endswith("widened for its product (it needs a GPU of capability 8.0)")
    target = FastTarget(tiny_model())
    monkeypatch.setattr("drafttrain.drafters.draft_model.cost", lambda kind, device: f"{kind} on {device}")
    family = families()["draft_model"]
    drafter = family.build(family.options(blocks=1, quantize="int8"), target)
    assert drafter.remark == "int8 on cpu" and drafter.variants()["unquantised"].remark == ""


def test_quantised_product_equals_twin_and_weight_within_half_step(subtests: pytest.Subtests) -> None:
    for bits, shape in product((8, 4), [(32, 64), (48, 33), (16, 7), (30, 40), (361, 128)]):
        with subtests.test(bits=bits, shape=shape):
            check_product(bits, shape)


def check_product(bits: int, shape: tuple[int, int]) -> None:
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
def test_quantised_product_keeps_bfloat16_dtype(bits: int) -> None:
    x = torch.randn(1, 64, dtype=torch.bfloat16)
    assert Quantised(torch.randn(32, 64), bits)(x).dtype == torch.bfloat16
