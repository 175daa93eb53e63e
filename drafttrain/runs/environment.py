"""The machine and the package versions of a run."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from drafttrain.ops import library

PACKAGES = ("drafttrain", "torch", "transformers", "datasets", "deepspeed", "peft", "wandb", "hydra-core")


def versions() -> dict[str, str | None]:
    """Versions by package; None for packages that are not installed."""
    package_versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            package_versions[package] = version(package)
        except PackageNotFoundError:
            package_versions[package] = None
    return package_versions


def processor() -> str:
    """The processor's name, from /proc/cpuinfo if it exists, else from Python."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    model_names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(model_names, platform.processor() or platform.machine())


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, processor, threads, operators and device, as plain values for the report."""
    info: dict[str, Any] = {**versions(), "platform": platform.platform()}
    info |= {"machine": platform.machine(), "processor": processor()}
    info |= {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "device": str(device)}
    info["operators"] = library.state_on(device).text
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        info |= {"accelerator": card.name, "cuda": torch.version.cuda}
    return info
