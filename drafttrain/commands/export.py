"""`drafttrain export checkpoint=DIR format=STACK out=DIR`: writes a checkpoint for a serving stack, and checks the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from drafttrain import __version__
from drafttrain.core.console import line_printer, print_line, print_note
from drafttrain.core.errors import UserError
from drafttrain.export import golden
from drafttrain.export.engine_check import Ending, plain
from drafttrain.export.exporter import Exported, ExportSettings, check_wanted, refusals, tau_text
from drafttrain.export.exporter import export as export_to
from drafttrain.export.hub import Repository, push
from drafttrain.export.opened import Opened
from drafttrain.export.table import stacks_for
from drafttrain.measure.cases import encode_cases
from drafttrain.runs.checkpoint_source import CheckpointSource
from drafttrain.runs.data import measurement_prompts
from drafttrain.runs.lock_step import shared_target
from drafttrain.runs.options import RunOptions
from drafttrain.runs.stacks import plan
from drafttrain.targets.load import LoadedTarget
from drafttrain.train.logger import log_export

PROMPTS, TOKENS = 16, 64  # prompts, and tokens of each output, on which the effect of quantisation is found
LOSS = 0.05  # of the drafts that are accepted for each decode step, above which quantisation gets a note


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
        options.quantize,
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
        prompts, outputs = ([], []) if settings.quantize is None else _target_outputs(options, checkpoint.loaded)
        exported = export_to(checkpoint, material, settings, prompts, outputs)
        _print_result(console, exported, settings)
        places = {stack: out / stack if settings.several else out for stack in exported.written}
        log_export(options.logger, resolved, directory, places, line_printer(console))
        if repository is not None:
            address = push(out, repository, f"{source.family} drafter for {stack}, drafttrain {__version__}")
            print_line(console, f"uploaded: {address}")
    return out


def _target_outputs(options: RunOptions, loaded: LoadedTarget) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts that are measured with, and the target's own greedy outputs for them."""
    target, chosen = loaded.target, measurement_prompts(options)
    evenly = chosen[:: max(1, len(chosen) // PROMPTS)][:PROMPTS]  # of all categories
    cases, _ = encode_cases(evenly, loaded.tokenizer, target.shape.max_positions - TOKENS)
    prompts = [case.tokens for case in cases]
    return prompts, plain(target, prompts, Ending(target.stop_ids, TOKENS)) if prompts else []


def _print_result(console: Console, exported: Exported, wanted: ExportSettings) -> None:
    places = {stack: wanted.out / stack if wanted.several else wanted.out for stack in exported.written}
    for stack, parity in exported.written.items():
        narrow = wanted.quantize or wanted.dtype
        changed = "" if narrow == "float32" else f"; {narrow} changes {parity.changed} of them"
        print_line(console, f"{stack}: {places[stack]} (checked: its {parity.drafts} drafts are the checkpoint's{changed})")
    tau = next(iter(exported.written.values())).tau
    if tau is not None and wanted.quantize is not None:
        print_line(console, tau_text(tau, wanted.quantize))
        lost = 1.0 - (tau[1] - 1.0) / (tau[0] - 1.0) if tau[0] > 1.0 else 0.0
        if lost > LOSS:
            print_note(
                console, f"{wanted.quantize} loses {lost:.0%} of the accepted drafts; try more bits, or leave quantize out"
            )
    for stack, reason in exported.refused.items():
        print_line(console, f"{stack}: not exported, {reason}", style="dim")
    print_line(console, f"how to serve it: {next(iter(places.values())) / 'README.md'}")
