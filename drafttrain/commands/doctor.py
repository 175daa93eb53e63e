"""`drafttrain doctor`: prints what this machine has, for bug reports and after installation."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HOME
from rich.console import Console
from rich.table import Table

from drafttrain.core.errors import UserError
from drafttrain.ops import build, jit, library
from drafttrain.runs.environment import versions
from drafttrain.train.wandb_run import logged_in, setting


def doctor(output: Path = Path("outputs")) -> int:
    """Print versions, devices, compilers, kernel backend, writable paths and W&B state, and return 0.

    Raises UserError, after printing, if `output` is not writable.
    """
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    sections = {
        "versions": {name: version or "not installed" for name, version in versions().items()},
        "devices": _devices(),
        "compilers": {name: _compiler(path) for name, path in (("c++", build.compiler()), ("nvcc", build.nvcc()))},
        "kernels": {"cpu": library.state().text, "gpu": library.cuda_state().text, "triton": jit.state()},
        "paths": {"output": _writable(output), "cache": _writable(Path(HF_HOME))},
        "W&B": {"state": _wandb_state()},
    }
    for title, rows in sections.items():
        table.add_row(f"[bold]{title}[/bold]", "", "")
        for name, text in rows.items():
            table.add_row("", name, text)
    Console().print(table)
    if not sections["paths"]["output"].endswith("writable"):
        raise UserError(f"cannot write to {sections['paths']['output']}; set output=DIR to a writable folder")
    return 0


def _devices() -> dict[str, str]:
    rows = {"cpu": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"}
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        rows[f"cuda:{index}"] = f"{card.name}, {card.total_memory / 2**30:.0f} GiB, sm_{card.major}{card.minor}"
    if len(rows) == 1:
        rows["cuda"] = "none found" if torch.version.cuda else "this torch is a CPU build"
    return rows


def _compiler(path: str | None) -> str:
    if path is None:
        return "not found"
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"release (\d[\d.]*)|(\d+\.\d[\d.]*)", answer.stdout)
    return f"{version[1] or version[2]} ({path})" if version else f"does not run ({path})"


def _writable(folder: Path) -> str:
    """Whether a folder is writable, tested with a temporary file in its nearest existing parent."""
    folder = folder.expanduser().absolute()
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            free = shutil.disk_usage(nearest).free / 2**30
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return f"{folder}: {free:.0f} GiB free, writable"


def _wandb_state() -> str:
    if mode := os.environ.get("WANDB_MODE"):
        return f"{mode} (WANDB_MODE)"
    if mode := setting("mode"):
        return f"{mode} (W&B's settings file)"
    if logged_in():
        return "logged in: runs go online"
    return "not logged in: runs stay offline (wandb login; wandb sync outputs/*/*/wandb/offline-run-* sends them later)"
