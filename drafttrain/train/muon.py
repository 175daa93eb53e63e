"""Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers") for matrices whose elements are divided among processes.

Momentum is element-wise and stays with its elements. For orthogonalisation, one process gathers a whole matrix in bfloat16 (the
dtype that torch computes in), and every process gets the update of its elements back. N processes take N matrices at a time.
Matrices of similar size go together, so that no process waits and each holds at most one whole matrix. The orthogonalisation
functions are torch's: for a matrix in a single process, results are bit for bit those of torch.optim.Muon.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _adjust_lr, _zeropower_via_newtonschulz

MOMENTUM = 0.95


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix, and the elements of it that each process steps."""

    shape: tuple[int, ...]
    owner: Tensor  # a parameter of the optimiser that contains this process's elements
    offset: int  # of this process's elements in `owner`
    parts: tuple[range, ...]  # by rank, elements of the flattened matrix: all of them on every process, or a part on each

    @property
    def replicated(self) -> bool:
        return all(len(span) == math.prod(self.shape) for span in self.parts)


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum, steps scaled to AdamW's (arXiv 2502.16982, section 2.2), and decoupled weight decay."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, weight_decay: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self.found_inf: Tensor | None = None  # on the device: where it is not 0, a step changes nothing, as in torch's AdamW
        matrices = [p for group in self.param_groups for p in group["params"]]
        self.spread([Matrix(tuple(p.shape), p, 0, (range(p.numel()),)) for p in matrices], 0)

    def spread(self, matrices: Sequence[Matrix], rank: int, device: torch.device | None = None) -> None:
        """Set where the elements of the matrices are, before the first step. All processes list the same matrices in order.

        device: of orthogonalisation and exchange; None: that of the elements.
        """
        assert all(m.replicated or sum(map(len, m.parts)) == math.prod(m.shape) for m in matrices)
        self._rank, self._device = rank, device
        self._matrices = sorted(matrices, key=lambda m: (max(m.shape) * min(m.shape) ** 2, m.shape), reverse=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all groups. All processes call it together, with the same matrices. `params` are owners of matrices."""
        assert closure is None, "DeepSpeed steps without one"
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for p in parameters:
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                momentum = state["momentum_buffer"]
                momentum.lerp_(self._unless_refused(p.grad, momentum), 1 - MOMENTUM)
                decay_factor = 1 - group["lr"] * group["weight_decay"]
                p.mul_(decay_factor if self.found_inf is None else torch.where(self.found_inf > 0, 1.0, decay_factor))
            stepped_ids = {id(p) for p in parameters}
            matrices = [m for m in self._matrices if id(m.owner) in stepped_ids]
            processes = len(matrices[0].parts) if matrices else 1
            for start in range(0, len(matrices), processes):
                self._step_together(matrices[start : start + processes], group["lr"])

    def _step_together(self, matrices: Sequence[Matrix], lr: float) -> None:
        """Step at most one matrix per process. Each process orthogonalises the matrix of its rank."""
        local_matrix = matrices[self._rank] if self._rank < len(matrices) else None
        direction = self._whole(matrices, local_matrix)
        chunks: list[Tensor] = []
        if local_matrix is not None:
            coefficients = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
            orthogonal = _zeropower_via_newtonschulz(
                direction.view(local_matrix.shape), coefficients, DEFAULT_NS_STEPS, EPS
            ).reshape(-1)
            chunks = [orthogonal[span.start : span.stop] for span in local_matrix.parts]
        updates = self._exchange(chunks, [len(m.parts[self._rank]) for m in matrices], len(matrices[0].parts))
        for matrix, update in zip(matrices, updates, strict=False):
            elements = self._own(matrix, matrix.owner)
            rate = _adjust_lr(lr, "match_rms_adamw", torch.Size(matrix.shape))
            update = self._unless_refused(update, torch.zeros_like(update))
            elements.add_(update.to(elements.device), alpha=-rate)

    def _unless_refused(self, x: Tensor, fallback: Tensor) -> Tensor:
        return x if self.found_inf is None else torch.where(self.found_inf > 0, fallback, x)

    def _whole(self, matrices: Sequence[Matrix], local_matrix: Matrix | None) -> Tensor:
        """The whole flattened matrix of this process's rank; empty if there is none."""
        if all(m.replicated for m in matrices):
            return self._empty(0) if local_matrix is None else self._direction(local_matrix)
        lengths = [] if local_matrix is None else [len(span) for span in local_matrix.parts]
        chunks = self._exchange([self._direction(m) for m in matrices], lengths, len(matrices[0].parts))
        full_direction = self._empty(sum(lengths))
        for destination, chunk in zip(() if local_matrix is None else local_matrix.parts, chunks, strict=False):
            full_direction[destination.start : destination.stop] = chunk
        return full_direction

    def _direction(self, matrix: Matrix) -> Tensor:
        """This process's elements of the gradient with Nesterov momentum."""
        assert matrix.owner.grad is not None
        momentum = self.state[matrix.owner]["momentum_buffer"]
        direction = self._own(matrix, matrix.owner.grad).lerp(self._own(matrix, momentum), MOMENTUM)
        return direction.to(self._device, torch.bfloat16)

    def _own(self, matrix: Matrix, tensor: Tensor) -> Tensor:
        return tensor.view(-1)[matrix.offset : matrix.offset + len(matrix.parts[self._rank])]

    def _exchange(self, chunks: Sequence[Tensor], lengths: Sequence[int], processes: int) -> list[Tensor]:
        """All-to-all: send part k to process k, and receive lengths[k] elements from it. Missing parts are empty."""
        if processes == 1:
            return list(chunks)
        send_sizes = [len(chunk) for chunk in chunks] + [0] * (processes - len(chunks))
        receive_sizes = [*lengths, *[0] * (processes - len(lengths))]
        buffer = self._empty(sum(receive_sizes))
        torch.distributed.all_to_all_single(buffer, torch.cat([self._empty(0), *chunks]), receive_sizes, send_sizes)
        return list(buffer.split(receive_sizes))

    def _empty(self, length: int) -> Tensor:
        return torch.empty(length, dtype=torch.bfloat16, device=self._device)
