"""The memory floor of a decode step on a GPU: the bytes that it must read, divided by the measured copy bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor, nn

from drafttrain.decoding.decoder import Decoded
from drafttrain.model.shapes import TargetShape
from drafttrain.ops.quantised import stored_bytes
from drafttrain.targets.hf import CacheBytes


def step_floor(modules: Sequence[nn.Module], cache: CacheBytes, wave: Decoded, device: torch.device) -> float | None:
    """Least seconds of one decode step: it reads all weights once, and the batch's KV cache at half of its final length.

    Recurrent states are read and written. None on a CPU.
    """
    if device.type != "cuda":
        return None
    positions = sum(r.prompt_tokens + len(r.tokens) / 2 for r in wave.results)
    states = 2 * cache.states * len(wave.results)
    return (weight_bytes(*modules) + cache.position * positions + states) / copy_bandwidth(device)


def weight_bytes(*models: nn.Module) -> int:
    """Bytes of the weights that a step reads. A tensor that several modules share counts once.

    An embedding table counts only if it is an output matrix too: otherwise a step reads a few rows of it. Quantised weights
    count in their stored size. Of a model that is split among processes, this process's part counts. A drafter's weights count
    once, however many passes it runs: a cache may hold them.
    """
    read: dict[int, int] = {}
    for model in models:
        _count(model, None, read)
    return sum(read.values())


def _count(module: nn.Module, bits: int | None, read: dict[int, int]) -> None:
    """Add a module's weights to `read`: bytes by address. bits: width of linear layers that decoding quantises."""
    bits = getattr(module, "bits", None) or bits
    base = getattr(module, "base_layer", None)
    if isinstance(base, nn.Module):  # decoding merges low-rank adapters into it
        return _count(base, bits, read)
    if not isinstance(module, nn.Embedding):
        read |= {_address(p): p.numel() * p.element_size() for p in module.parameters(recurse=False)}
    if bits is not None and isinstance(module, nn.Linear):
        read[_address(module.weight)] = stored_bytes(module.out_features, module.in_features, bits)
    for child in module.children():
        _count(child, bits, read)


def _address(weight: Tensor) -> int:
    return weight.data_ptr() or id(weight)


def kv_bytes(shape: TargetShape, dtype: torch.dtype, positions: float) -> float:
    """Bytes of the keys and values of this many positions, in all blocks."""
    return 2 * shape.blocks * shape.kv_heads * shape.head_dim * dtype.itemsize * positions


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
