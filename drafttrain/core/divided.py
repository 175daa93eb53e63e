"""Modules whose parameters ZeRO-3 divides among the processes (arXiv 1910.02054, section 5.3).

Each call of such a module gathers its parameters from all processes. So all processes must call them in the same order and
equally often, however many rows each of them has; otherwise they wait for each other, or take one parameter for another.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn


def is_part(parameter: Tensor) -> bool:
    """Whether ZeRO-3 has left this process a part of the parameter: it is whole only while a forward of its module runs."""
    return hasattr(parameter, "ds_id")


def divided(module: nn.Module) -> bool:
    """Whether ZeRO-3 has divided any of its parameters."""
    return any(map(is_part, module.parameters()))


def most_of_all(counts: Tensor) -> Tensor:
    """Each number's maximum over all processes. Every process calls it, with numbers of the same shape."""
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        counts = counts.clone()
        distributed.all_reduce(counts, distributed.ReduceOp.MAX)
    return counts


def pieces(module: nn.Module, rows: int, at_once: int, device: torch.device) -> list[slice]:
    """Slices of at most `at_once` rows; of a divided module as many in all processes: where rows are few the last are empty."""
    count = max(1, -(-rows // at_once))
    if divided(module):
        count = int(most_of_all(torch.tensor([count], device=device)))
    return [slice(min(rows, i * at_once), min(rows, (i + 1) * at_once)) for i in range(count)]
