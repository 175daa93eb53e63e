"""Products with weights of 8 or 4 bits, symmetric: for decoding models that need not be exact, as drafts need not.

A product of few rows waits for its weights, so that it gains what they shrink. int8 has one scale an output row, int4 one for
each group of 32 inputs. On a CPU torch's own kernels read the packed weights, with bfloat16 inputs; elsewhere weights are
widened for each product, which saves memory and no time. Shapes: I in, O out, G groups of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

BITS = {"int8": 8, "int4": 4}
GROUP = 32


class Quantised:
    """x W^T with a quantised W. Its twin is the product with `widened`. packed: by torch's own kernels where they serve."""

    def __init__(self, weight_OI: Tensor, bits: int, packed: bool = True) -> None:
        self.bits, self.inputs = bits, weight_OI.shape[1]
        # in whole groups: torch's int8 kernel reads past the end of rows of other lengths
        weight_OI = F.pad(weight_OI.detach().float(), (0, -self.inputs % GROUP))
        if bits == 8:
            self.scale = scales(weight_OI, 127)
            self.code = (weight_OI / self.scale[:, None]).round().to(torch.int8)
            self.packed = packed and weight_OI.device.type == "cpu"
            return
        grouped_OGI = weight_OI.reshape(len(weight_OI), -1, GROUP)
        self.scale = scales(grouped_OGI, 7)
        code_OI = (grouped_OGI / self.scale[..., None]).round().flatten(1).to(torch.int32) + 8
        self.packed = packed and weight_OI.device.type == "cpu" and weight_OI.shape[0] % 16 == 0
        if self.packed:
            self.code = torch.ops.aten._convert_weight_to_int4pack_for_cpu(code_OI, 1)
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
        else:
            out_MO = torch.ops.aten._weight_int4pack_mm_for_cpu(x_MI, self.code, GROUP, self.pairs)
        return out_MO.to(x_I.dtype).reshape(*x_I.shape[:-1], -1)

    def widened(self, dtype: torch.dtype) -> Tensor:
        """[O, I] what the codes stand for; not where torch's kernels have them in an order of their own."""
        if self.bits == 8:
            return (self.code.to(dtype) * self.scale[:, None].to(dtype))[:, : self.inputs]
        code_OI = torch.stack([self.code & 15, self.code >> 4], -1).flatten(1).to(dtype) - 8
        return (code_OI.reshape(len(code_OI), -1, GROUP) * self.scale[..., None].to(dtype)).flatten(1)[:, : self.inputs]


def stored_bytes(outputs: int, inputs: int, bits: int) -> int:
    """Of the codes and scales of a weight."""
    groups = -(-inputs // GROUP)
    return outputs * (groups * GROUP * bits // 8 + 4 * (1 if bits == 8 else groups))


def scales(weight: Tensor, largest: int) -> Tensor:
    """The last dimension's largest magnitude becomes `largest`; 1 where all is 0."""
    most = weight.abs().amax(-1)
    return torch.where(most > 0, most / largest, 1.0)
