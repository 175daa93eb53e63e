"""`drafttrain compare RUN RUN ... [out=DIR]`: ranks measured runs and tests which differences are significant."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from drafttrain.core.console import print_line, print_note
from drafttrain.core.errors import UserError
from drafttrain.core.files import writable
from drafttrain.measure import cells
from drafttrain.measure.compare import CompareOptions
from drafttrain.measure.compare.columns import cost_text, engines_of, varied_text
from drafttrain.measure.compare.files import check_project, save_report, write_comparison
from drafttrain.measure.compare.ranking import Comparison, differences, listed, ranked
from drafttrain.measure.compare.runs import find_runs, rows_of
from drafttrain.runs.options import RunOptions
from drafttrain.runs.overview import console_list, list_runs, write_list
from drafttrain.train.lineage import recorded_run

_COLUMNS = ("", "run", "tau\n95 %", "alpha\nby depth", "c_d\nc_v", "speedup\nmin-max\ntokens/s", "vs 1")
_LEFT = ("run", "vs 1")
EXPECTED = "expected tau on held-out conversations"


def compare(options: RunOptions, resolved: dict[str, Any]) -> Path | None:
    """Print the table, and write the files to `out` if it is set; returns `out`. The list of a folder's runs is written into it
    without that.

    Raises UserError for runs that cannot be found or read, and for named runs that were measured under different conditions.
    The runs of a folder are listed then.
    """
    check_project(options.compare.wandb)
    out, console = _folder(options.out), Console()
    shown, project = show(options.runs, options.compare, console, out, _index(options.runs)), options.compare.wandb
    for file in shown.files:
        print_line(console, f"wrote {file}")
    if project is not None:
        if shown.comparison is None:
            raise UserError(f"compare.wandb is {project!r}, but the runs cannot be ranked: {shown.why}")
        rows = shown.comparison.rows
        wandb_paths = [_at_wandb(row.run.where) for row in rows]
        address = save_report(shown.comparison, project, wandb_paths)
        without = [row.label for row, path in zip(rows, wandb_paths, strict=True) if path is None]
        missing_note = f" (these runs are not at W&B and are in its table only: {', '.join(without)})" if without else ""
        print_line(console, f"saved {address}{missing_note}")
    return out


@dataclass(frozen=True, slots=True)
class Shown:
    """What `show` has printed and written."""

    comparison: Comparison | None  # None where the runs are listed
    why: str  # not ranked
    files: list[Path]


def show(
    words: Sequence[str],
    options: CompareOptions,
    console: Console,
    out: Path | None = None,
    index: Path | None = None,
    mixed: bool = False,
) -> Shown:
    """Print the ranking of the runs that the words name, or a list of them. Write the files to `out`, without one the list of
    all runs to `index`.

    They are listed where none was measured, and where they were measured under different conditions and a word names several
    of them, or `mixed`. Raises UserError where others cannot be ranked.
    """
    found = find_runs(words)
    rows = rows_of(found.reports, options.checkpoints)
    why = "" if rows else "none was measured"
    if rows and (mixed or found.together) and not options.mixed and (different := differences(rows)):
        why = f"measured under different conditions: {listed(different)}"
    keyed = [word for word in sys.argv[1:] if not word.startswith("runs=")]
    command = shlex.join(["drafttrain", "compare", *words, *keyed])
    index = out or (index if found.together else None)
    listing = bool(why or (index and found.together))
    runs = list_runs(found.reports, found.unmeasured) if listing else []
    notes = [f"not ranked, because they were {why}; compare.mixed=true ranks them nevertheless"] if why and rows else []
    files = write_list(index, runs, notes, command) if index and listing else []
    if why:
        console.print(console_list(runs, f"{len(runs)} runs by {'speedup' if rows else EXPECTED}"))
        for note in notes:
            print_note(console, note)
        return Shown(None, why, files)
    comparison = ranked(rows, options, found.notes)
    console.print(console_table(comparison))
    if found.unmeasured:
        console.print(console_list(list_runs([], found.unmeasured), f"not measured, by {EXPECTED}"))
    for note in comparison.notes:
        if note not in found.notes:
            print_note(console, note)
    return Shown(comparison, why, [*(write_comparison(out, comparison, command) if out else []), *files])


def show_sweep(runs: Sequence[Path]) -> None:
    """Print the table of a sweep's runs."""
    console = Console()
    print_line(console, "")
    show([str(run) for run in runs], CompareOptions(), console, mixed=True)


def _at_wandb(where: str) -> str | None:
    """A run's W&B path, entity/project/id, if it has one."""
    if not Path(where).exists():
        return where
    run = recorded_run(Path(where)) or {}
    parts = [str(run.get(key) or "") for key in ("entity", "project", "id")]
    return "/".join(parts) if all(parts) else None


def _index(words: Sequence[str]) -> Path | None:
    """The folder that is compared, where that is all and something can be written there."""
    folder = Path(words[0]).expanduser() if len(words) == 1 else None
    return folder if folder is not None and folder.is_dir() and writable(folder) else None


def _folder(out: str | None) -> Path | None:
    if out is None:
        return None
    folder = Path(out).expanduser()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"out is {out!r}, a file; name a directory with out=DIR")
    return folder


def console_table(comparison: Comparison) -> Table:
    """The rows, the first in bold. A star after the rank marks the frontier."""
    first = comparison.rows[0].entry
    title = f"by {comparison.sort}; policy {first['policy']}, temperature {first['temperature']:g}, "
    title += f"batch {first['batch_size']}, {first['prompts']} prompts ({first['timed_prompts']} timed)"
    table = cells.console_table(title, _COLUMNS, _LEFT)
    for column in table.columns:
        column.no_wrap = column.header not in _LEFT
    table.columns[1].min_width, table.columns[-1].min_width = 16, 15
    for i in range(len(comparison.rows)):
        table.add_row(*_line(comparison, i), style="bold" if i == 0 else "")
    table.caption = _caption(comparison)
    return table


def _line(comparison: Comparison, i: int) -> list[str | Text]:
    row, interval = comparison.rows[i], comparison.tau_intervals[i]
    entry, star = row.entry, "*" if i in comparison.frontier else ""
    run = Text(row.label)
    about = [row.family, entry["name"], *varied_text(comparison, i, 3).replace(" and ", ", and ").split(", ")]
    about += [f"exact {cells.exact(entry)}", f"{short(entry['parameters'])} parameters"]
    about += [f"{e['label']} {cells.speedups(e)}, {cells.number(e['tokens_per_s'], 0)}/s" for e in engines_of(comparison, i)]
    if (tokens := row.training.get("tokens")) is not None:
        about += [f"{short(tokens)} tokens", *cost_text(comparison, i).split(", ")]
    run.append("".join(f"\n{line}" for line in about if line), style="dim")
    return [
        f"{i + 1}{star}",
        run,
        cells.number(entry["tau"]) + ("" if interval is None else f"\n{interval.low:.2f}-{interval.high:.2f}"),
        f"{cells.number(entry['alpha'])}\n" + cells.two_a_line(cells.alphas(entry), 6),
        f"{cells.number(entry['draft_cost'])}\n{cells.number(entry['verify_cost'])}",
        "\n".join([*cells.speedups(entry).rstrip("]").split(" ["), f"{cells.number(entry['tokens_per_s'], 0)}/s"]),
        comparison.against_first(i),
    ]


def short(count: float) -> str:
    """`1.87M`."""
    unit, size = next(((u, s) for u, s in (("G", 1e9), ("M", 1e6), ("k", 1e3)) if count >= s), ("", 1.0))
    return f"{count / size:.3g}{unit}"


def _caption(comparison: Comparison) -> Text:
    many = sum(pair.figure == comparison.tested and pair.corrected is not None for pair in comparison.pairs)
    text = Text()
    if comparison.points():
        text.append("* no other run is as fast with less training\n", style="dim")
    if many:
        text.append(
            f"vs 1: {comparison.tested} by prompt, permutation test, Holm over {many} pair{'s'[: many > 1]}", style="dim"
        )
    return text
