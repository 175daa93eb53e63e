"""The memory floor of a decode step on a GPU: the bytes that it must read, divided by the measured bandwidth."""

from __future__ import annotations

from time import perf_counter

import torch

from drafttrain.decoding.decoder import Decoded
from drafttrain.model.shapes import TargetShape
from drafttrain.targets.hf import CacheBytes


def step_floor(cache: CacheBytes, wave: Decoded, device: torch.device) -> float | None:
    """Least seconds of one decode step: it reads the weights of all its products, counted when its graph was captured, and the
    batch's KV cache at half of its final length.

    Recurrent states are read and written. None for steps that no graph holds, and on a CPU.
    """
    if device.type != "cuda" or not wave.costs.weight_bytes:
        return None
    positions = sum(r.prompt_tokens + len(r.tokens) / 2 for r in wave.results)
    states = 2 * cache.states * len(wave.results)
    weights = wave.costs.weight_bytes / wave.costs.steps
    return (weights + cache.position * positions + states) / copy_bandwidth(device)


def kv_bytes(shape: TargetShape, dtype: torch.dtype, positions: float) -> float:
    """Bytes of the keys and values of this many positions, in all blocks."""
    return 2 * shape.blocks * shape.kv_heads * shape.head_dim * dtype.itemsize * positions


def copy_bandwidth(device: torch.device, size: int = 1 << 30, repeats: int = 10) -> float:
    """Bytes read and written per second by a device-to-device copy of `size` bytes."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    copy.copy_(source)
    torch.cuda.synchronize(device)
    start_time = perf_counter()
    for _ in range(repeats):
        copy.copy_(source)
    torch.cuda.synchronize(device)
    return 2 * size * repeats / (perf_counter() - start_time)
