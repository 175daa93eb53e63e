"""The console table of a comparison."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from drafttrain.measure import cells
from drafttrain.measure.compare.columns import cost_text, engines_of, varied_text
from drafttrain.measure.compare.ranking import Comparison

_COLUMNS = ("", "run", "tau\n95 %", "alpha\nby depth", "c_d\nc_v", "speedup\nmin-max\ntokens/s", "vs 1")
_LEFT = ("run", "vs 1")


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
