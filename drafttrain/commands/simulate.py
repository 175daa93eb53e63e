"""`drafttrain simulate [report=FILE | checkpoint=DIR] [out=FILE.png]`: speedup by formula from acceptance and costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_write_json, new_file
from drafttrain.measure.compare.rows import rows_of
from drafttrain.measure.compare.runs import find_runs
from drafttrain.measure.report import rounded
from drafttrain.measure.simulate.measured import Measured
from drafttrain.measure.simulate.plot import simulation_plot
from drafttrain.measure.simulate.simulation import run_simulation
from drafttrain.measure.simulate.tables import assumptions, chain_table, findings, shape_table
from drafttrain.runs.options import RunOptions
from drafttrain.runs.paths import dated_path


def simulate(options: RunOptions, resolved: dict[str, Any]) -> Path:
    """Print the tables, draw the plots and write the figures as JSON; returns the path of the plots.

    Raises UserError for bad options, and for reports that cannot be read or have no timings.
    """
    picture, wanted = _picture(options), options.simulate
    simulation = run_simulation(wanted, _measured(options))
    console = Console(highlight=False)
    for line in assumptions(simulation):
        console.print(line, soft_wrap=True)
    console.print(chain_table(simulation, wanted.alphas, simulation.scenario.costs.draft))
    console.print(shape_table(simulation))
    for line in findings(simulation):
        console.print(line, soft_wrap=True)
    figures = rounded(simulation.plain())
    if picture is None:
        content = json.dumps(figures, indent=2, allow_nan=False) + "\n"
        picture = new_file(dated_path(options.output, "simulate", ".json"), content.encode()).with_suffix(".png")
    else:
        picture.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_json(picture.with_suffix(".json"), figures)
    simulation_plot(simulation, wanted.alphas, picture)
    console.print(f"picture: {picture}", soft_wrap=True)
    return picture


def _measured(options: RunOptions) -> Measured | None:
    """The checkpoint that the user names, or the best one of the report."""
    if options.checkpoint is not None and options.report is not None:
        raise UserError(f"report is {options.report!r} and checkpoint {options.checkpoint!r}; leave one of them out")
    named = options.report or options.checkpoint
    if named is None:
        return None
    rows = rows_of(find_runs([named])[0], "best")
    if len(rows) > 1:
        raise UserError(f"{named} holds {len(rows)} reports; name one of them, such as report={rows[0].run.where}")
    return Measured.of(f"{rows[0].label} {rows[0].entry['name']}", rows[0].entry)


def _picture(options: RunOptions) -> Path | None:
    """The picture that the user names, if any. Raises UserError for another kind of file."""
    if options.out is None:
        return None
    path = Path(options.out).expanduser()
    if path.suffix != ".png" or path.is_dir():
        raise UserError(f"out is {options.out!r}; name the picture with out=FILE.png")
    return path
