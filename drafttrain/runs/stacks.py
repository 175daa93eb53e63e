"""Which serving stacks load the drafter of a run, said before it is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch

from drafttrain.core.errors import UserError
from drafttrain.drafters.checkpoint import CheckpointMeta, TargetRecord, read_meta
from drafttrain.export.exporter import planned
from drafttrain.export.opened import Opened
from drafttrain.export.serve import STACKS
from drafttrain.export.table import load_it, loads, rows, stacks_for
from drafttrain.model.drafter import Drafter
from drafttrain.runs.options import RunOptions
from drafttrain.runs.placement import built
from drafttrain.targets import TargetOptions
from drafttrain.targets.estimate import outline
from drafttrain.targets.load import LoadedTarget, dtype_of, load_tokenizer, path_of


def check_named(options: RunOptions) -> None:
    """Raise UserError where `export.stacks` names an unknown stack, or one that loads no drafter of this family."""
    for stack in options.export.stacks:
        if stack not in STACKS:
            raise UserError(f"export.stacks names {stack!r}; choose of {', '.join(STACKS)}")
        stacks_for(options.drafter.family, stack)


def check_stacks(options: RunOptions, loaded: LoadedTarget, drafter: Drafter, say: Callable[[str], None]) -> None:
    """Print which serving stacks load this drafter, and what stands in the way of others that load its family.

    Raises UserError where `export.stacks` names one that does not.
    """
    loadable, refused = loadable_by(options, loaded, drafter)
    if loadable:
        say(f"{load_it(loadable).removesuffix(' it')} this drafter")
    for reason, stacks in by_reason({stack: reason.replace(stack, "the stack") for stack, reason in refused.items()}).items():
        say(f"  not {', '.join(stacks)}: {reason if len(stacks) > 1 else refused[stacks[0]]}")
    for stack in options.export.stacks:
        if stack not in loadable:
            raise UserError(f"export.stacks names {stack}, which cannot load this drafter: {refused[stack]}")


def loadable_by(options: RunOptions, loaded: LoadedTarget, drafter: Drafter) -> tuple[list[str], dict[str, str]]:
    """(the stacks that load this drafter, why others that load its family do not)."""
    family = options.drafter.family
    meta = CheckpointMeta(family, asdict(options.drafter), drafter.decode_settings(), TargetRecord.of(loaded), 0)
    return planned(Opened.in_memory(meta, drafter, loaded), _dtype(loaded), options.quantize)


def by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """The names that have each reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return names


def stacks_of(checkpoint: Path, loaded: LoadedTarget) -> list[str]:
    """The stacks that load the drafter of a checkpoint; of a target in parts, those that load its family."""
    family = read_meta(checkpoint).family
    if not loads(family) or loaded.target.part.size > 1:
        return loads(family)
    return planned(Opened.of(checkpoint, loaded), _dtype(loaded))[0]


def _dtype(loaded: LoadedTarget) -> str:
    return "bfloat16" if loaded.target.dtype == torch.bfloat16 else "float32"


def outlined(options: TargetOptions) -> LoadedTarget:
    """The target from its configuration and tokenizer. Its weights are not read."""
    target = outline(options)
    description = asdict(options) | {"dtype": dtype_of(options), "architecture": type(target.model).__name__}
    return LoadedTarget(target, load_tokenizer(options), path_of(options), description)


def untrained(options: RunOptions, loaded: LoadedTarget) -> Drafter:
    """The drafter of these options for an outlined target, without weights."""
    with torch.device("meta"):
        return built(options, loaded.target)


def plan(options: RunOptions, say: Callable[[str], None]) -> None:
    """Print the same from the target's configuration and tokenizer.

    Raises UserError as `check_stacks` does, and for a family that no stack loads.
    """
    loaded, family = outlined(options.target), options.drafter.family
    drafter, architecture = untrained(options, loaded), loaded.description["architecture"]
    say(f"drafter: {family}, for {architecture}, {loaded.target.shape.blocks} blocks ({loaded.path})")
    if not loads(family):
        raise UserError(f"no stack loads {family}: {next(iter(rows(family).values()))}")
    requested_stacks = [] if options.format in (None, "all") else [options.format]
    run_options = replace(options, export=replace(options.export, stacks=[*options.export.stacks, *requested_stacks]))
    check_named(run_options)
    check_stacks(run_options, loaded, drafter, say)
    for reason, stacks in by_reason({stack: row for stack, row in rows(family).items() if isinstance(row, str)}).items():
        say(f"  not {', '.join(stacks)}: {reason}")
