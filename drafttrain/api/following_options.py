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
from drafttrain.targets.frozen_ends import ends_of
from drafttrain.targets.live import LiveTarget
from drafttrain.targets.load import stop_ids_of

OF_OPTIMIZER = ("train.optimizer", "train.lr", "train.betas", "train.weight_decay")
OF_TRAINING = (*OF_OPTIMIZER, "train.clip", "train.precision", "train.micro_batch", "train.seed", "train.init")
OF_CONFIGURATION = ("target.dtype", "target.device")  # read where the target is a path or a configuration
OF_PATH = ("target.revision", "target.trust_remote_code")


def target_of(target: Any, options: RunOptions, tokenizer: Any) -> LiveTarget:
    """The target that the loop trains: its model, or its ends."""
    if isinstance(target, str | Path | PreTrainedConfig):
        return ends_of(target, options.target, tokenizer)
    live_target = LiveTarget(target, tokenizer=tokenizer)
    live_target.stop_ids = stop_ids_of(live_target.model, tokenizer)
    return live_target


def options_for(recipe: str | Path, overrides: Sequence[str]) -> RunOptions:
    """The configuration of a recipe, or of a checkpoint, whose weights are then the first ones."""
    directory = Path(recipe).expanduser()
    if not (directory / META).is_file():
        if recipe_overrides := [
            word for word in overrides if _key(word) == "recipe"
        ]:  # before it composes another configuration
            raise UserError(f"{recipe_overrides[0]} has no effect: the second argument names the recipe; leave it out")
        return compose_run(str(recipe), ["target=hf", "data.path=memory", *overrides]).options
    if fixed_overrides := [word for word in overrides if _within(_key(word), ("drafter", "train.init"))]:
        raise UserError(f"{fixed_overrides[0]}: the checkpoint {directory} has its options; leave it out, or give a recipe")
    meta = read_meta(directory)
    words = [f"drafter={meta.family}", f"name={meta.family}", "data.path=memory", override("train.init", str(directory))]
    return replace(compose_run(None, [*words, *overrides]).options, drafter=options_of(directory, meta))


def check_options(options: RunOptions, lag: int, capacity: int) -> None:
    """Raise UserError for settings that have no meaning here, or are out of range."""
    train = options.train
    options.loss.check()
    for name, setting in (("train.lora.rank", train.lora.rank), ("train.on_policy", train.on_policy)):
        if setting:
            raise UserError(f"{name} is {setting}, which only drafttrain fit has; leave it out")
    if train.sequence_parallel != 1:
        raise UserError(f"train.sequence_parallel is {train.sequence_parallel}, which only drafttrain fit has; leave it out")
    if lag < 0 or capacity < 1:
        raise UserError(f"lag is {lag}, capacity {capacity}; set lag to 0 or more, capacity to 1 or more")


def check_overrides(overrides: Sequence[str], target: Any, own_optimizer: bool) -> None:
    """Raise UserError for an override that changes nothing here. A recipe may hold such values: `drafttrain fit` uses them."""
    is_model = not isinstance(target, str | Path | PreTrainedConfig)  # a model, which runs and decodes
    readable_keys = (
        () if is_model else OF_CONFIGURATION if isinstance(target, PreTrainedConfig) else (*OF_CONFIGURATION, *OF_PATH)
    )
    for word in overrides:
        key, remedy = _key(word), "leave it out"
        if own_optimizer and _within(key, OF_OPTIMIZER):
            reason, remedy = "optimizer= makes the optimiser", "leave one out"
        elif is_model and _within(key, ("target",)):
            reason = "the target is a model, which stays as it is"
        elif not is_model and _within(key, ("decode",)):
            reason = "a target that is no model decodes nothing"
        elif key == "decode.max_new_tokens":
            reason = "tau has its own max_new_tokens"
        elif key == "decode.tree_nodes" or not _within(
            key, ("drafter", "loss", "decode", "recipe", *OF_TRAINING, *readable_keys)
        ):
            reason = "OnlineDrafter does not use this option"
        else:
            continue
        raise UserError(f"{word} has no effect: {reason}; {remedy}")


def _key(word: str) -> str:
    """The key of an override. Worked example: `++train.lr=1e-4` gives `train.lr`."""
    return word.lstrip("+~").partition("=")[0].strip()


def _within(key: str, names: Sequence[str]) -> bool:
    """Whether the key is one of these, or below one of them."""
    return any(key == name or key.startswith(f"{name}.") for name in names)
