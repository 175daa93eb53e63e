"""Every operator once more under NVIDIA's compute-sanitizer: accesses out of bounds, and races in shared memory.

It runs in a separate process with small cases, because the tool slows kernels down a hundredfold.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import SMALL
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.results import Job, RedError, SkipError
from benchmarks.gpu.sources import ROOT
from benchmarks.gpu.trees import Heads

TOOLS = ("memcheck", "racecheck")
PATIENCE = 100.0  # seconds
CLEAN, DONE = "ERROR SUMMARY: 0 errors", "every case ran"
RACELESS = "RACECHECK SUMMARY: 0 hazards"


def tool() -> str | None:
    """Path of compute-sanitizer: on PATH, or in CUDA's folder."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    found = [shutil.which("compute-sanitizer"), *(str(Path(home, "bin", "compute-sanitizer")) for home in homes if home)]
    return next((path for path in found if path and os.access(path, os.X_OK)), None)


def sanitize(name: str, machine: Machine) -> dict[str, Any]:
    """Raises RedError for the tool's findings, SkipError where it is missing, refuses the device, or takes too long."""
    path = tool()
    if machine.rehearsal or path is None:
        raise SkipError("a rehearsal has no kernels for it" if machine.rehearsal else "compute-sanitizer is not installed")
    # errors of torch's own driver calls are ignored
    quiet = ["--report-api-errors", "no"] if name == "memcheck" else []
    command = [path, "--tool", name, *quiet, sys.executable, "-m", "benchmarks.gpu.sanitize"]
    # freed memory is returned at once; otherwise memory after a tensor might still be allocated
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise SkipError(f"not done in {PATIENCE:.0f} s") from error
    said = done.stdout + done.stderr
    if "Device not supported" in said or "not supported on this" in said:
        raise SkipError("compute-sanitizer does not support this device")
    if DONE not in said:
        raise RedError(f"the cases did not run to their end: {first_error(said)}")
    if CLEAN not in said and RACELESS not in said:
        raise RedError(first_error(said))
    return {}


def first_error(said: str) -> str:
    lines = [line.strip("= ").strip() for line in said.splitlines()]
    return next((line for line in lines if any(w in line for w in ("Invalid", "hazard", "Error", "error"))), "no message")[:200]


def jobs(machine: Machine) -> list[Job]:
    modules = tuple(sorted({module for case in SMALL for module in case.modules}))
    return [Job(f"compute-sanitizer {name}", "compute-sanitizer", modules, partial(sanitize, name, machine)) for name in TOOLS]


@torch.no_grad()
def main() -> int:
    """The work under the tool."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for case in (case for case in SMALL if not isinstance(case, Heads)):  # their products are cuBLAS's
        for dtype in case.dtypes:
            # made on the CPU, so that few kernels other than ours run under the tool
            given = case.inputs(dtype, torch.device("cpu"), seed=1)
            case.run({name: x.to(device) for name, x in given.items()})
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(DONE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
