"""The states of a model's recurrent layers, for each slot: a summary of its committed positions. Short convolutions.

Unlike keys and values, a state cannot be cut back. A pass therefore starts from the committed states and does not change them.
It records the inputs of its scans (`Tape`). After acceptance each row's scan runs again over the accepted positions only.

Shapes: S slots, B rows in use, R any slots, N new positions, C channels of a convolution, W earlier columns that it sees,
T = W + N, P positions of a block, k taps, G groups of channels, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafttrain.core.errors import UserError

TAPS = 2


class Convolved(nn.Module):
    """A part of a layer between two convolutions, with weights that depend on the position's input.

    With two taps the part's input and output at position s are mixed with those at s - 1, channel by channel:

        y[s] = (base_0 + own_0[s]) x[s] + (base_1 + own_1[s]) x[s - 1]        x[-1] = 0: blocks do not mix

    `base` has a number for each channel and tap. `own` has one for each group of channels, from a linear map of the part's
    input. At the start base is (1, 0) and the map is zero, so that the convolution is the identity.

    Parameters are named as in the official code. group: channels that share `own`.
    """

    def __init__(self, width: int, group: int) -> None:
        super().__init__()
        if group < 1 or width % group:
            raise UserError(f"drafter.group is {group}; choose a divisor of the target's hidden size, {width}")
        self.group = group
        self.base_kernel = nn.Parameter(torch.zeros(2, TAPS, width))
        self.kernel_projection = nn.Linear(width, 2 * TAPS * (width // group), bias=False)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, x_PH: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """[..., P, H]: convolution, `part`, convolution."""
        kernel_P2kG = self.kernel_projection(x_PH).unflatten(-1, (2, TAPS, -1))
        kernels = [self.base_kernel[side] + kernel_P2kG[..., side, :, :].repeat_interleave(self.group, -1) for side in range(2)]
        return _mixed(part(_mixed(x_PH, kernels[0])), kernels[1])


class Bare(nn.Module):
    """The part without convolutions, in the place of `Convolved`."""

    def forward(self, x_PH: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        return part(x_PH)


def _mixed(x_PH: Tensor, kernel_PkH: Tensor) -> Tensor:
    previous_PH = F.pad(x_PH[..., :-1, :], (0, 0, 1, 0))
    return kernel_PkH[..., 0, :] * x_PH + kernel_PkH[..., 1, :] * previous_PH


KERNELS = ("fla", "mamba_ssm")  # packages whose scans transformers prefers to its own


class UnknownScanError(UserError):
    """A recurrent layer computes its state in a way that is not recorded."""


class Tape(Protocol):
    """The inputs of one layer's scan over N positions."""

    def after(self, count_B: Tensor) -> Tensor:
        """Each row's state after its first `count` positions."""
        ...


@dataclass
class _Pass:
    """What one layer has done since the last commit."""

    column_BCT: Tensor  # the convolution's inputs, the earlier W first
    state: Tensor | None = None  # after all new positions; None: the layer has only a convolution
    tape: Tape | None = None  # None: a single position, which needs no second scan


States = dict[int, tuple[Tensor, Tensor | None]]  # by layer: convolution [B, C, W], state of the scan [B, ...]


class RecurrentStates:
    """States of `slots` requests and a padding slot. Memory is allocated layer by layer, at its first write or `allocate`."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._slots, self._device = slots + 1, device
        self._convolution: dict[int, Tensor] = {}  # [S, C, W]
        self._scan: dict[int, Tensor] = {}  # [S, ...]
        self._passes: dict[int, _Pass] = {}
        self._slot_B = torch.arange(slots, device=device)

    @property
    def bytes_per_slot(self) -> int:
        stores = [*self._convolution.values(), *self._scan.values()]
        return sum(store.nbytes for store in stores) // self._slots

    @property
    def recorded(self) -> bool:
        """Whether a pass is waiting for its commit."""
        return bool(self._passes)

    def rows(self, slot_B: Tensor) -> None:
        self._slot_B = slot_B

    def allocate(self, layer: int, convolution: Tensor | None, scan: Tensor | None) -> None:
        """Reserve zero states of these tensors' shapes, less their first dimension, and dtypes."""
        for stores, template in ((self._convolution, convolution), (self._scan, scan)):
            if template is not None and layer not in stores:
                stores[layer] = torch.zeros(self._slots, *template.shape[1:], dtype=template.dtype, device=self._device)

    def like(self) -> States:
        """Empty tensors of the states' shapes, [0, ...], for `allocate`."""
        return {
            layer: (conv[:0], self._scan[layer][:0] if layer in self._scan else None)
            for layer, conv in self._convolution.items()
        }

    # -- a pass

    def begin(self) -> None:
        """A pass begins; one that was never committed is forgotten."""
        self._passes.clear()

    def convolution_inputs(self, layer: int, new_BCN: Tensor, window: int) -> Tensor:
        """[B, C, W + N] inputs of a convolution that sees `window` = W + 1 columns: the committed ones and these."""
        if layer not in self._convolution:
            self.allocate(layer, new_BCN.new_empty(1, new_BCN.shape[1], window - 1), None)
        column_BCT = torch.cat([self._convolution[layer][self._slot_B], new_BCN], 2)
        self._passes[layer] = _Pass(column_BCT)
        return column_BCT

    def scan_state(self, layer: int) -> Tensor | None:
        """A copy of the rows' committed states; None before any was written."""
        store = self._scan.get(layer)
        return None if store is None else store[self._slot_B]

    def record(self, layer: int, tape: Tape | None) -> None:
        self._passes[layer].tape = tape

    def finish(self, layer: int, state: Tensor) -> None:
        """The layer's state after all new positions."""
        self.allocate(layer, None, state)
        self._passes[layer].state = state

    # -- after acceptance

    def after(self, count_B: Tensor, counts: Sequence[int] | None = None) -> States:
        """The rows' states after the first `count` positions of the last pass. counts: the same, if the host knows them."""
        return {layer: self._after(layer, run, count_B, counts) for layer, run in self._passes.items()}

    def _after(self, layer: int, run: _Pass, count_B: Tensor, counts: Sequence[int] | None) -> tuple[Tensor, Tensor | None]:
        width = self._convolution[layer].shape[2]
        new_columns = run.column_BCT.shape[2] - width
        all_accepted = counts is not None and all(count == new_columns for count in counts)
        if all_accepted:
            return run.column_BCT[..., new_columns:], run.state
        index_BCW = (count_B[:, None] + torch.arange(width, device=count_B.device))[:, None].expand(
            -1, run.column_BCT.shape[1], -1
        )
        columns_BCW = run.column_BCT.gather(2, index_BCW)
        if run.state is None:
            return columns_BCW, None
        if run.tape is not None:
            return columns_BCW, run.tape.after(count_B)
        if new_columns > 1:
            kernel_packages = [name for name in KERNELS if find_spec(name)]
            kernel = f"a kernel of another package ({', '.join(kernel_packages)}), or a scan" if kernel_packages else "a scan"
            hint = "; uninstall the package" if kernel_packages else ""
            raise UnknownScanError(
                f"its recurrent layer {layer} runs {kernel} that is not recorded here, so that its state cannot be taken back "
                f"after rejected drafts{hint}"
            )
        committed_B = (count_B > 0).view(-1, *[1] * (run.state.ndim - 1))
        return columns_BCW, torch.where(committed_B, run.state, self._scan[layer][self._slot_B])

    def commit(self, count_B: Tensor, counts: Sequence[int] | None = None) -> None:
        """Keep the first `count` positions of the last pass; arguments as for `after`."""
        self.put(self._slot_B, self.after(count_B, counts))
        self._passes.clear()

    def put(self, slot_R: Tensor, states: States) -> None:
        """Write states of these slots."""
        for layer, (columns_RCW, scan) in states.items():
            self._convolution[layer][slot_R] = columns_RCW
            if scan is not None:
                self._scan[layer][slot_R] = scan.to(self._scan[layer].dtype)

    def take(self, slot_R: Tensor) -> States:
        """Copies of the committed states of these slots."""
        return {
            layer: (store[slot_R], self._scan[layer][slot_R] if layer in self._scan else None)
            for layer, store in self._convolution.items()
        }

    # -- slots

    def clear(self, slot_R: Tensor) -> None:
        for store in (*self._convolution.values(), *self._scan.values()):
            store[slot_R] = 0

    def copy(self, source: int, slot: int) -> None:
        for store in (*self._convolution.values(), *self._scan.values()):
            store[slot] = store[source]
