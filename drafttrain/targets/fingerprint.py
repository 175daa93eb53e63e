"""A hash that identifies a model's weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.ops.fp8 import Fp8Linear

SAMPLES = 64  # values read per parameter: cheap at 70B, and a training step changes nearly all of them
Samples = dict[str, tuple[tuple[int, ...], bytes]]  # by the parameter's name: `sampled`
SMALLEST = 2.0**-14  # float16's smallest normal number: smaller values differ in a float16 copy


def sampled_places(count: int) -> Tensor:
    """Places of the values that are read of a parameter of `count` values."""
    return torch.arange(0, count, _stride(count))[:SAMPLES]


def sample_of(parameter: nn.Parameter) -> tuple[tuple[int, ...], Tensor]:
    """(shape, sampled values) of a parameter that is whole."""
    flat = parameter.detach().reshape(-1)
    return tuple(parameter.shape), flat[:: _stride(flat.numel())][:SAMPLES]


def _stride(count: int) -> int:
    return max(1, count // SAMPLES)


def fingerprint_of(
    model: nn.Module,
    whole: Callable[[nn.Parameter], AbstractContextManager[Any]] = nullcontext,
    sample: Callable[[nn.Parameter], tuple[tuple[int, ...], Tensor]] = sample_of,
) -> str:
    """sha256, in hexadecimal, over parameter names, shapes and an evenly strided sample of their values.

    Samples are rounded to bfloat16, and tiny ones to zero, so that the same weights have the same hash in every dtype. float32
    and bfloat16 always agree; float16 agrees unless the weights were stored in float32. A weight in FP8 counts as the matrix
    that its codes stand for. whole: a context in which a sharded parameter has all its values. sample: reads a parameter, as
    `sample_of`.
    """
    samples: Samples = {}
    fp8 = {name: module for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[0] in fp8 and not name.endswith(".bias"):
            continue
        with whole(parameter):
            samples[name] = sampled(*sample(parameter))
    for name, module in fp8.items():
        samples[f"{name}.weight"] = sampled(tuple(module.code.shape), module.values(sampled_places(module.code.numel())))
    return fingerprint_from(samples)


def sampled(shape: tuple[int, ...], sample_S: Tensor) -> tuple[tuple[int, ...], bytes]:
    """What a fingerprint depends on, of one parameter: its shape, and the bytes of its rounded sample."""
    return shape, _bytes(sample_S.detach().cpu())


def fingerprint_from(found: Samples) -> str:
    """`fingerprint_of` a model with these parameters, which need not be in memory together."""
    digest = hashlib.sha256()
    for name, (shape, sample) in sorted(found.items()):
        digest.update(f"{name} {shape}\n".encode())
        digest.update(sample)
    return digest.hexdigest()


def _bytes(sample_S: Tensor) -> bytes:
    if not sample_S.is_floating_point():  # quantised weights: their bytes are their values
        return sample_S.contiguous().view(torch.uint8).numpy().tobytes()
    rounded_S = sample_S.bfloat16()  # before the threshold: a value may round up to it
    flushed_S = torch.where(rounded_S.abs() < SMALLEST, torch.zeros_like(rounded_S), rounded_S)
    return flushed_S.view(torch.int16).numpy().tobytes()
