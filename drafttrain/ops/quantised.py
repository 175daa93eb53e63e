"""Products with symmetric weights of 8 or 4 bits, for drafters, whose output need not be exact.

The time of a product of few rows is that of reading its weights, so smaller weights make it faster. int8 has one scale per
output row, int4 one for each group of 32 inputs. Torch's own kernels read the packed weights, all with bfloat16 inputs: on a
CPU both, on a GPU the int4 kernel, if a trial shows that it computes correctly. Elsewhere the weights are widened for each
product, which saves memory and no time. Shapes: I in, O out, G groups of inputs, M rows.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

BITS = {"int8": 8, "int4": 4}
GROUP = 32
TILE = 16  # inputs of a tile of the GPU's int4 kernel, which reads 2, 4 or 8 tiles at once


class Quantised:
    """x W^T with a quantised W. Its twin is the product with `widened`. packed: use torch's own kernels where they apply."""

    def __init__(self, weight_OI: Tensor, bits: int, packed: bool = True) -> None:
        self.bits, self.inputs, self.kind = bits, weight_OI.shape[1], _kind(weight_OI)
        # padded to whole groups: torch's int8 kernel reads past the end of rows of other lengths
        weight_OI = F.pad(weight_OI.detach().float(), (0, -self.inputs % GROUP))
        if bits == 8:
            self.scale = scales(weight_OI, 127)
            self.code = (weight_OI / self.scale[:, None]).round().to(torch.int8)
            self.packed = packed and self.kind == "cpu"
            return
        grouped_OGI = weight_OI.reshape(len(weight_OI), -1, GROUP)
        self.scale = scales(grouped_OGI, 7)
        code_OI = (grouped_OGI / self.scale[..., None]).round().flatten(1).to(torch.int32) + 8
        self.packed = packed and _packs(code_OI)
        if self.packed:
            self.code = _pack(code_OI)
            zero_GO2 = torch.stack([self.scale, torch.zeros_like(self.scale)], -1).transpose(0, 1)
            self.pairs = zero_GO2.bfloat16().contiguous()
        else:
            self.code = (code_OI[:, ::2] | code_OI[:, 1::2] << 4).to(torch.uint8)

    def __call__(self, x_I: Tensor) -> Tensor:
        if not self.packed:
            return F.linear(x_I, self.widened(x_I.dtype))
        x_MI = F.pad(x_I.bfloat16().flatten(0, -2), (0, -self.inputs % GROUP)).contiguous()
        if self.bits == 8:
            out_MO: Tensor = torch.ops.aten._weight_int8pack_mm(x_MI, self.code, self.scale.bfloat16())
        elif self.kind == "cuda":
            out_MO = torch.ops.aten._weight_int4pack_mm(x_MI, self.code, GROUP, self.pairs)
        else:
            out_MO = torch.ops.aten._weight_int4pack_mm_for_cpu(x_MI, self.code, GROUP, self.pairs)
        return out_MO.to(x_I.dtype).reshape(*x_I.shape[:-1], -1)

    def take(self, other: Quantised) -> bool:
        """Write the values of another one of this shape to this one's memory. Returns whether they differ."""
        pairs = [(getattr(self, name), getattr(other, name)) for name in ("code", "scale", "pairs") if hasattr(other, name)]
        changed = any(not torch.equal(current, updated) for current, updated in pairs)
        for current, updated in pairs if changed else ():
            current.copy_(updated)
        return changed

    def widened(self, dtype: torch.dtype) -> Tensor:
        """[O, I]: the values of the codes. Not for packed codes, whose order only torch's kernels know."""
        if self.bits == 8:
            return (self.code.to(dtype) * self.scale[:, None].to(dtype))[:, : self.inputs]
        code_OI = torch.stack([self.code & 15, self.code >> 4], -1).flatten(1).to(dtype) - 8
        return (code_OI.reshape(len(code_OI), -1, GROUP) * self.scale[..., None].to(dtype)).flatten(1)[:, : self.inputs]


def _kind(x: Tensor) -> str:
    return x.device.type


def _packs(code_OI: Tensor) -> bool:
    """Whether torch's int4 kernel takes these codes: [O, I], I in whole groups."""
    outputs, device_type = len(code_OI), _kind(code_OI)
    if device_type == "cuda":
        return outputs % 8 == 0 and int4_fault(code_OI.device) is None
    return device_type == "cpu" and outputs % 16 == 0


def _pack(code_OI: Tensor) -> Tensor:
    """The codes (0 to 15 for -8 to 7) in the order of torch's int4 kernel for their device."""
    if _kind(code_OI) != "cuda":
        packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(code_OI, 1)
        return packed
    pairs_OI = (code_OI[:, ::2] << 4 | code_OI[:, 1::2]).to(torch.uint8)  # the even input is in the high bits
    tiles = next(tiles for tiles in (8, 4, 2) if code_OI.shape[1] % (TILE * tiles) == 0)
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs_OI.contiguous(), tiles)
    return packed


@cache
def int4_fault(device: torch.device) -> str | None:
    """Why torch's int4 kernel cannot be used on this GPU; None if it computes the right product. Tried once."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of capability 8.0"
    generator = torch.Generator().manual_seed(0)
    code_OI = torch.randint(0, 16, (64, 3 * GROUP), generator=generator, dtype=torch.int32)
    scale_OG, zero_OG = torch.rand(2, 64, 3, generator=generator)
    x_MI = torch.randn(5, 3 * GROUP, generator=generator).bfloat16()
    pairs_GO2 = torch.stack([scale_OG, zero_OG], -1).transpose(0, 1).bfloat16().contiguous()
    try:
        actual_MO = torch.ops.aten._weight_int4pack_mm(x_MI.to(device), _pack(code_OI.to(device)), GROUP, pairs_GO2.to(device))
    except (RuntimeError, AttributeError) as error:
        return str(error).strip().partition("\n")[0][:160] or "it failed without a message"
    wide_OGI = (code_OI.view(64, 3, GROUP) - 8) * pairs_GO2[..., 0].T[..., None].float()
    expected_MO = x_MI.float() @ (wide_OGI + pairs_GO2[..., 1].T[..., None].float()).flatten(1).T
    gap = (actual_MO.float().cpu() - expected_MO).norm() / expected_MO.norm()
    return None if gap < 1e-2 else f"its products are off by {float(gap):.1e} of their norm"


def cost(kind: str, device: torch.device) -> str:
    """One line for the user about the cost of weights of this kind on this device; empty where they save time."""
    fault = "torch has no kernel for few rows" if kind == "int8" else int4_fault(device) if device.type == "cuda" else None
    if device.type == "cpu" or (device.type == "cuda" and fault is None):
        return ""
    reason = f" ({fault})" if fault else ""
    return f"{kind} weights save memory here, not time: each is widened for its product{reason}"


def stored_bytes(outputs: int, inputs: int, bits: int) -> int:
    """Bytes of the codes and scales of a weight."""
    groups = -(-inputs // GROUP)
    return outputs * (groups * GROUP * bits // 8 + 4 * (1 if bits == 8 else groups))


def scales(weight: Tensor, largest: int) -> Tensor:
    """The scales that map the largest magnitude of the last dimension to `largest`; 1 where all values are 0."""
    amax = weight.abs().amax(-1)
    return torch.where(amax > 0, amax / largest, 1.0)
