"""Which GPU is this process's own, and making it the one that everything of this process runs on.

A collective, an allocation or a kernel that names no device uses the current one, the first GPU until `bind` has been called.
Processes that do so before they are bound meet on that GPU: a context of each takes its memory, and NCCL refuses the group.
"""

from __future__ import annotations

import os

import torch

from drafttrain.core.errors import UserError

NUMBER = "DRAFTTRAIN_LOCAL_RANK"  # LOCAL_RANK as the launcher set it


def own_gpu() -> int:
    """The number of this process's GPU among those it sees: LOCAL_RANK, or 0 where each process is shown one of its own.

    Raises UserError when LOCAL_RANK is missing, and when it names no GPU.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several and "LOCAL_RANK" not in os.environ:
        raise UserError(
            "WORLD_SIZE is set, LOCAL_RANK is not, which numbers the processes of a machine and with them its GPUs; start them "
            "with torchrun or launcher.nproc, or set it"
        )
    index, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    shown = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if index < there:
        return index
    if there == len(shown) == 1:
        return 0
    raise UserError(
        f"LOCAL_RANK is {index}, this process sees {there} GPU{'' if there == 1 else 's'}; start as many processes on a "
        "machine as it has GPUs, by launcher.nproc or torchrun's --nproc-per-node, or set target.device=cpu"
    )


def device_of(name: str) -> torch.device:
    """auto: this process's own GPU where there is one, else the CPU. cuda: this process's own GPU.

    Raises UserError for a device that is not there, and for one GPU that several processes were to share.
    """
    if name == "auto":
        return torch.device("cuda", own_gpu()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"target.device is {name!r}; choose auto, cpu or cuda[:n]") from error
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise UserError(f"target.device is {name!r} but no CUDA device is available; set target.device=auto")
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if device.index is None or (several and device.index == own_gpu()):
        return torch.device("cuda", own_gpu())
    if several:
        raise UserError(f"target.device is {name!r}, each of several processes needs its own GPU; set target.device=auto")
    if device.index >= (there := torch.cuda.device_count()):
        raise UserError(f"target.device is {name!r}, this process sees {there} GPUs; set target.device=auto")
    return device


def bind(device: torch.device) -> None:
    """Make this the process's current device, before anything else touches a GPU. Nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def number_by_gpu(device: torch.device) -> None:
    """Make LOCAL_RANK the number of this process's GPU, which DeepSpeed takes it for while it starts and while it trains. It is
    another one where each process is shown one GPU, and where a lone process has named its own.
    """
    if device.type == "cuda":
        os.environ.setdefault(NUMBER, os.environ.get("LOCAL_RANK", "0"))
        os.environ["LOCAL_RANK"] = str(device.index)


def first_of_machine() -> bool:
    """Whether this process is the first of those that a launcher has started on its machine."""
    return os.environ.get(NUMBER, os.environ.get("LOCAL_RANK")) == "0"
