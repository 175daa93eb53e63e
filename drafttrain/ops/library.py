"""The compiled operators, each library loaded once per process at its first use on a CPU or a GPU.

Where they cannot be built, every operator runs its plain-torch twin; `state()` and `cuda_state()` tell which and why.
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
    """Whether a library of operators is loaded."""

    loaded: bool
    text: str  # for the user: which code runs, and why


def serves(x: Tensor) -> bool:
    """Whether the compiled operators take this tensor. They have no gradient."""
    return x.dtype in DTYPES and serves_on(x.device)


def serves_on(device: torch.device) -> bool:
    """Whether the compiled operators take tensors of integers on this device, which are their inputs and outputs."""
    if torch.is_grad_enabled():
        return False
    if device.type == "cpu":
        return state().loaded
    return device.type == "cuda" and cuda_state().loaded


@cache
def state() -> State:
    """Load the CPU operators; build them first where needed, with a note on stderr."""
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
    remark = "" if torch.ops.drafttrain.has_product() else "; block by block: this torch does not export oneDNN's product"
    return State(True, f"compiled for this CPU ({library}){remark}")


@cache
def cuda_state() -> State:
    """Load the CUDA kernels, as `state` does, and try one on this process's current device."""
    if not torch.cuda.is_available():
        return State(False, "no GPU")
    if torch.version.hip is not None:  # torch calls AMD's GPUs `cuda` too
        return State(False, "torch references and Triton kernels (ROCm: the CUDA kernels are for NVIDIA's GPUs)")
    cpu = state()
    if not cpu.loaded:  # the CPU library declares the operators
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
    """The state of the operators for this device."""
    if device.type in ("cpu", "cuda"):
        return cuda_state() if device.type == "cuda" else state()
    return State(False, f"torch references (no operators for {device.type})")


def _try_out(device: torch.device) -> None:
    """Run one kernel on this GPU, so that a binary that the driver refuses is found before the first step."""
    x = torch.ones(1, 8, device=device)
    out = torch.zeros_like(x)
    torch.ops.drafttrain.rms_norm(x, None, torch.ones(8, device=device), 0.0, x, out)
    if not bool((out - 1.0).abs().max() < 1e-3):
        raise RuntimeError("a kernel ran and computed nothing")


class KeptWeights:
    """Tensors that the compiled operators keep between calls, under `number`, for the lifetime of this object."""

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
