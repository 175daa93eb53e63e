"""Floor 4: the memory floor of a decode step: bytes that must be read / measured copy bandwidth. On a GPU only."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import nn

from drafttrain.speculate import Decoded
from drafttrain.target import TargetShape


def step_floor(
    modules: Sequence[nn.Module], shape: TargetShape, dtype: torch.dtype, wave: Decoded, device: torch.device
) -> float | None:
    """Seconds that one step must take at least: all weights once and the batch's KV at half of its output; None on a CPU."""
    if device.type != "cuda":
        return None
    weights = sum(p.numel() * p.element_size() for m in modules for p in m.parameters())
    positions = sum(r.prompt_tokens + len(r.tokens) / 2 for r in wave.results)
    cached = 2 * shape.blocks * shape.kv_heads * shape.head_dim * dtype.itemsize * positions
    return (weights + cached) / copy_bandwidth(device)


def copy_bandwidth(device: torch.device, size: int = 1 << 30, repeats: int = 10) -> float:
    """Bytes read and written per second by a device-to-device copy of `size` bytes."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    copy.copy_(source)
    torch.cuda.synchronize(device)
    began = perf_counter()
    for _ in range(repeats):
        copy.copy_(source)
    torch.cuda.synchronize(device)
    return 2 * size * repeats / (perf_counter() - began)
