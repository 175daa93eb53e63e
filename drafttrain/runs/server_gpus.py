"""Which GPUs of a machine are its servers' of states, and how many processes train on the others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafttrain.core.errors import UserError
from drafttrain.features import FeatureOptions
from drafttrain.runs.options import RunOptions


@dataclass(frozen=True, slots=True)
class ServerGpus:
    """The GPUs of each server of a machine, as CUDA_VISIBLE_DEVICES names them; empty: it has none for itself."""

    of_servers: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        """As in `2 servers, on the GPUs 4, 5 and on the GPUs 6, 7`."""
        count = len(self.of_servers)
        number = f"{count} server{'' if count == 1 else 's'}"
        if not self.of_servers[0]:
            return number
        gpu_lists = [f"the GPU{'' if len(gpus) == 1 else 's'} {', '.join(gpus)}" for gpus in self.of_servers]
        return f"{number}, on {' and on '.join(gpu_lists)}"


def visible_gpus() -> list[str]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    count, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(count)] if visible is None else [name.strip() for name in visible.split(",")]
    return names[:count]


def servers_next_to_trainers(features: FeatureOptions, gpus: Sequence[str], trainers: int) -> ServerGpus:
    """Servers on a machine that trains too. They have its last GPUs. gpus: of the machine. trainers: GPUs that training uses.

    Raises UserError where there are fewer GPUs.
    """
    if not features.gpus:
        return ServerGpus(((),) * (features.count or 1))
    check_gpus(features, gpus, trainers)
    return _divided(features, gpus[-features.gpus :])


def servers_alone(features: FeatureOptions, gpus: Sequence[str]) -> ServerGpus:
    """Servers on a machine that does not train. They have all of its GPUs, or the last `features.gpus`.

    Raises UserError where there are fewer GPUs.
    """
    if not gpus and not features.gpus:
        return ServerGpus(((),) * (features.count or 1))
    gpu_count = features.gpus or (features.count or 0) * features.tensor_parallel
    gpu_count = gpu_count or len(gpus) - len(gpus) % features.tensor_parallel
    if not features.tensor_parallel <= gpu_count <= len(gpus):
        raise UserError(
            f"the servers need {max(gpu_count, features.tensor_parallel)} GPUs by features.gpus={features.gpus} and "
            f"features.tensor_parallel={features.tensor_parallel}, but their machine has {len(gpus)}; set fewer"
        )
    return _divided(features, gpus[-gpu_count:])


def check_gpus(features: FeatureOptions, gpus: Sequence[str], trainers: int) -> None:
    """Raise UserError where a machine has fewer GPUs than `trainers` and its servers use together."""
    if features.gpus + trainers > len(gpus):
        requirement = f"features.gpus={features.gpus}"
        requirement += f" and {trainers} training process{'' if trainers == 1 else 'es'}" if trainers else ""
        raise UserError(
            f"{requirement} need {features.gpus + trainers} GPUs, but this machine has {len(gpus)}; set features.gpus or "
            "launcher.nproc lower"
        )


def gpus_next_to_trainers(options: RunOptions) -> int:
    """GPUs of each machine of trainers that its servers have for themselves."""
    features = options.features
    return features.gpus if features.name == "engine" and not features.nodes and not features.servers else 0


def processes_of(options: RunOptions) -> int:
    """The number of training processes by `launcher.nproc=auto`: one for each GPU of this machine that no server has."""
    if options.target.device == "cpu":
        return 1
    gpus, servers = visible_gpus(), gpus_next_to_trainers(options)
    if servers:
        check_gpus(options.features, gpus, 1)
    return max(1, len(gpus) - servers)


def _divided(features: FeatureOptions, gpus: Sequence[str]) -> ServerGpus:
    gpus_per_server = features.tensor_parallel
    return ServerGpus(tuple(tuple(gpus[i : i + gpus_per_server]) for i in range(0, len(gpus), gpus_per_server)))
