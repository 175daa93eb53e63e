"""`drafttrain export checkpoint=DIR format=STACK out=DIR`: writes a checkpoint for a serving stack, and checks the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from drafttrain import __version__
from drafttrain.core.errors import UserError
from drafttrain.export import golden
from drafttrain.export.exporter import Exported, ExportSettings, check_wanted, refusals
from drafttrain.export.exporter import export as export_to
from drafttrain.export.hub import Repository, push
from drafttrain.export.opened import Opened
from drafttrain.export.table import stacks_for
from drafttrain.runs.checkpoint_source import CheckpointSource
from drafttrain.runs.console import line_printer, print_line
from drafttrain.runs.lock_step import shared_target
from drafttrain.runs.options import RunOptions
from drafttrain.runs.stacks import plan
from drafttrain.targets.load import LoadedTarget
from drafttrain.train.logger import log_export


def export(options: RunOptions, resolved: dict[str, Any], loaded: LoadedTarget | None = None) -> Path | None:
    """Export to the stacks of `format` and return the directory; with `export.plan` only print the plan, and return None.

    loaded: the target, if it is in memory already.

    Raises UserError for a checkpoint that is missing, damaged or of another target, and for a family that the stack does not
    load. Raises ParityError if the written files draft other tokens than the checkpoint. In both cases nothing is left on disk,
    unless only the upload failed.
    """
    if options.export.plan:
        plan(options, line_printer(Console()))
        return None
    name, stack = options.checkpoint, options.format
    assert name is not None and stack is not None and options.out is not None
    out = Path(options.out).expanduser()
    setting, size = options.target.shared_by
    if size > 1:
        raise UserError(f"{setting} is {size}, but an export reads the whole target; leave it out")
    source, console = CheckpointSource.of(name), Console()
    stacks = stacks_for(source.family, stack)
    dtype = options.dtype or ("float32" if options.adapter else source.dtype)
    repository = None if options.push_to_hub is None else Repository(options.push_to_hub, options.push_private)
    settings = ExportSettings(
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
    check_wanted(settings)
    with shared_target(options, "export"):
        loaded = loaded or source.load(options.target)
        directory = source.checkpoint(loaded, line_printer(console))
        scaling = options.export.rope_scaling
        checkpoint = Opened.of(directory, loaded, scaling)
        refusals(checkpoint, settings)  # before anything is computed
        material = golden.stored(directory) if scaling is None else None
        if material is None:
            why = "the checkpoint has none" if scaling is None else "its positions are scaled from here on"
            print_line(console, f"golden drafts: {why}; they are made now from the target")
            material = golden.made(checkpoint, golden.sequences_for(loaded))
        exported = export_to(checkpoint, material, settings)
        _print_result(console, exported, settings)
        places = {stack: out / stack if settings.several else out for stack in exported.written}
        log_export(options.logger, resolved, directory, places, line_printer(console))
        if repository is not None:
            address = push(out, repository, f"{source.family} drafter for {stack}, drafttrain {__version__}")
            print_line(console, f"uploaded: {address}")
    return out


def _print_result(console: Console, exported: Exported, wanted: ExportSettings) -> None:
    places = {stack: wanted.out / stack if wanted.several else wanted.out for stack in exported.written}
    for stack, parity in exported.written.items():
        changed = "" if wanted.dtype == "float32" else f"; {wanted.dtype} changes {parity.changed} of them"
        print_line(console, f"{stack}: {places[stack]} (checked: its {parity.drafts} drafts are the checkpoint's{changed})")
    for stack, reason in exported.refused.items():
        print_line(console, f"{stack}: not exported, {reason}", style="dim")
    print_line(console, f"how to serve it: {next(iter(places.values())) / 'README.md'}")
