"""The training loop around one DeepSpeed engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainOptions:
    """The optimisation. Batches are counted in sequences; `global_batch` is over all processes and accumulation steps."""

    steps: int = 400
    global_batch: int = 8
    micro_batch: int = 8  # per process and forward pass at most; lowered to what divides a process's share of global_batch
    sequence_parallel: int = 1  # processes that hold each sequence together, an equal part of its positions each
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    optimizer: str = "adamw"  # adamw | muon: for hidden matrices, beside AdamW for all else
    clip: float = 1.0
    schedule: str = "cosine"  # cosine | wsd | constant
    warmup: float = 0.1  # share of the steps
    decay: float = 0.2  # wsd: share of the steps at the end
    min_lr: float = 0.0  # share of lr at the end
    precision: str = "float32"  # of the drafter: float32 | bfloat16
    activation_checkpointing: bool = False  # layers are computed again for the gradient: less memory, more time
    on_policy: float = 0.0  # share of a batch's conversations that get a reply by the drafter's own model (arXiv 2306.13649)
    on_policy_temperature: float = 1.0
    seed: int = 0
    init: str | None = None  # a checkpoint, or a published drafter, of the same family, whose weights training starts from
    log_every: int = 10
    checkpoint_every: int = 200
    keep_last: int = 2  # plus the best, by expected tau on the held-out conversations
    per_rank: bool = False  # log what a step cost in each process too, at log_every
    profile: Any = False  # true: some steps as a Chrome trace in the run directory; [first, last]: these steps
    hang_timeout: float = 1800.0  # seconds without a step after which every process writes its stacks; 0: never


@dataclass
class DeepSpeedOptions:
    """What goes into DeepSpeed's configuration; `extra` is merged over it as it is."""

    zero_stage: int = 0
    offload_optimizer: bool = False  # from ZeRO stage 1 on
    offload_parameters: bool = False  # at ZeRO stage 3
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class LoggerOptions:
    """Where metrics go beside the console and metrics.jsonl."""

    name: str = "wandb"  # wandb | none
    project: str = "drafttrain"
    entity: str | None = None
    group: str | None = None  # null: the recipe and the target
    mode: str = "auto"  # auto: online when logged in, else offline. online | offline
    artifacts: str = "none"  # checkpoints and exports at W&B: none | reference: their paths | files: uploaded
