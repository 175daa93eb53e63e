"""Commands on GPUs that are not there: `tests/standin` in every process that a test starts, and what it wrote of them."""

from __future__ import annotations

import json
import shutil
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.ops import build, library

STANDIN = Path(__file__).parent / "standin"
FLAGS = ("-O0", "-std=c++20", "-fPIC", "-w")
Line = list[Any]  # ranks of the group, operation, shapes, type


@cache
def device_library() -> Path:
    """Compiles at the first call (20 seconds) and keeps the binary where the compiled operators are kept."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++: there is no stand-in for a GPU")
    source = STANDIN / "device.cpp"
    built_for = f'-DBUILT_FOR="{torch.__version__}"'  # unlike our operators it is bound to one version of torch
    return build.compiled(compiler, [*FLAGS, built_for], [source], [source], "standin.so")


def environment(log: Path, devices: int = 2) -> dict[str, str]:
    """Variables under which a Python process sees `devices` GPUs. log: where collectives are written."""
    if torch.version.cuda is not None:
        pytest.skip("torch's CUDA build has devices of its own; the stand-in is for the CPU build")
    log.mkdir(parents=True, exist_ok=True)
    return {
        "STANDIN_LIBRARY": str(device_library()),
        "STANDIN_DEVICES": str(devices),
        "STANDIN_LOG": str(log),
        "PYTHONPATH": str(STANDIN),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cuda",  # what DeepSpeed finds by itself where a GPU has a device file
        library.SWITCH: "off",  # the kernels need a GPU
    }


def collectives(log: Path) -> list[list[Line]]:
    """Of every process in the order of its calls, by rank."""
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(log.glob("rank-*.jsonl"))]


def check_order(log: Path, size: int) -> list[Line]:
    """Assert that any two of `size` processes called what concerns both in one order; gives the first process's."""
    lines = collectives(log)
    assert len(lines) == size, f"{len(lines)} of {size} processes took part"
    for a, b in combinations(range(size), 2):
        both = [[line for line in lines[rank] if not line[0] or {a, b} <= set(line[0])] for rank in (a, b)]
        assert both[0] == both[1], first_difference(*both)
    return lines[0]


def first_difference(a: list[Line], b: list[Line]) -> str:
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"collective {at}: {a[at : at + 1]} on one process, {b[at : at + 1]} on another"
