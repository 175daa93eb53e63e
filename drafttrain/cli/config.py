"""The Hydra configuration: the schema of a run, the schemas of the families, and the recipes."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from drafttrain.cli.help import group_files, recipe_files
from drafttrain.core.errors import UserError
from drafttrain.core.limits import check_limits
from drafttrain.drafters import schemas
from drafttrain.objective import MIX
from drafttrain.runs.options import FREE, RENAMED, RunOptions, note_renamed, understood

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, which wheels bring, reads ten times as fast
TARGETS = ("embedded", "hf")  # a recipe's sections: its settings for the small target of the package, and for any other


@dataclass(frozen=True, slots=True)
class Run:
    """A composed configuration."""

    options: RunOptions
    resolved: dict[str, Any]  # the same as plain data, to be recorded
    overrides: list[str]  # of this job, if it is one of a sweep
    number: int | None = None  # of this job in a sweep, from 1 on


def register(config_dir: Path | None = None) -> None:
    """Register schemas and recipes with Hydra. A recipe's section of the target's name is composed after the rest of it.

    config_dir: the user's folder; the YAML files in its `recipes/` become recipes.
    Raises UserError for a recipe that is not a YAML mapping.
    """
    store = ConfigStore.instance()
    store.store(name="run_schema", node=RunOptions)
    written = group_files(config_dir).get("drafter", {})
    for family, schema in schemas().items():
        store.store(group="drafter", name=f"{family}_schema", node=schema)
        if family not in written:  # what is written names the schema
            store.store(group="drafter", name=family, node=schema)
    for name, file in recipe_files(config_dir).items():
        body = _read_recipe(name, file.read_text(encoding="utf-8"))
        of_targets = {target: body.pop(target) for target in TARGETS if target in body}
        store.store(group="recipe", name=name, node=body, package="_global_")
        for target, settings in of_targets.items():
            store.store(group="on_target", name=f"{target}_{name}", node=settings, package="_global_")
    OmegaConf.register_new_resolver("drafttrain_required", _required, replace=True)
    OmegaConf.register_new_resolver("drafttrain_scratch", _scratch, use_cache=True, replace=True)


def to_run(composed: DictConfig) -> Run:
    """Convert Hydra's configuration to our dataclasses.

    Raises UserError for a key that no schema has (Hydra's `+key=value` lets one in), and omegaconf's errors for values that
    cannot be resolved.
    """
    running = HydraConfig.get()
    run = _run(composed, running.runtime.choices.get("recipe"), list(running.overrides.task))
    if running.mode != RunMode.MULTIRUN:
        return run
    return replace(run, number=running.job.num + 1)


def compose_run(recipe: str | None, overrides: Sequence[str]) -> Run:
    """The configuration of `drafttrain COMMAND recipe=RECIPE OVERRIDES`, without a command line and without a job of Hydra.

    Raises what Hydra raises for an unknown recipe, key or value.
    """
    words = [*([] if recipe is None else [f"recipe={recipe}"]), *understood(overrides)]
    running = GlobalHydra.instance().is_initialized()  # by a command, which has registered
    if not running:
        register()
    with nullcontext() if running else initialize_config_module("drafttrain.conf", version_base="1.3"):
        return _run(compose("config", words), recipe, words)


def override(key: str, value: Any) -> str:
    """`key=value` as it would be typed, with text quoted. Worked example: `drafter.heads`, 4 gives `drafter.heads=4`."""
    return f"{key}={_typed(value)}"


def _typed(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_typed(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_typed, value))}]"
    return QuotedString(str(value), Quote.single).with_quotes().replace("${", "\\${")  # no interpolation in a text


def _run(composed: DictConfig, recipe: str | None, overrides: list[str]) -> Run:
    with_choice = OmegaConf.merge(composed, {"recipe": recipe})
    _hold(with_choice, overrides)
    options = OmegaConf.to_object(with_choice)
    assert isinstance(options, RunOptions)
    if strays := list(_strays(options)):
        raise UserError(f"unknown key {strays[0]!r}; + adds keys to deepspeed.extra only")
    check_limits("", options)
    resolved = OmegaConf.to_container(with_choice, resolve=True, throw_on_missing=True)
    assert isinstance(resolved, dict)
    return Run(options, {str(key): value for key, value in resolved.items()}, overrides)


def _hold(composed: Any, overrides: Sequence[str]) -> None:
    """Let what is typed hold where Hydra composes a recipe's section later, or adds its keys to those that are typed."""
    for typed in OverridesParser.create().parse_overrides(list(overrides)):
        key, value = typed.key_or_group, typed.value()
        if key == "loss":
            composed.loss.name = value
            if value != MIX:
                composed.loss.mix = {}
        elif key in FREE and isinstance(value, dict):
            OmegaConf.update(composed, key, value, merge=False)


def known_keys() -> list[str]:
    """Every key that an override may name, such as `train.lr`, including the families' `drafter.*`."""
    drafters = [OmegaConf.create({"drafter": OmegaConf.structured(schema)}) for schema in schemas().values()]
    return sorted({key for node in [OmegaConf.structured(RunOptions), *drafters] for key in _flatten(node)})


def _strays(node: Any, prefix: str = "") -> Iterator[str]:
    """Attributes of the option objects that their dataclasses do not declare."""
    if not is_dataclass(node):
        return
    declared = {field.name for field in fields(node)}
    for name, value in vars(node).items():
        if name not in declared:
            yield f"{prefix}{name}"
        yield from _strays(value, f"{prefix}{name}.")


def _flatten(node: DictConfig, prefix: str = "") -> list[str]:
    keys = []
    for name in map(str, node):
        keys.append(f"{prefix}{name}")
        if isinstance(child := node._get_node(name), DictConfig) and not child._is_none():
            keys += _flatten(child, f"{prefix}{name}.")
    return keys


def _read_recipe(name: str, text: str) -> dict[str, Any]:
    try:
        body = yaml.load(text, LOADER)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise UserError(f"recipe {name}, line {line}: {error.problem}; correct the YAML") from error
    if not isinstance(body, dict):
        raise UserError(f"recipe {name} is {type(body).__name__}, not a mapping; write key: value lines")
    for section in (body, *(body[target] for target in TARGETS if isinstance(body.get(target), dict))):
        for old, new in ((old.split("."), new.split(".")) for old, new in RENAMED.items()):
            if isinstance(group := section.get(old[0]), dict) and old[1] in group:
                group[new[1]] = group.pop(old[1])
                note_renamed(".".join(old))
    return body


def _required(key: str) -> str:
    """The resolver of keys without a default. Hydra calls it only if the user has not set the key."""
    raise UserError(f"{key} is not set; add {key}=...")


def _scratch() -> str:
    """A temporary folder for Hydra's sweep files. Every run keeps a record in its run directory."""
    folder = tempfile.mkdtemp(prefix="drafttrain-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
