"""`drafttrain compare RUN RUN ... [out=DIR]`: ranks measured runs and tests which differences are significant."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from drafttrain.core.errors import UserError
from drafttrain.measure.compare.files import write_comparison
from drafttrain.measure.compare.ranking import check_options, ranked
from drafttrain.measure.compare.rows import rows_of
from drafttrain.measure.compare.runs import find_runs
from drafttrain.measure.compare.table import console_table
from drafttrain.measure.compare.wandb_report import check_project, save_report
from drafttrain.runs.console import print_line, print_note
from drafttrain.runs.options import RunOptions
from drafttrain.train.lineage import recorded_run


def compare(options: RunOptions, resolved: dict[str, Any]) -> Path | None:
    """Print the table, and write the files to `out` if it is set; returns `out`.

    Raises UserError for runs that cannot be found or read, and for runs that were measured under different conditions.
    """
    check_options(options.compare)
    check_project(options.compare.wandb)
    out = _folder(options.out)
    runs, notes = find_runs(options.runs)
    comparison = ranked(rows_of(runs, options.compare.checkpoints), options.compare, notes)
    console = Console()
    console.print(console_table(comparison))
    for note in comparison.notes:
        print_note(console, note)
    if out is not None:
        keyed = [word for word in sys.argv[1:] if not word.startswith("runs=")]
        for file in write_comparison(out, comparison, shlex.join(["drafttrain", "compare", *options.runs, *keyed])):
            print_line(console, f"wrote {file}")
    if options.compare.wandb is not None:
        known = [_at_wandb(row.run.where) for row in comparison.rows]
        address = save_report(comparison, options.compare.wandb, known)
        without = [row.label for row, path in zip(comparison.rows, known, strict=True) if path is None]
        left = f" (these runs are not at W&B and are in its table only: {', '.join(without)})" if without else ""
        print_line(console, f"saved {address}{left}")
    return out


def _at_wandb(where: str) -> str | None:
    """A run's W&B path, entity/project/id, if it has one."""
    if not Path(where).exists():
        return where
    run = recorded_run(Path(where)) or {}
    parts = [str(run.get(key) or "") for key in ("entity", "project", "id")]
    return "/".join(parts) if all(parts) else None


def _folder(out: str | None) -> Path | None:
    if out is None:
        return None
    folder = Path(out).expanduser()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"out is {out!r}, a file; name a directory with out=DIR")
    return folder
