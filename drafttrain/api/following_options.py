"""The options and the target of a drafter that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from drafttrain.cli.config import compose_run, override
from drafttrain.core.errors import UserError
from drafttrain.drafters import META
from drafttrain.drafters.checkpoint import options_of, read_meta
from drafttrain.runs.options import RunOptions
from drafttrain.targets.ends import ends_of
from drafttrain.targets.live import LiveTarget
from drafttrain.targets.load import stop_ids_of
from drafttrain.train.optimizer import OPTIMIZERS

OF_OPTIMIZER = ("train.optimizer", "train.lr", "train.betas", "train.weight_decay")
OF_TRAINING = (*OF_OPTIMIZER, "train.clip", "train.precision", "train.micro_batch", "train.seed", "train.init")
OF_CONFIGURATION = ("target.dtype", "target.device")  # read where the target is a path or a configuration
OF_PATH = ("target.revision", "target.trust_remote_code")


def target_of(target: Any, options: RunOptions, tokenizer: Any) -> LiveTarget:
    """The target that the loop trains: its model, or its ends."""
    if isinstance(target, str | Path | PreTrainedConfig):
        return ends_of(target, options.target, tokenizer)
    found = LiveTarget(target, tokenizer=tokenizer)
    found.stop_ids = stop_ids_of(found.model, tokenizer)
    return found


def options_for(recipe: str | Path, overrides: Sequence[str]) -> RunOptions:
    """The configuration of a recipe, or of a checkpoint, whose weights are then the first ones."""
    directory = Path(recipe).expanduser()
    if not (directory / META).is_file():
        if again := [word for word in overrides if _key(word) == "recipe"]:  # before it composes another configuration
            raise UserError(f"{again[0]} has no effect: the second argument names the recipe; leave it out")
        return compose_run(str(recipe), ["target=hf", "data.path=memory", *overrides]).options
    if fixed := [word for word in overrides if _within(_key(word), ("drafter", "train.init"))]:
        raise UserError(f"{fixed[0]}: the checkpoint {directory} has its options; leave it out, or give a recipe")
    meta = read_meta(directory)
    words = [f"drafter={meta.family}", f"name={meta.family}", "data.path=memory", override("train.init", str(directory))]
    return replace(compose_run(None, [*words, *overrides]).options, drafter=options_of(directory, meta))


def check_options(options: RunOptions, lag: int, capacity: int) -> None:
    """Raise UserError for settings that have no meaning here, or are out of range."""
    train = options.train
    options.loss.check()
    if train.precision not in ("float32", "bfloat16"):
        raise UserError(f"train.precision is {train.precision!r}; choose float32 or bfloat16")
    if train.optimizer not in OPTIMIZERS:
        raise UserError(f"train.optimizer is {train.optimizer!r}; choose {' or '.join(OPTIMIZERS)}")
    for name, given in (("train.lora.rank", train.lora.rank), ("train.on_policy", train.on_policy)):
        if given:
            raise UserError(f"{name} is {given}, which only drafttrain fit has; leave it out")
    if train.sequence_parallel != 1:
        raise UserError(f"train.sequence_parallel is {train.sequence_parallel}, which only drafttrain fit has; leave it out")
    if train.micro_batch < 1 or lag < 0 or capacity < 1:
        raise UserError(
            f"train.micro_batch is {train.micro_batch}, lag {lag}, capacity {capacity}; lag may be 0, the others not"
        )


def check_overrides(overrides: Sequence[str], target: Any, own_optimizer: bool) -> None:
    """Raise UserError for an override that changes nothing here. A recipe may hold such values: `drafttrain fit` uses them."""
    whole = not isinstance(target, str | Path | PreTrainedConfig)  # a model, which runs and decodes
    read = () if whole else OF_CONFIGURATION if isinstance(target, PreTrainedConfig) else (*OF_CONFIGURATION, *OF_PATH)
    for word in overrides:
        key, way_out = _key(word), "leave it out"
        if own_optimizer and _within(key, OF_OPTIMIZER):
            why, way_out = "optimizer= makes the optimiser", "leave one out"
        elif whole and _within(key, ("target",)):
            why = "the target is a model, which stays as it is"
        elif not whole and _within(key, ("decode",)):
            why = "a target that is no model decodes nothing"
        elif key == "decode.max_new_tokens":
            why = "tau has its own max_new_tokens"
        elif key == "decode.tree_nodes" or not _within(key, ("drafter", "loss", "decode", "recipe", *OF_TRAINING, *read)):
            why = "OnlineDrafter does not use this option"
        else:
            continue
        raise UserError(f"{word} has no effect: {why}; {way_out}")


def _key(word: str) -> str:
    """The key of an override. Worked example: `++train.lr=1e-4` gives `train.lr`."""
    return word.lstrip("+~").partition("=")[0].strip()


def _within(key: str, names: Sequence[str]) -> bool:
    """Whether the key is one of these, or below one of them."""
    return any(key == name or key.startswith(f"{name}.") for name in names)
