"""Settings that a recipe leaves to the device, the target and the data. A run's configuration has what they became."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drafttrain.model.shapes import TargetShape
from drafttrain.runs.options import RunOptions
from drafttrain.targets.devices import device_of
from drafttrain.targets.load import AUTO, dtype_of
from drafttrain.train import TrainOptions

NARROWEST = 128  # hidden size below which the rate grows no more
SMALLEST = 4  # conversations of a batch that is halved
HIGHEST_RATES = {"adamw": 0.03, "muon": 0.1}  # recipes go to a third and a fifth of it, for the narrowest targets
FEW = 0.01  # share of the rows below which a run sees few of them
Derived = dict[str, Any]  # values by key, such as `train.lr`


def from_device(options: RunOptions) -> Derived:
    """`target.dtype` and `train.precision` where they are `auto`."""
    values: Derived = {"target.dtype": dtype_of(options.target)} if options.target.dtype == AUTO else {}
    if options.train.precision == AUTO:
        values["train.precision"] = "bfloat16" if device_of(options.target.device).type == "cuda" else "float32"
    return values


def from_target(options: RunOptions, shape: TargetShape) -> Derived:
    """The learning rate of a narrow target, and all of its tokens where the draft vocabulary would not be a part of them.

    Hidden matrices' rates go as 1 / width (Tensor Programs V, arXiv 2203.03466).
    """
    values: Derived = {}
    train, size = options.train, getattr(options.drafter, "draft_vocab", None)
    if train.lr_width is not None:
        values["train.lr"] = train.lr * max(1.0, train.lr_width / max(NARROWEST, shape.hidden_size))
    if size is not None and size >= shape.vocab_size:
        values["drafter.draft_vocab"] = None
    return values


def from_data(options: RunOptions, conversations: int, processes: int) -> Derived:
    """Steps for `train.epochs` passes over the data at most, and a batch with which these are `train.least_steps`.

    A shorter trial, by `train.exact_steps`, has the batch and the rate of the whole run. Adam's rate goes as the square root of
    the batch (arXiv 2205.10287). processes: that divide a batch.
    """
    train = options.train
    if train.epochs is None or not conversations:
        return {}
    batch, min_steps = train.global_batch, train.least_steps or 0
    if not train.exact_steps:
        min_steps = min(min_steps, train.steps)
    while train.epochs * conversations < min_steps * batch and batch % 2 == 0 and batch // 2 >= max(SMALLEST, processes):
        batch //= 2
    steps = train.steps if train.exact_steps else min(train.steps, math.ceil(train.epochs * conversations / batch))
    values: Derived = {"train.steps": steps}
    if batch != train.global_batch:
        values["train.global_batch"] = batch
        if train.lr_width is not None:
            values["train.lr"] = train.lr * math.sqrt(batch / train.global_batch)
    return values


def derived(options: RunOptions, shape: TargetShape, conversations: int, processes: int) -> Derived:
    """All that follows from the target and the data. Nothing follows from a configuration with these values."""
    values = from_target(options, shape)
    values |= from_data(with_values(options, values), conversations, processes)
    return values | dict.fromkeys(("train.epochs", "train.least_steps", "train.lr_width")) | {"train.exact_steps": False}


def lines_of(before: RunOptions, after: RunOptions, shape: TargetShape, conversations: int) -> list[str]:
    """What to print of the values that are not as in the recipe."""
    recipe_train, train, lines = before.train, after.train, list[str]()
    if recipe_train.steps == train.steps and recipe_train.global_batch != train.global_batch:
        recipe_text = f"(in the recipe {recipe_train.global_batch:,})"
        lines.append(f"train.global_batch: {train.global_batch:,} for {conversations:,} conversations {recipe_text}")
    elif recipe_train.steps != train.steps:
        passes = f"{recipe_train.epochs:g} passes over {conversations:,} conversations"
        recipe_text = f"{recipe_train.steps:,} of {recipe_train.global_batch:,}"
        lines.append(
            f"train.steps: {train.steps:,} in batches of {train.global_batch:,}, {passes} (in the recipe at most {recipe_text})"
        )
    if recipe_train.lr != train.lr:
        recipe_text = f"{recipe_train.lr:g} from a hidden size of {recipe_train.lr_width:,} on"
        recipe_text += (
            f", in batches of {recipe_train.global_batch:,}" if recipe_train.global_batch != train.global_batch else ""
        )
        lines.append(f"train.lr: {train.lr:.2g} for a hidden size of {shape.hidden_size:,} (in the recipe {recipe_text})")
    if getattr(before.drafter, "draft_vocab", None) != getattr(after.drafter, "draft_vocab", None):
        lines.append(f"drafter.draft_vocab: all {shape.vocab_size:,} tokens (in the recipe {before.drafter.draft_vocab:,})")
    return lines


def doubts(train: TrainOptions, rows: int) -> list[str]:
    """What to print of settings that can hardly be meant. train: with the derived values. rows: of the training data."""
    lines, seen_count = list[str](), train.steps * train.global_batch
    if train.lr == 0:
        lines.append("train.lr is 0: the drafter learns nothing")
    elif train.lr > HIGHEST_RATES[train.optimizer]:
        lines.append(f"train.lr is {train.lr:g}, several times the highest rate of any recipe with {train.optimizer}")
    if seen_count < FEW * rows:
        lines.append(f"{train.steps:,} steps of {train.global_batch:,} see {seen_count:,} of {rows:,} rows of the data")
    return lines


def recorded(resolved: Mapping[str, Any], values: Derived) -> dict[str, Any]:
    """The configuration as plain data, with these values."""
    configuration = dict(resolved)
    for key, value in values.items():
        group, _, name = key.partition(".")
        configuration[group] = configuration.get(group, {}) | {name: value}
    return configuration


def with_values(options: RunOptions, values: Derived) -> RunOptions:
    """The options with these values."""
    for key, value in values.items():
        group, _, name = key.partition(".")
        options = replace(options, **{group: replace(getattr(options, group), **{name: value})})
    return options


def for_target(options: RunOptions, shape: TargetShape) -> RunOptions:
    """The options for a target of this shape."""
    return with_values(options, from_target(options, shape))
