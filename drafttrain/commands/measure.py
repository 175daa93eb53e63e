"""`drafttrain measure checkpoint=DIR [prompts=FILE]`: measures a checkpoint. `fit` measures its checkpoints in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from drafttrain.core.console import line_printer, print_line, print_note, stages
from drafttrain.core.errors import OutputError, UserError
from drafttrain.core.files import new_directory, remove_abandoned
from drafttrain.data.chat import Encoded
from drafttrain.data.prompts import named_prompts
from drafttrain.drafters.checkpoint import read_meta
from drafttrain.measure import cells
from drafttrain.measure.engine_report import engines_table
from drafttrain.measure.flags import broken_guarantees
from drafttrain.measure.markdown import published_for, published_lines
from drafttrain.measure.report import Report, report_of, write_report
from drafttrain.measure.runner import CheckpointRef, measure_checkpoints
from drafttrain.runs.checkpoint_source import CheckpointSource
from drafttrain.runs.data import measurement_prompts
from drafttrain.runs.environment import environment
from drafttrain.runs.lock_step import shared_target
from drafttrain.runs.options import RunOptions, check_engine_adapters, dated_path
from drafttrain.runs.serving_engines import EngineChoice, EngineExport, exports, measure_engines
from drafttrain.runs.stacks import stacks_of
from drafttrain.targets.load import LoadedTarget
from drafttrain.train.checkpoint_manager import PROGRESS, Progress

_COLUMNS = ("checkpoint", "tau", "expected", "alpha", "by position", "speedup", "tokens/s", "exact")
_SLICE_COLUMNS = ("prompts", "tau", "95 %", "speedup", "tokens/s")
_TABLES = {"context": "by context length", "adapter": "by the target's adapter"}  # slices that the console shows


def measure(options: RunOptions, resolved: dict[str, Any]) -> Path:
    """Measure one checkpoint and the named engines; returns the report's folder, `<output>/measure/<time>/`.

    Raises UserError for a checkpoint that is missing, damaged or of another target. After writing the report, raises UserError
    for an engine that failed, and OutputError if the output of a lossless policy was not that of the target.
    """
    assert options.checkpoint is not None
    check_engine_adapters(options, options.engine)
    source, console = CheckpointSource.of(options.checkpoint), Console()
    engines = EngineChoice.of(options, source.family)
    base = dated_path(options.output, "measure")
    with shared_target(options, "measure") as part:
        loaded = source.load(options.target, part)
        directory = source.checkpoint(loaded, line_printer(console))
        ref = CheckpointRef(source.directory.name, directory, source.step)
        with exports(engines, directory, loaded) as ready:
            report = measured(loaded, [ref], options, console)
            folder = write_anew(base, report, loaded, draw=not engines)
            print_report(report, folder, console)
            if engines:
                _add_engines(report, engines, ready, ref, loaded, options, folder, console)
    if failed := [entry["error"] for entry in report["engines"] if entry["error"] is not None]:
        raise UserError(f"{failed[0]}; the other figures are in {folder / 'report.json'}")
    if broken := broken_guarantees(report):
        raise OutputError(f"{broken[0]}; {folder / 'report.json'} names the prompts")
    return folder


def measure_run(
    loaded: LoadedTarget,
    checkpoints: Sequence[CheckpointRef],
    options: RunOptions,
    folder: Path,
    console: Console,
    training: dict[str, Any] | None = None,
    metrics: Path | None = None,
    held_out: Sequence[Encoded] = (),
    chosen: str | None = None,
) -> Report:
    """Measure checkpoints of one target, write the report to `folder`, print the table, and return the report.

    metrics: the run's metrics.jsonl, for the training curves. The others are as for `measured`.
    """
    report = measured(loaded, checkpoints, options, console, training, held_out, chosen)
    if loaded.target.part.first:
        remove_abandoned(folder.parent, "*/*.tmp-*")
        write_report(folder, report, metrics)
    print_report(report, folder, console)
    return report


def measured(
    loaded: LoadedTarget,
    checkpoints: Sequence[CheckpointRef],
    options: RunOptions,
    console: Console,
    training: dict[str, Any] | None = None,
    held_out: Sequence[Encoded] = (),
    chosen: str | None = None,
) -> Report:
    """Measure checkpoints of one target; the report.

    training: the report's `training`. held_out: conversations for the perplexity of adapted targets. chosen: as for
    `report_of`.
    """
    prompts = measurement_prompts(options)
    with stages(console) as watch:
        body = measure_checkpoints(loaded, checkpoints, prompts, options.decode, options.measure, watch, held_out)
    record = read_meta(checkpoints[-1].path)
    parameters, stacks = body["checkpoints"][-1]["parameters"], stacks_of(checkpoints[-1].path, loaded)
    drafter = {"family": record.family, "parameters": parameters, "options": record.options, "stacks": stacks}
    for entry in body["checkpoints"]:
        entry["training"] = training_cost(Path(entry["path"]))
    body["measure"]["prompts"] = named_prompts(options.prompts or options.measure.prompts)
    report = report_of(body, loaded.description, drafter, environment(loaded.target.device), training, chosen)
    report["published"] = published_for(report, {prompt.origin for prompt in prompts})
    return report


def write_anew(base: Path, report: Report, loaded: LoadedTarget, draw: bool = True) -> Path:
    """Write the report to a new folder, `base` where that is not taken, and return it. draw: as for `write_report`."""
    if not loaded.target.part.first:
        return base
    for pattern in ("*.tmp-*", "*/*.tmp-*"):
        remove_abandoned(base.parent, pattern)
    return new_directory(base, lambda aside: write_report(aside, report, draw=draw))


def print_report(report: Report, folder: Path, console: Console) -> None:
    """Print the table, the notes and the place of the report."""
    console.print(console_table(report))
    for by in _TABLES:
        if any(s["by"] == by for s in report["checkpoints"][0]["slices"]):
            console.print(slices_table(report, by))
    for line in published_lines(report):
        print_line(console, line)
    for note in report["measure"]["notes"]:
        print_note(console, note)
    print_line(console, f"report: {folder / 'report.html'}")


def _add_engines(
    report: Report, engines: EngineChoice, ready: dict[str, EngineExport], ref: CheckpointRef, loaded: LoadedTarget,
    options: RunOptions, folder: Path, console: Console,
) -> None:  # fmt: skip
    """Measure the engines, and write the report again with their figures."""
    try:
        report["engines"] = measure_engines(engines, ready, report, ref.path, loaded, options, console)
        report["measure"]["notes"] += engines.notes
    finally:
        write_report(folder, report)
    console.print(engines_table(report))
    for note in (*engines.notes, *(note for entry in report["engines"] for note in entry["notes"])):
        print_note(console, note)


def training_cost(checkpoint: Path) -> dict[str, Any] | None:
    """The report's `training` of a checkpoint: the cost of training up to it; None if the checkpoint has no record of it.

    Raises UserError for a damaged record.
    """
    if not (checkpoint / PROGRESS).is_file():
        return None
    progress = Progress.of(checkpoint)
    has_costs = (
        progress.device is not None or not progress.step
    )  # checkpoints of old versions lack device, process time and flops
    return {
        "steps": progress.step,
        "tokens": progress.tokens,
        "held_out_tau": progress.expected_tau,
        "seconds": progress.seconds,
        "process_seconds": progress.process_seconds if has_costs else None,
        "flops": progress.flops if progress.flops or not progress.step else None,
        "device": progress.device,
    }


def console_table(report: dict[str, Any]) -> Table:
    """A row for each checkpoint, the best in bold. Expected tau is red if it is far from the measured tau."""
    first = report["checkpoints"][0]
    title = f"{report['drafter'].get('family', 'drafter')}, policy {first['policy']}, temperature {first['temperature']:g}, "
    title += f"batch {first['batch_size']}, {first['prompts']} prompts of {report['measure']['prompts']} "
    title += f"({first['timed_prompts']} timed x {first['repeats']})"
    table = cells.console_table(title, _COLUMNS, left=("checkpoint", "tokens/s"))
    for entry in report["checkpoints"]:
        expected = Text(_expected(entry), style="red" if entry["expected_gap_flagged"] else "")
        table.add_row(
            entry["name"],
            cells.number(entry["tau"]),
            expected,
            cells.number(entry["alpha"]),
            cells.two_a_line(cells.alphas(entry)),
            cells.speedups(entry).replace(" ", "\n"),
            _rates(entry),
            cells.exact(entry),
            style="bold" if entry["name"] == report["best"] else "",
        )
    warnings = [f"{entry['name']}: {flag}" for entry in report["checkpoints"] for flag in entry["flags"]]
    if warnings:
        table.caption = Text("\n".join(f"! {w}" for w in warnings), style="yellow")
    return table


def slices_table(report: dict[str, Any], by: str) -> Table:
    """A row for each checkpoint and slice of this kind."""
    table = cells.console_table(_TABLES[by], ("checkpoint", by, *_SLICE_COLUMNS), left=("checkpoint",))
    for entry in report["checkpoints"]:
        for s in (s for s in entry["slices"] if s["by"] == by):
            tau, _, interval = cells.tau(s).partition(" ")
            value = s["value"] if isinstance(s["value"], str) else f"{s['value']:,}"
            figures = [value, str(s["prompts"]), tau, interval.strip("()"), cells.speedups(s).split(" ")[0]]
            style = "bold" if entry["name"] == report["best"] else ""
            table.add_row(entry["name"], *figures, cells.number(s["tokens_per_s"], 0), style=style)
    return table


def _expected(entry: dict[str, Any]) -> str:
    """Expected tau with its interval on further lines, to keep the table within 80 columns."""
    value, _, interval = cells.expected(entry).partition(" ")
    low, _, high = interval.strip("()").partition(" to ")
    return f"{value}\n{low} to\n{high}" if interval else value


def _rates(entry: dict[str, Any]) -> str:
    names = {"tokens_per_s": "", "baseline_tokens_per_s": " plain", "transformers_tokens_per_s": " hf"}
    return "\n".join(f"{cells.number(entry[key], 0)}{label}" for key, label in names.items())
