"""A hash that identifies a model's weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

SAMPLES = 64  # values read per parameter: cheap at 70B, and a training step changes nearly all of them
SMALLEST = 2.0**-14  # float16's smallest normal number: smaller values differ in a float16 copy


def fingerprint_of(model: nn.Module, whole: Callable[[nn.Parameter], AbstractContextManager[Any]] = nullcontext) -> str:
    """sha256, in hexadecimal, over parameter names, shapes and an evenly strided sample of their values.

    Samples are rounded to bfloat16, and tiny ones to zero, so that the same weights have the same hash in every dtype. float32
    and bfloat16 always agree; float16 agrees unless the weights were stored in float32. whole: a context in which a sharded
    parameter has all its values.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        with whole(parameter):
            digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
            digest.update(_sample(parameter.detach()))
    return digest.hexdigest()


def _sample(value: Tensor) -> bytes:
    flat = value.reshape(-1)
    sample = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].cpu()
    if not sample.is_floating_point():  # quantised weights: their bytes are their values
        return sample.contiguous().view(torch.uint8).numpy().tobytes()
    rounded = sample.bfloat16()  # before the threshold: a value may round up to it
    return torch.where(rounded.abs() < SMALLEST, torch.zeros_like(rounded), rounded).view(torch.int16).numpy().tobytes()
