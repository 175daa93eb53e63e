"""The compiled operators, loaded once a process: for the CPU at the first use there, for a GPU at the first use there.

Where they cannot be built, every operation runs as its plain-torch twin; `state()` and `cuda_state()` say which, and why.
"""

from __future__ import annotations

import os
import subprocess
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from drafttrain.ops import build

SWITCH = "DRAFTTRAIN_KERNELS"  # "off": plain torch only
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class State:
    """loaded: whether the operators are there. text: for a person, what runs and why."""

    loaded: bool
    text: str


def serves(x: Tensor) -> bool:
    """Whether the compiled operators take this tensor; they have no gradient."""
    if x.dtype not in DTYPES or torch.is_grad_enabled():
        return False
    if x.device.type == "cpu":
        return state().loaded
    return x.device.type == "cuda" and cuda_state().loaded


@cache
def state() -> State:
    """Load the CPU operators, building them first where this machine has not yet; says on stderr that it builds."""
    if os.environ.get(SWITCH) == "off":
        return State(False, f"torch references ({SWITCH}=off)")
    compiler = build.compiler()
    if compiler is None:
        return State(False, f"torch references (no C++ compiler: none of {', '.join(build.COMPILERS)} found)")
    try:
        library = build.cpu_library(compiler)
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        return State(False, f"torch references ({compiler} could not build the operators: {_first_error(error)})")
    apart = "" if torch.ops.drafttrain.has_product() else "; block by block: this torch does not export oneDNN's product"
    return State(True, f"compiled for this CPU ({library}){apart}")


@cache
def cuda_state() -> State:
    """As `state`, for the CUDA kernels, tried out on the current device: the one that this process is bound to."""
    if not torch.cuda.is_available():
        return State(False, "no GPU")
    cpu = state()
    if not cpu.loaded:  # its library declares the operators
        return State(False, cpu.text)
    nvcc = build.nvcc()
    if nvcc is None:
        return State(False, "torch references (no nvcc: on PATH, under CUDA_HOME, or by pip install nvidia-cuda-nvcc)")
    try:
        library = build.cuda_library(nvcc, build.architectures())
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        _try_out(torch.device("cuda", torch.cuda.current_device()))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        return State(False, f"torch references ({nvcc} could not build kernels that run here: {_first_error(error)})")
    return State(True, f"CUDA kernels ({library})")


def state_on(device: torch.device) -> State:
    """What runs on this device."""
    return cuda_state() if device.type == "cuda" else state()


def _try_out(device: torch.device) -> None:
    """One kernel on this GPU, so that a binary that its driver refuses is known before the first step needs it."""
    x = torch.ones(1, 8, device=device)
    out = torch.zeros_like(x)
    torch.ops.drafttrain.rms_norm(x, None, torch.ones(8, device=device), 0.0, x, out)
    if not bool((out - 1.0).abs().max() < 1e-3):
        raise RuntimeError("a kernel ran and computed nothing")


class Kept:
    """Tensors that the compiled operators hold between calls, under `number`, until this object goes."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        none = torch.empty(0)
        self.number: int = torch.ops.drafttrain.keep_weights([none if t is None else t.detach() for t in tensors])
        weakref.finalize(self, torch.ops.drafttrain.drop_weights, self.number)


@cache
def has_product() -> bool:
    """Whether the compiled operators can call this torch's products with packed weights (`ops.linear.pack`)."""
    return state().loaded and bool(torch.ops.drafttrain.has_product())


def _first_error(error: Exception) -> str:
    text = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")[:200]
