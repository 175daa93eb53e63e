"""What a run trains: drafter, target, data and options, and how a checkpoint names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from drafttrain.data.dataset import Dataset
from drafttrain.drafters.checkpoint import (
    CheckpointMeta,
    TargetRecord,
    adapter_state,
)
from drafttrain.drafters.common.drafter_lora import name_in_checkpoint
from drafttrain.features.cached import Cached
from drafttrain.features.engine import EngineStates
from drafttrain.features.online import Online
from drafttrain.model.drafter import Drafter
from drafttrain.objective.lora_target import AdaptedObjective
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.targets.adapt import Adapter
from drafttrain.targets.frozen_ends import LoadedEnds
from drafttrain.targets.load import LoadedTarget
from drafttrain.train import DeepSpeedOptions, TrainOptions
from drafttrain.train.engine_measurement import OpenEngine


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """The drafter, target, data and options of a training run."""

    loaded: LoadedTarget
    drafter: Drafter
    family: str
    options: dict[str, Any]  # the family's options, for the checkpoint
    data: Dataset
    train: TrainOptions
    deepspeed: DeepSpeedOptions
    loss: LossOptions
    nodes: int | None  # node budget of a draft tree; None: the fastest on this machine
    adapter: Adapter | None = None  # of a target that is trained too
    start: dict[str, Tensor] | None = None  # initial weights, instead of the family's
    prefetch: bool = False
    features: Online | Cached | EngineStates | None = None  # source of the target's states; None: the target, in every step
    quick_measure: Callable[[Drafter], dict[str, float]] | None = None  # small measurement, on rank 0
    quick_measure_every: int = 0  # steps between small measurements; there is also one at each checkpoint
    open_engine: OpenEngine | None = None  # a serving engine that makes these measurements too
    best_by_engine: bool = False  # whether its tau chooses the best checkpoint
    ends: LoadedEnds | None = None  # of a target whose blocks are not in memory: `loaded`, and the rest of its checkpoint


def tensor_names(job: TrainingJob) -> dict[str, str]:
    """Names of the tensors in the engine's module, by their names in a checkpoint."""
    to_checkpoint_name = name_in_checkpoint if job.train.lora.rank else str
    drafter = {to_checkpoint_name(name): f"drafter.{name}" for name in job.drafter.state_dict()}
    return drafter | {name: name for name in adapter_state(job.adapter)}


def objective_of(job: TrainingJob) -> Objective:
    """The training objective; with an adapter, it trains the target too."""
    if job.adapter is not None:
        return AdaptedObjective(job.drafter, job.loaded.target, job.loss, job.adapter)
    return Objective(job.drafter, job.loaded.target, job.loss)


def meta_of(job: TrainingJob, step: int) -> CheckpointMeta:
    """The metadata of a checkpoint."""
    adapter = None if job.adapter is None else asdict(job.adapter.spec)
    lora = asdict(job.train.lora) if job.train.lora.rank else None
    settings, target = job.drafter.decode_settings(), TargetRecord.of(job.loaded)
    return CheckpointMeta(job.family, job.options, settings, target, step, adapter, lora=lora)
