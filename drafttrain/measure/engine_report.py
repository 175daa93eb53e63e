"""The engines of a report beside our decoder, for the console, report.md and report.html."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from drafttrain.measure import cells

Report = dict[str, Any]
Entry = dict[str, Any]

HEADER = (
    *("engine", "batch", "tokens/s: speculative / plain", "speedup [min-max]", "TTFT ms (plain)", "TPOT ms (plain)"),
    *("tau", "ours, same chains", "identical to its plain", "plain text is ours", "prompts x repeats"),
)
SHOWN = ("engine", "tokens/s", "plain", "speedup", "tau", "ours", "identical", "prompts")


def engines_of(report: Report) -> list[Entry]:
    """Those that were measured; reports of before there were engines have none."""
    return [entry for entry in report.get("engines") or [] if entry["error"] is None]


def failures(report: Report) -> list[str]:
    return [f"{entry['label']}: {entry['error']}" for entry in report.get("engines") or [] if entry["error"] is not None]


def flags(report: Report) -> list[str]:
    return [*(flag for entry in engines_of(report) for flag in entry["flags"]), *failures(report)]


def version(entry: Entry) -> str:
    """`OpenVINO GenAI 2026.4.0.0`; of a server what it is called there."""
    name, found = next(iter(entry["versions"].items()), ("", ""))
    return f"{entry['label']} {f'({name} {found})' if entry['url'] else found}".rstrip(" ()")


def section(report: Report) -> str:
    """Of report.md; empty where no engine was named."""
    engines = engines_of(report)
    if not engines:
        return ""
    own = next(entry for entry in report["checkpoints"] if entry["name"] == report["best"])
    lines = [_own(own, entry) for entry in own["slices"] if entry["by"] == "batch_size"]
    lines += [_line(version(entry), entry, part) for entry in engines for part in entry["slices"]]
    said = (
        "The same prompts, decoded greedily by serving engines: with the exported drafter and without it in "
        "turn, each in a process of its own. tau is what the engine counts; beside it stands what our decoder counts of the "
        "same chains."
    )
    about = [f"- {version(entry)}: {_about(entry)}" for entry in engines]
    return f"## Engines\n\n{said}\n\n{cells.rows(HEADER, lines)}\n\n" + "\n".join(about)


def engines_table(report: Report) -> Table:
    """One row for our decoder, and one for each engine, at its first batch size."""
    own = next(entry for entry in report["checkpoints"] if entry["name"] == report["best"])
    title = "engines beside it, on the same prompts"
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in SHOWN:
        table.add_column(column, justify="left" if column == "engine" else "right", overflow="fold")
    rates = [cells.number(own[key], 0) for key in ("tokens_per_s", "baseline_tokens_per_s")]
    table.add_row(
        "drafttrain", *rates, _speedup(own), cells.number(own["tau"]), "", cells.exact(own), str(own["timed_prompts"])
    )
    for entry in engines_of(report):
        rates = [cells.number(entry[key], 0) for key in ("tokens_per_s", "baseline_tokens_per_s")]
        tau = Text(cells.number(entry["tau"]), style="red" if entry["tau_gap_flagged"] else "")
        told = (_speedup(entry), tau, cells.number(entry["tau_here"]), cells.exact(entry), str(entry["prompts"]))
        table.add_row(version(entry), *rates, *told)
    if said := flags(report):
        table.caption = Text("\n".join(f"! {line}" for line in said), style="yellow")
    return table


def short(entry: Entry) -> str:
    """`OpenVINO GenAI 1.42x [1.40-1.44], 512 / 360 tokens/s, tau 1.85`."""
    rates = " / ".join(cells.number(entry[key], 0) for key in ("tokens_per_s", "baseline_tokens_per_s"))
    return f"{entry['label']} {cells.speedups(entry)}, {rates} tokens/s, tau {cells.number(entry['tau'])}"


def _own(own: Entry, part: Entry) -> list[str]:
    name = f"drafttrain, {own['name']}"
    times = [_times(part, key) for key in ("ttft_ms", "tpot_ms")]
    line = [name, str(part["value"]), _rates(part), cells.speedups(part), *times, cells.number(part["tau"]), ""]
    return [*line, cells.exact(part), "", f"{part.get('timed_prompts', part['prompts'])} x {part.get('repeats', 1)}"]


def _line(name: str, entry: Entry, part: Entry) -> list[str]:
    line = [name, str(part["value"]), _rates(part), cells.speedups(part)]
    line += [_times(part, key) for key in ("ttft_ms", "tpot_ms")]
    line += [cells.number(part["tau"]), cells.number(part["tau_here"]), cells.exact(part)]
    return [*line, f"{entry['same_as_here']}/{entry['prompts']}", f"{part['prompts']} x {part['repeats']}"]


def _rates(part: Entry) -> str:
    return " / ".join(cells.number(part[key], 0) for key in ("tokens_per_s", "baseline_tokens_per_s"))


def _times(part: Entry, key: str) -> str:
    return f"{cells.number(part.get(key))} ({cells.number(part.get(f'baseline_{key}'))})"


def _speedup(entry: Entry) -> str:
    return cells.speedups(entry).replace(" ", "\n")


def _about(entry: Entry) -> str:
    if entry["url"]:
        return f"at {entry['url']}, whose weights and settings are its own"
    accepted, drafted = (cells.count(entry[key]) for key in ("accepted", "drafted"))
    return (
        f"format={entry['stack']}, {entry['dtype']}, {entry['threads']} threads, chains of {entry['draft_length']}; of "
        f"{drafted} drafts it accepted {accepted} in {cells.count(entry['verifications'])} verifications (over all repeats)"
    )
