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
ALL_TO_ALL, CAME, WENT = "all_to_all_single", 4, 5
Line = list[Any]  # ranks of the group, operation, shapes, type; of an all-to-all, rows that come from and go to each rank


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
        ours, theirs = ([line for line in lines[rank] if not line[0] or {a, b} <= set(line[0])] for rank in (a, b))
        same = [fits(x, y, a, b) for x, y in zip(ours, theirs, strict=False)]
        at = same.index(False) if False in same else len(same)
        assert at == len(ours) == len(theirs), f"collective {at}: {ours[at : at + 1]} on {a}, {theirs[at : at + 1]} on {b}"
    return lines[0]


def fits(ours: Line, theirs: Line, a: int, b: int) -> bool:
    """Whether process a called what b did. In an all-to-all each has numbers of rows of its own: what goes to a process must be
    what that one expects.
    """
    if ours[1] != ALL_TO_ALL or theirs[1] != ALL_TO_ALL:
        return ours == theirs
    alike = [(group, kind, [shape[1:] for shape in shapes]) for group, _, shapes, kind, *_ in (ours, theirs)]
    calls = {ours[0].index(a): ours, ours[0].index(b): theirs}
    return alike[0] == alike[1] and all(calls[x][CAME][y] == calls[y][WENT][x] for x in calls for y in calls)
