"""Selects this process's GPU and makes it the device that everything in this process uses.

A collective, allocation or kernel without an explicit device uses the current device, which is GPU 0 until `bind` is called.
Processes that do this before `bind` all use GPU 0: each one's context takes memory there, and NCCL refuses the group.
"""

from __future__ import annotations

import os

import torch

from drafttrain.core.errors import UserError

NUMBER = "DRAFTTRAIN_LOCAL_RANK"  # keeps LOCAL_RANK as the launcher set it


def own_gpu() -> int:
    """Index of this process's GPU among the visible ones: LOCAL_RANK, or 0 where each process sees only its own GPU.

    Raises UserError when LOCAL_RANK is missing or names no GPU.
    """
    multi_process = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if multi_process and "LOCAL_RANK" not in os.environ:
        raise UserError(
            "WORLD_SIZE is set, LOCAL_RANK is not, which numbers the processes of a machine and with them its GPUs; start them "
            "with torchrun or launcher.nproc, or set it"
        )
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if index < count:
        return index
    if count == len(visible) == 1:
        return 0
    raise UserError(
        f"LOCAL_RANK is {index}, this process sees {count} GPU{'' if count == 1 else 's'}; start as many processes on a "
        "machine as it has GPUs, by launcher.nproc or torchrun's --nproc-per-node, or set target.device=cpu"
    )


def device_of(name: str) -> torch.device:
    """The device that a name selects. auto: this process's GPU if there is one, else the CPU. cuda: this process's GPU.

    Raises UserError for a device that does not exist, and for one GPU named for several processes.
    """
    if name == "auto":
        return torch.device("cuda", own_gpu()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"target.device is {name!r}; choose auto, cpu, cuda[:n] or xpu") from error
    if device.type == "mps":
        raise UserError(
            "target.device is mps, but Apple's GPUs have no float64, in which losses are added up and noise is drawn; set "
            "target.device=cpu"
        )
    if device.type == "cpu" or (device.type == "xpu" and torch.xpu.is_available()):
        return device
    if device.type != "cuda":
        raise UserError(f"target.device is {name!r}, which is not available here; choose auto, cpu, cuda[:n] or xpu")
    if not torch.cuda.is_available():
        raise UserError(f"target.device is {name!r} but no CUDA device is available; set target.device=auto")
    multi_process = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if device.index is None or (multi_process and device.index == own_gpu()):
        return torch.device("cuda", own_gpu())
    if multi_process:
        raise UserError(f"target.device is {name!r}, each of several processes needs its own GPU; set target.device=auto")
    if device.index >= (count := torch.cuda.device_count()):
        raise UserError(f"target.device is {name!r}, this process sees {count} GPUs; set target.device=auto")
    return device


def bind(device: torch.device) -> None:
    """Make this the process's current device. Call it before anything else uses a GPU. Does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def number_by_gpu(device: torch.device) -> None:
    """Set LOCAL_RANK to the index of this process's GPU, since DeepSpeed uses LOCAL_RANK as that index.

    The two differ where each process sees only one GPU, and where a single process was given a GPU by name.
    """
    if device.type == "cuda":
        os.environ.setdefault(NUMBER, os.environ.get("LOCAL_RANK", "0"))
        os.environ["LOCAL_RANK"] = str(device.index)


def first_of_machine() -> bool:
    """Whether this process is the first that a launcher started on its machine."""
    return os.environ.get(NUMBER, os.environ.get("LOCAL_RANK")) == "0"
