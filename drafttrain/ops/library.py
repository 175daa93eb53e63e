"""The compiled operators: one shared library through torch's stable ABI, built once per machine and kept in a cache.

Where it cannot be built, every operation runs as its plain-torch twin; `state()` says which, and why.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

SWITCH = "DRAFTTRAIN_KERNELS"  # "off": plain torch only
COMPILERS = ("g++", "c++", "clang++")
DTYPES = (torch.float32, torch.bfloat16)
FLAGS = [
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-std=c++20",
    "-fPIC",
    "-shared",
    "-Wno-psabi",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
]


@dataclass(frozen=True, slots=True)
class State:
    """loaded: whether the operators are there. text: for a person, what runs and why."""

    loaded: bool
    text: str


def serves(x: Tensor) -> bool:
    """Whether the compiled operators take this tensor; they have no gradient."""
    return x.device.type == "cpu" and x.dtype in DTYPES and not torch.is_grad_enabled() and state().loaded


@cache
def state() -> State:
    """Load the operators, building them first where this machine has not yet; says on stderr that it builds."""
    if os.environ.get(SWITCH) == "off":
        return State(False, f"torch references ({SWITCH}=off)")
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        return State(False, f"torch references (no C++ compiler: none of {', '.join(COMPILERS)} found)")
    try:
        library = _built(compiler)
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        detail = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        return State(False, f"torch references ({compiler} could not build the operators: {_first_error(detail)})")
    apart = "" if torch.ops.drafttrain.has_product() else "; block by block: this torch does not export oneDNN's product"
    return State(True, f"compiled for this CPU ({library}){apart}")


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


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drafttrain"


def _built(compiler: str) -> Path:
    """The library of these sources, this compiler, this processor and this torch; compiled aside, then renamed into place."""
    source = Path(str(files("drafttrain.kernels")))
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    parts = [version, torch.__version__, _processor(), *FLAGS]
    parts += [path.read_text(encoding="utf-8") for path in sorted(source.glob("**/*")) if path.suffix in (".h", ".cpp")]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    library = cache_folder() / "kernels" / name / "drafttrain_ops.so"
    if library.exists():
        return library
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print("building the CPU operators: once, about ten seconds", file=sys.stderr, flush=True)
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made, torch_folder = Path(folder) / library.name, Path(torch.__file__).parent
        command = [compiler, *FLAGS, f"-I{torch_folder / 'include'}", str(source / "csrc" / "ops.cpp"), "-o", str(made)]
        command += [f"-L{torch_folder / 'lib'}", "-Xlinker", "--no-as-needed", "-ltorch_cpu"]
        subprocess.run(command, capture_output=True, text=True, check=True)
        os.replace(made, library)
    return library


def _processor() -> str:
    """What -march=native sees: a cache in a shared home must not serve another kind of machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}))


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")[:200]
