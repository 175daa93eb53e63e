"""The serving engines of a report, compared with our decoder: for the console, report.md and report.html."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from drafttrain.measure import cells
from drafttrain.measure.flags import best_entry

Report = dict[str, Any]
Entry = dict[str, Any]

HEADER = (
    *("engine", "batch", "tokens/s: speculative / plain", "speedup [min-max]", "TTFT ms (plain)", "TPOT ms (plain)"),
    *("tau", "our tau, same chains", "acceptance by position", "ours, same chains"),
    *("identical to its plain output", "plain output is ours", "prompts x repeats"),
)
DURING = ("step", "tau in the engine", "our tau, same chains", "our tau", "accepted drafts", "seconds")
SHOWN = ("engine", "tokens/s", "plain", "speedup", "tau", "our tau", "by position", "identical")


def engines_of(report: Report) -> list[Entry]:
    """The engines that were measured."""
    return [entry for entry in report.get("engines") or [] if entry["error"] is None]


def acceptance_entries(report: Report) -> list[Entry]:
    """The engines' acceptance by position, with a name for figures; without those that do not count it."""
    return [entry | {"name": entry["label"]} for entry in engines_of(report) if entry.get("alpha_by_position")]


def failures(report: Report) -> list[str]:
    """The engines that failed, each with the reason."""
    return [f"{entry['label']}: {entry['error']}" for entry in report.get("engines") or [] if entry["error"] is not None]


def flags(report: Report) -> list[str]:
    """Warnings on the engines' figures, and failures."""
    return [*(flag for entry in engines_of(report) for flag in entry["flags"]), *failures(report)]


def version(entry: Entry) -> str:
    """`OpenVINO GenAI 2026.4.0.0`; for a server, the name and version that it reports."""
    name, version_text = next(iter(entry["versions"].items()), ("", ""))
    text = f"({name} {version_text})" if entry["url"] and name else version_text
    return f"{entry['label']} {text}".rstrip()


def section(report: Report) -> str:
    """The section of report.md; empty without engines."""
    engines = engines_of(report)
    if not engines:
        return ""
    best = best_entry(report)
    lines = [_own(best, entry) for entry in best["slices"] if entry["by"] == "batch_size"]
    lines += [_line(version(entry), entry, batch) for entry in engines for batch in entry["slices"]]
    summary = (
        "Serving engines decoded the same prompts greedily, with the exported drafter and without it, each in a separate "
        "process. The engine counts its own tau and acceptance by position; the columns after them are those of our decoder "
        "with the same chains."
    )
    engine_lines = [f"- {version(entry)}: {_about(entry)}" for entry in engines]
    return f"## Engines\n\n{summary}\n\n{cells.rows(HEADER, lines)}\n\n" + "\n".join(engine_lines)


def during_training(report: Report) -> str:
    """The section of report.md on an engine's measurements during training; empty without."""
    steps = (report["training"] or {}).get("engine")
    if not steps:
        return ""
    last = steps[-1]
    lines = [
        [
            cells.count(s["step"]),
            *(cells.number(s[key]) for key in ("tau", "own_tau", "measured_tau")),
            cells.share(s["acceptance"]),
            cells.number(s["seconds"], 0),
        ]
        for s in steps
    ]
    summary = (
        f"{last['name']} {last['version'] or ''} loaded the drafter of these steps while training went on, and decoded "
        f"{last['prompts']} prompts greedily with chains of {last['draft_length']}. The next columns are tau of our decoder "
        "with the same chains, and with its own proposal (`measure.every`)."
    )
    return f"## Engine during training\n\n{summary}\n\n{cells.rows(DURING, lines)}"


def engines_table(report: Report) -> Table:
    """A row for our decoder and one for each engine, at the first batch size."""
    table = cells.console_table("serving engines, on the same prompts", SHOWN, left=("engine",))
    best = best_entry(report)
    table.add_row(*_row("drafttrain", best, ""))
    for entry in engines_of(report):
        table.add_row(*_row(version(entry), entry, cells.number(entry["tau_here"])))
    if warnings := flags(report):
        table.caption = Text("\n".join(f"! {line}" for line in warnings), style="yellow")
    return table


def _row(name: str, entry: Entry, our_tau: str) -> list[str | Text]:
    rates = [cells.number(entry[key], 0) for key in ("tokens_per_s", "baseline_tokens_per_s")]
    tau = Text(cells.number(entry["tau"]), style="red" if entry.get("tau_gap_flagged") else "")
    alphas = cells.two_a_line(cells.alphas(entry))
    return [name, *rates, cells.speedups(entry).replace(" ", "\n"), tau, our_tau, alphas, cells.exact(entry)]


def short(entry: Entry) -> str:
    """`OpenVINO GenAI 1.42x [1.40-1.44], 512 / 360 tokens/s, tau 1.85`."""
    return f"{entry['label']} {cells.speedups(entry)}, {_rates(entry)} tokens/s, tau {cells.number(entry['tau'])}"


def _own(best: Entry, batch: Entry) -> list[str]:
    runs = f"{batch.get('timed_prompts', batch['prompts'])} x {batch.get('repeats', 1)}"
    return [*_common(f"drafttrain, {best['name']}", batch), "", cells.alphas(batch), "", cells.exact(batch), "", runs]


def _line(name: str, entry: Entry, batch: Entry) -> list[str]:
    same_outputs, runs = f"{entry['same_as_here']}/{entry['prompts']}", f"{batch['prompts']} x {batch['repeats']}"
    alphas = [cells.alphas(batch), cells.alphas(batch, "alpha_by_position_here")]
    return [*_common(name, batch), cells.number(batch["tau_here"]), *alphas, cells.exact(batch), same_outputs, runs]


def _common(name: str, entry: Entry) -> list[str]:
    times = [cells.with_plain(entry, key) for key in ("ttft_ms", "tpot_ms")]
    return [name, str(entry["value"]), _rates(entry), cells.speedups(entry), *times, cells.number(entry["tau"])]


def _rates(entry: Entry) -> str:
    return " / ".join(cells.number(entry[key], 0) for key in ("tokens_per_s", "baseline_tokens_per_s"))


def _about(entry: Entry) -> str:
    if entry["url"]:
        return f"at {entry['url']}, with the weights and settings of that server"
    accepted, drafted = (cells.count(entry[key]) for key in ("accepted", "drafted"))
    return (
        f"format={entry['stack']}, {entry['dtype']}, {entry['threads']} threads, chains of {entry['draft_length']}; it "
        f"accepted {accepted} of {drafted} drafts in {cells.count(entry['verifications'])} verifications (over all repeats)"
    )
