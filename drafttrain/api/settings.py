"""Keys of the configuration as Python values, and the target that they load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from drafttrain.cli.config import Run, compose_run, override
from drafttrain.cli.error_messages import nearest
from drafttrain.cli.main import user_errors
from drafttrain.core.errors import UserError
from drafttrain.core.limits import check_limits
from drafttrain.targets import TargetOptions
from drafttrain.targets import load as targets
from drafttrain.targets.load import LoadedTarget

Options = TypeVar("Options")
RECORDED = ("name", "path", "revision", "dtype", "weights")  # of a target, in its description


def composed(recipe: str | None, settings: Mapping[str, Any]) -> Run:
    """The configuration of a recipe with these settings.

    settings: by key of the configuration (`train.lr`), or by group (`logger`). Raises UserError for an unknown recipe, key or
    value, with the nearest name.
    """
    with user_errors():
        return compose_run(recipe, [override(key, value) for key, value in settings.items()])


def given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those settings that are not None."""
    return {key: value for key, value in settings.items() if value is not None}


def with_options(options: Options, changes: Mapping[str, Any], group: str) -> Options:
    """An options object with other values. Raises UserError for a field that it does not have. group: its name in messages."""
    valid_names = [field.name for field in fields(options)]  # type: ignore[arg-type]
    for name in changes:
        if name not in valid_names:
            raise UserError(f"unknown option {name!r} of {group}; {nearest(name, valid_names)}")
    updated: Options = replace(options, **changes)  # type: ignore[type-var]
    return updated


def target_options(loaded: LoadedTarget) -> TargetOptions:
    """The options of a target that is loaded."""
    recorded = {name: loaded.description[name] for name in (*RECORDED, "image_inputs") if name in loaded.description}
    return TargetOptions(**recorded, device=str(loaded.target.device))


def for_drafter(run: Run, loaded: LoadedTarget, drafter: Any) -> Run:
    """The same configuration with a loaded target and a family's own options object in it."""
    target = target_options(loaded)
    options = replace(run.options, target=target, drafter=drafter)
    return Run(options, run.resolved | {"target": asdict(target), "drafter": asdict(drafter)}, run.overrides)


def load_target(
    path: str | Path = "embedded",
    *,
    dtype: str = "float32",
    device: str = "auto",
    revision: str | None = None,
    weights: str | None = None,
    attention: str = "auto",
    runner: str = "auto",
    trust_remote_code: bool = False,
) -> LoadedTarget:
    """Load a frozen target with its tokenizer.

    Args:
        path: `embedded` (the 5.5M-parameter model in the package), a directory, or a hub id of a transformers causal LM.
        dtype: `float32`, `bfloat16` or `float16`.
        device: `auto` (a GPU if there is one), `cpu`, `cuda`, `cuda:1`, ...
        revision: branch, tag or commit on the hub.
        weights: `fp8`, `int8` or `int4` quantises the linear maps of the blocks. The quantised model is then the target.
        attention: transformers' `attn_implementation`: `sdpa`, `eager`, or `auto`.
        runner: `fast` (drafttrain's own forward, for the Llama family), `hf` (transformers'), or `auto`.
        trust_remote_code: run code that comes with the model.

    Returns:
        The target. `.tokenizer` is its tokenizer, `.description` names its shape and its weights.

    Raises:
        UserError: The path has no usable model, or two options contradict each other.
    """
    name = "embedded" if str(path) == "embedded" else "hf"
    options = TargetOptions(
        name=name,
        path=None if name == "embedded" else str(path),
        revision=revision,
        dtype=dtype,
        weights=weights,
        device=device,
        attention=attention,
        runner=runner,
        trust_remote_code=trust_remote_code,
    )
    check_limits("target", options)
    return targets.load_target(options)
