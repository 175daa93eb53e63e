"""`drafttrain export checkpoint=DIR format=STACK out=DIR`: for a serving stack, checked before it is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from drafttrain import __version__
from drafttrain.core.errors import UserError
from drafttrain.export import golden
from drafttrain.export.exporter import Exported, Wanted, check_wanted, refusals
from drafttrain.export.exporter import export as export_to
from drafttrain.export.hub import Repository, push
from drafttrain.export.opened import Opened
from drafttrain.export.table import STACKS, asked
from drafttrain.runs.checkpoint_source import CheckpointSource, plain_printer
from drafttrain.runs.lock_step import shared_target
from drafttrain.runs.options import RunOptions
from drafttrain.targets.load import load_target
from drafttrain.train.logger import log_export


def export(options: RunOptions, resolved: dict[str, Any]) -> Path:
    """Write what `format` asks for and return the directory.

    Raises UserError for what is missing, damaged, of another target, or loaded by no such stack; ParityError where the written
    files do not draft as the checkpoint does. Nothing is left in either case, but where only the upload failed.
    """
    name, out = _given("checkpoint", options.checkpoint), Path(_given("out", options.out)).expanduser()
    stack = options.format
    if stack is None:
        raise UserError(f"format is not set; choose one of {', '.join(STACKS)}, or all, with format=STACK")
    if options.target.tensor_parallel > 1:
        raise UserError(
            f"target.tensor_parallel is {options.target.tensor_parallel}, an export reads the whole target; leave it out"
        )
    source, console = CheckpointSource.of(name), Console()
    stacks = asked(source.family, stack)
    dtype = options.dtype or ("float32" if options.adapter else source.dtype)
    repository = None if options.push_to_hub is None else Repository(options.push_to_hub, options.push_private)
    wanted = Wanted(
        stacks,
        out,
        dtype,
        stack == "all",
        options.overwrite,
        options.max_shard_size,
        options.with_target,
        repository,
        options.adapter,
    )
    check_wanted(wanted)
    with shared_target(options, "export"):
        loaded = load_target(source.target(options.target))
        directory = source.checkpoint(loaded, plain_printer(console))
        opened = Opened.of(directory, loaded)
        refusals(opened, wanted)  # before anything is computed
        material = golden.stored(directory)
        if material is None:
            console.print("golden drafts: none with the checkpoint, made now from the target", soft_wrap=True)
            material = golden.made(opened, golden.texts_for(loaded))
        exported = export_to(opened, material, wanted)
        _say(console, exported, wanted)
        places = {stack: out / stack if wanted.several else out for stack in exported.written}
        log_export(options.logger, resolved, directory, places)
        if repository is not None:
            address = push(out, repository, f"{source.family} drafter for {stack}, drafttrain {__version__}")
            console.print(f"uploaded: {address}", soft_wrap=True, highlight=False)
    return out


def _given(name: str, value: str | None) -> str:
    if value is None:
        raise UserError(f"{name} is not set; name a directory with {name}=DIR")
    return value


def _say(console: Console, exported: Exported, wanted: Wanted) -> None:
    for stack, parity in exported.written.items():
        place = wanted.out / stack if wanted.several else wanted.out
        changed = "" if wanted.dtype == "float32" else f"; {wanted.dtype} makes {parity.changed} of them other tokens"
        console.print(f"{stack}: {place} ({parity.drafts} golden drafts reproduced{changed})", soft_wrap=True, highlight=False)
    for stack, reason in exported.refused.items():
        console.print(f"{stack}: no, {reason}", style="dim", soft_wrap=True, highlight=False)
    first = next(iter(exported.written))
    place = wanted.out / first if wanted.several else wanted.out
    console.print(f"how to serve it: {place / 'README.md'}", soft_wrap=True, highlight=False)
