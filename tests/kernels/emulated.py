"""The CUDA kernels on a CPU: their very sources, compiled by g++ with `emulator.h` in place of CUDA, as torch operators.

`ops()` gives `torch.ops.drafttrain_emulated`; each takes CPU tensors and the arguments of the operator of that name.
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.ops import build

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"
FLAGS = ["-O1", "-std=c++20", "-fPIC", "-w", "-DDRAFTTRAIN_EMULATE", "-U_FORTIFY_SOURCE", f"-I{HERE}", "-x", "c++"]


@cache
def ops() -> Any:
    torch.ops.load_library(str(binary()))
    return torch.ops.drafttrain_emulated


def binary() -> Path:
    """Compiles at the first call (half a minute) and keeps the binary where the compiled operators are kept."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++: the CUDA kernels cannot be emulated")
    read = [*KERNELS.glob("**/*.*h"), *KERNELS.glob("csrc/cuda/*.cu"), HERE / "emulator.h"]
    return build.compiled(compiler, FLAGS, [HERE / "emulated.cpp"], read, "emulated.so")
