"""Floor 5: everything one run is made of, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from drafttrain.data import DataOptions
from drafttrain.losses import LossOptions
from drafttrain.measure import DecodeOptions, MeasureOptions
from drafttrain.targets import TargetOptions
from drafttrain.train import DeepSpeedOptions, LoggerOptions, TrainOptions


@dataclass
class LauncherOptions:
    """name local: this process, or `nproc` of them started here when above 1. Under torchrun `nproc` stays 1."""

    name: str = "local"
    nproc: int = 1


@dataclass
class RunOptions:
    """The whole configuration of `fit` and `measure`, resolved. `drafter` is the family's own options object."""

    target: TargetOptions = field(default_factory=TargetOptions)
    drafter: Any = None
    data: DataOptions = field(default_factory=DataOptions)
    loss: LossOptions = field(default_factory=LossOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    deepspeed: DeepSpeedOptions = field(default_factory=DeepSpeedOptions)
    decode: DecodeOptions = field(default_factory=DecodeOptions)
    measure: MeasureOptions = field(default_factory=MeasureOptions)
    logger: LoggerOptions = field(default_factory=LoggerOptions)
    launcher: LauncherOptions = field(default_factory=LauncherOptions)
    name: str = "default"  # the recipe's name; runs land in <output>/<name>/<time>/
    output: str = "outputs"
    resume: str | None = None  # auto: the newest unfinished run of this configuration; or a run directory
    checkpoint: str | None = None  # measure, generate: a checkpoint directory
    prompts: str | None = None  # measure: a prompt file instead of measure.prompts
    prompt: str | None = None  # generate: the text; null: standard input, or a chat on a terminal
    chat: bool = True  # generate: apply the chat template and remember turns; false continues the text as it is
    recipe: str | None = None
