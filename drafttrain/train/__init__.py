"""Training: the loop, the DeepSpeed engine, checkpoints of a run, telemetry and loggers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from drafttrain.core.limits import above, at_least, choice, within
from drafttrain.model.lora import LoraOptions

OPTIMIZERS = ("adamw", "muon")
TRACKER_NAMES = ("tensorboard", "mlflow", "trackio")  # loggers beside W&B


@dataclass
class TrainOptions:
    """The optimisation. Batch sizes are in sequences."""

    steps: int = at_least(400, 1)  # at most
    exact_steps: bool = False  # `steps` whatever the data are, which still settle the batch. Typing train.steps sets it
    epochs: float | None = above(None, 0)  # passes over the training data, if these are fewer steps; null: `steps` alone counts
    least_steps: int | None = None  # with epochs: if they are fewer steps than this, the batch is halved, to 4 at least
    global_batch: int = at_least(8, 1)  # per optimiser step: over all processes and accumulation steps
    # at most, per process and forward pass; lowered to a divisor of a process's share of global_batch
    micro_batch: int = at_least(8, 1)
    sequence_parallel: int = at_least(1, 1)  # processes that split each sequence; each holds an equal part of its positions
    lr: float = 1e-3
    # hidden size from which `lr` is meant; a narrower target's is lr * lr_width / hidden size, a halved batch's lr / sqrt 2
    lr_width: int | None = at_least(None, 1)
    betas: tuple[float, float] = at_least((0.9, 0.95), 0, below=1)
    weight_decay: float = 0.0
    optimizer: str = choice(*OPTIMIZERS)  # muon: for hidden matrices; AdamW for the other parameters
    clip: float = 1.0  # gradient norm
    # steps in a row without a finite gradient, which change nothing, after which the run stops
    bad_steps: int = at_least(10, 1)
    schedule: str = choice("cosine", "wsd", "constant")
    warmup: float = 0.1  # share of the steps
    decay: float = 0.2  # wsd: share of the steps, at the end
    min_lr: float = 0.0  # learning rate at the end, as a share of lr
    precision: str = choice("float32", "bfloat16", "auto")  # of the drafter; auto: bfloat16 on a GPU
    activation_checkpointing: bool = False  # recompute layers for the gradient: less memory, more time
    # on: torch.compile of the drafter's layers, or a line that says why not. Not with ZeRO stage 3
    compile: str = choice("off", "on")
    # share of a batch's conversations whose reply the drafter's own model writes (arXiv 2306.13649)
    on_policy: float = within(0.0, 0, 1)
    on_policy_temperature: float = at_least(1.0, 0)
    seed: int = 0
    init: str | None = None  # a checkpoint or published drafter of the same family; training starts from its weights
    lora: LoraOptions = field(default_factory=LoraOptions)  # needs init: train matrices on the drafter, whose weights stay
    log_every: int = at_least(10, 1)
    checkpoint_every: int = at_least(200, 1)
    keep_last: int = at_least(2, 1)  # checkpoints to keep, plus the best by expected tau on the held-out conversations
    per_rank: bool = False  # also log the cost of a step in each process, every log_every steps
    profile: Any = False  # true: write a Chrome trace of some steps to the run directory; [first, last]: of these steps
    # seconds without a step after which every process writes its stacks, and several processes end; 0: never
    hang_timeout: float = at_least(1800.0, 0)


@dataclass
class DeepSpeedOptions:
    """DeepSpeed's configuration."""

    zero_stage: int = choice(0, 1, 2, 3)
    offload_optimizer: bool = False  # needs ZeRO stage 1 or higher
    offload_parameters: bool = False  # needs ZeRO stage 3
    extra: dict[str, Any] = field(default_factory=dict)  # further DeepSpeed settings; they override ours


@dataclass
class LoggerOptions:
    """Where metrics go, in addition to the console and metrics.jsonl."""

    name: str = choice("wandb", *TRACKER_NAMES, "none")
    also: list[str] = choice([], "wandb", *TRACKER_NAMES, "none")  # further ones of the same names
    project: str = "drafttrain"
    entity: str | None = None
    group: str | None = None  # null: the recipe and the target
    mode: str = choice("auto", "online", "offline")  # of W&B; auto: online when logged in, else offline
    finish_timeout: float = 600.0  # seconds to wait at the end until they have everything; 0: without a limit
    # checkpoints and exports as artifacts of W&B: none | reference (paths only) | files (uploaded)
    artifacts: str = choice("none", "reference", "files")
