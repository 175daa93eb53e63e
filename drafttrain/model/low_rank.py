"""Low-rank matrices whose products linear maps add at some positions of a pass (LoRA, arXiv 2106.09685).

Shapes: B rows, N positions of one pass, I input width, O output width, R rank; for a joint map R and O of all its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafttrain.ops.linear import linear, pack


class Scale:
    """The factor of the matrices' products at each position of the running pass.

    Written before a pass and left there: layers that are computed again in the backward pass read it once more.
    """

    factor_BN1: Tensor | None = None
    decodes: bool = False  # the pass may use what `JointLowRank.refresh` made


class LowRank(nn.Module):
    """The matrices of one linear map, named as peft names them. B is zero at the start, so that nothing is added."""

    def __init__(self, inputs: int, outputs: int, rank: int, scale: Scale) -> None:
        super().__init__()
        self.lora_A = nn.Linear(inputs, rank, bias=False)
        self.lora_B = nn.Linear(rank, outputs, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=sqrt(5))  # as peft does
        nn.init.zeros_(self.lora_B.weight)
        self.scale = scale

    def forward(self, x_BNI: Tensor) -> Tensor:
        factor_BN1 = self.scale.factor_BN1
        assert factor_BN1 is not None, "the pass goes through `PositionLora.run`"
        inner_BNR = self.lora_A(x_BNI.to(self.lora_A.weight.dtype)) * factor_BN1
        out_BNO: Tensor = self.lora_B(inner_BNR)
        return out_BNO.to(x_BNI.dtype)


class JointLowRank:
    """The matrices of linear maps with one input, in decoding computed as two products. None: a map without matrices."""

    def __init__(self, parts: Sequence[LowRank | None], widths: Sequence[int], order_O: Tensor | None) -> None:
        """widths: of the maps' outputs. order_O: of the joint output; None: one after another."""
        self.parts, self.widths, self.order_O = parts, widths, order_O
        self.scale = next(adapter.scale for adapter in parts if adapter is not None)
        self._joined: tuple[Tensor, Tensor] | None = None  # A [R, I] and B [O, R] of all parts
        self._packed: Tensor | None = None  # B, where that is faster

    @torch.no_grad()
    def refresh(self) -> None:
        """Join the current matrices, in the same memory each time, since captured steps refer to it; unchanged ones stay."""
        adapters = [adapter for adapter in self.parts if adapter is not None]
        with torch.inference_mode(False):
            matrices = torch.cat([adapter.lora_A.weight.detach() for adapter in adapters]), self._second()
            pairs = list(zip(self._joined or (), matrices, strict=False))
            if pairs and all((a.dtype, a.device) == (b.dtype, b.device) for a, b in pairs):
                if all(torch.equal(current, updated) for current, updated in pairs):
                    return
                for current, updated in pairs:
                    current.copy_(updated)
            else:
                self._joined = matrices
            self._packed = pack(matrices[1])

    def _second(self) -> Tensor:
        """[O, R] the parts' second matrices on the diagonal."""
        adapters = [adapter for adapter in self.parts if adapter is not None]
        second_OR = adapters[0].lora_B.weight.new_zeros(
            sum(self.widths), sum(adapter.lora_B.in_features for adapter in adapters)
        )
        row = column = 0
        for adapter, width in zip(self.parts, self.widths, strict=True):
            if adapter is not None:
                rank = adapter.lora_B.in_features
                second_OR[row : row + width, column : column + rank] = adapter.lora_B.weight.detach()
                column += rank
            row += width
        return second_OR if self.order_O is None else second_OR[self.order_O.to(second_OR.device)]

    def add_to(self, out_BNO: Tensor, x_BNI: Tensor) -> Tensor:
        """The maps' outputs with the products added."""
        factor_BN1, joined = self.scale.factor_BN1, self._joined
        if self.scale.decodes and joined is not None and factor_BN1 is not None and joined[0].dtype == x_BNI.dtype:
            inner_BNR = F.linear(x_BNI, joined[0]) * factor_BN1
            if self._packed is None:  # the sum is the product's own: a launch less for each map on a GPU
                return torch.addmm(out_BNO.flatten(0, -2), inner_BNR.flatten(0, -2), joined[1].T).view_as(out_BNO)
            return out_BNO + linear(inner_BNR, joined[1], None, self._packed)
        pairs = zip(self.parts, self.widths, strict=True)
        deltas = [x_BNI.new_zeros(*x_BNI.shape[:-1], width) if adapter is None else adapter(x_BNI) for adapter, width in pairs]
        delta_BNO = deltas[0] if len(deltas) == 1 else torch.cat(deltas, -1)
        return out_BNO + (delta_BNO if self.order_O is None else delta_BNO[..., self.order_O.to(delta_BNO.device)])
