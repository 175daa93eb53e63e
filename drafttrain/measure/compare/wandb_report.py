"""Saves a comparison as a W&B report: its tables, and plots of the runs that are at W&B."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.measure.compare.files import markdown
from drafttrain.measure.compare.ranking import Comparison

PROJECT = re.compile(r"([\w.-]+)/([\w.-]+)")


def check_project(name: str | None) -> None:
    """Raise UserError for a malformed project name, and if the library that writes reports is missing."""
    if name is None:
        return
    if not PROJECT.fullmatch(name):
        raise UserError(f"compare.wandb is {name!r}; name a project as ENTITY/PROJECT")
    try:
        import wandb_workspaces  # noqa: F401
    except ImportError as error:
        raise UserError("compare.wandb needs wandb-workspaces; pip install 'drafttrain[reports]'") from error


def save_report(comparison: Comparison, name: str, known: Sequence[str | None]) -> str:
    """Save the comparison to the project `name`; returns the new report's address.

    known: each row's W&B run as entity/project/id, or None. Raises UserError if W&B refuses or cannot be reached.
    """
    import wandb

    entity, project = name.split("/")
    report = _report(comparison, entity, project, [path for path in known if path is not None])
    try:
        report.save()
    except (wandb.Error, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"cannot save the report in {name}: {reason}; check the name, and wandb login") from error
    return str(report.url)


def _report(comparison: Comparison, entity: str, project: str, runs: Sequence[str]) -> Any:
    """The report: tables of all runs, and plots of the runs that are at W&B."""
    import wandb_workspaces.reports.v2 as wr

    title = f"{len(comparison.rows)} runs by {comparison.sort}"
    blocks: list[Any] = [wr.MarkdownBlock(markdown(comparison).split("\n", 2)[2])]
    if runs:
        grid = wr.PanelGrid(runsets=_runsets(runs), panels=_panels(comparison))
        blocks = [wr.H2("Plots"), grid, wr.H2("Table"), *blocks]
    return wr.Report(project=project, entity=entity, title=title, description="by drafttrain compare", blocks=blocks)


def _runsets(runs: Sequence[str]) -> list[Any]:
    """A run set for each project."""
    import wandb_workspaces.reports.v2 as wr

    names_by_project: dict[tuple[str, str], list[str]] = {}
    for entity, project, name in (path.split("/") for path in runs):
        names_by_project.setdefault((entity, project), []).append(name)
    return [
        wr.Runset(entity=entity, project=project, name=project, filters=f"Metric('ID') in {names!r}")
        for (entity, project), names in names_by_project.items()
    ]


def _panels(comparison: Comparison) -> list[Any]:
    import wandb_workspaces.reports.v2 as wr

    summary: Callable[[str], Any] = wr.SummaryMetric
    speed, cost = summary("speedup"), summary(f"training_{comparison.cost}")
    return [
        wr.BarPlot(title="tau", metrics=[summary("tau")]),
        wr.BarPlot(title="speedup", metrics=[speed]),
        wr.ScatterPlot(title=f"speedup over training {comparison.cost}", x=cost, y=speed),
    ]
