"""The comparison on the console."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from drafttrain.measure import cells
from drafttrain.measure.compare.columns import cost_text, engines_of, varied_text
from drafttrain.measure.compare.ranking import Comparison

_COLUMNS = (*("", "run", "tau\n95 %", "alpha\nby depth", "c_d\nc_v", "speedup\nmin-max\ntokens/s", "against 1"),)


def console_table(comparison: Comparison) -> Table:
    """The first row in bold, ranks on the frontier with a star."""
    first = comparison.rows[0].entry
    title = f"by {comparison.sort}; policy {first['policy']}, temperature {first['temperature']:g}, "
    title += f"batch {first['batch_size']}, {first['prompts']} prompts ({first['timed_prompts']} timed)"
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in _COLUMNS:
        left = column in ("run", "against 1")
        table.add_column(column, justify="left" if left else "right", overflow="fold", no_wrap=not left)
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
        f"{cells.number(entry['alpha'])}\n" + _two_a_line(cells.alphas(entry), 6),
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
        text.append("* no other run is as fast for less training\n", style="dim")
    if many:
        text.append(
            f"against 1: {comparison.tested} by prompt, permutation test, Holm over {many} pair{'s'[: many > 1]}", style="dim"
        )
    return text


def _two_a_line(text: str, most: int) -> str:
    words = text.split()
    lines = [" ".join(words[i : i + 2]) for i in range(0, min(len(words), most), 2)]
    return "\n".join([*lines, *(["..."] if len(words) > most else [])])
