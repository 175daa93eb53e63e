"""Short convolutions around a part of a layer, with weights that depend on the position's input.

Shapes: S positions of a block, G groups of channels, H hidden.

With two taps the part's input and output at position s are mixed with those at s - 1, channel by channel:

    y[s] = (base_0 + own_0[s]) x[s] + (base_1 + own_1[s]) x[s - 1]        x[-1] = 0: blocks do not mix

`base` has a number for each channel and tap. `own` has one for each group of channels, from a linear map of the part's input.
At the start base is (1, 0) and the map is zero, so that the convolution is the identity.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafttrain.core.errors import UserError

TAPS = 2


class Convolved(nn.Module):
    """A part between two convolutions. Parameters are named as in the official code. group: channels that share `own`."""

    def __init__(self, width: int, group: int) -> None:
        super().__init__()
        if group < 1 or width % group:
            raise UserError(f"drafter.group is {group}; choose a divisor of the target's hidden size, {width}")
        self.group = group
        self.base_kernel = nn.Parameter(torch.zeros(2, TAPS, width))
        self.kernel_projection = nn.Linear(width, 2 * TAPS * (width // group), bias=False)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, x_SH: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """[..., S, H]: convolution, `part`, convolution."""
        kernel_SX = self.kernel_projection(x_SH).unflatten(-1, (2, TAPS, -1))
        kernels = [self.base_kernel[side] + kernel_SX[..., side, :, :].repeat_interleave(self.group, -1) for side in range(2)]
        return _mixed(part(_mixed(x_SH, kernels[0])), kernels[1])


class Bare(nn.Module):
    """The part without convolutions, in the place of `Convolved`."""

    def forward(self, x_SH: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        return part(x_SH)


def _mixed(x_SH: Tensor, kernel_SkH: Tensor) -> Tensor:
    previous_SH = F.pad(x_SH[..., :-1, :], (0, 0, 1, 0))
    return kernel_SkH[..., 0, :] * x_SH + kernel_SkH[..., 1, :] * previous_SH
