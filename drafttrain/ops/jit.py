"""When Triton kernels run: on CUDA if Triton is installed, and on a CPU in Triton's interpreter, for tests."""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec

from torch import Tensor

from drafttrain.ops import library


def serves(x: Tensor) -> bool:
    """Whether Triton kernels run on this tensor's device. The operator checks the dtype."""
    if os.environ.get(library.SWITCH) == "off" or not installed():
        return False
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def state() -> str:
    """Text for the user: which code computes tree attention and the training loss, and why."""
    if os.environ.get(library.SWITCH) == "off":
        return f"torch references ({library.SWITCH}=off)"
    if not installed():
        return "torch references (triton is not installed)"
    return f"triton {version('triton')}: compiles at first use on a GPU"


@cache
def installed() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None
