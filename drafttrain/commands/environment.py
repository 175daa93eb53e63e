"""Floor 5: the machine and the versions that a figure was made with."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

PACKAGES = ("drafttrain", "torch", "transformers", "deepspeed")


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, processor, threads and device, as plain values for a report."""
    found: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found |= {"machine": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "device": str(device)}
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        found |= {"accelerator": card.name, "cuda": torch.version.cuda}
    return found
