"""The results of all GPUs as tables, between two markers of a page."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu.goals import GOALS, real_target, shown
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.results import BLOCKED, FAILED, FOLDER, PASSED, Section, older, visible
from benchmarks.gpu.sources import ROOT
from drafttrain.core.files import atomic_write_text

PAGE = ROOT / "docs" / "performance.md"
BEGIN = "<!-- figures: written by the make gpu-... commands -->"
END = "<!-- end of figures -->"
NONE, OLDER = "not measured", " (older)"
UNKNOWN = (NONE, "")  # what is measured of a goal, and its verdict
Cells = tuple[str, str, str, str, str]  # of a row of figures
STEADY = 0.03  # spread of a ceiling's windows up to which shares of it are printed without a mark


def write(results: Path | None, machine: Machine) -> None:
    """Write the tables into `performance.md` of this folder; None: the repository's page, which a rehearsal does not change."""
    if results is None and machine.rehearsal:
        return
    page = PAGE if results is None else results / "performance.md"
    before, after = "", "\n"
    if page.exists():
        text = page.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
    atomic_write_text(page, f"{before}{BEGIN}\n\n{tables(results or FOLDER)}\n{END}{after}")


def tables(folder: Path) -> str:
    machines = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return "\n".join(part for known in machines or [{}] for part in of_machine(known))


def of_machine(known: dict[str, Any]) -> Iterable[str]:
    """The parts of a machine's page. Where all figures are of other sources, a sentence says so once."""
    timed = [
        entry for name in ("bench", "train", "real-1", "real-2") for _, entry in measured(visible(known).get(name, {}), "")
    ]
    if not timed or not all(map(older, timed)):
        return parts(known)
    head, *tail = (part.replace(OLDER, "") for part in parts(known))
    return [head, "The code has changed since these figures were taken.\n", *tail]


def parts(known: dict[str, Any]) -> Iterable[str]:
    facts, known = known.get("machine", {}), visible(known)
    said = [f"{name} {facts[name]}" for name in ("memory", "cuda", "torch", "triton", "transformers") if name in facts]
    yield f"### {facts.get('name', 'No GPU so far')}\n"
    if facts.get("name") == "rehearsal":
        yield "A rehearsal on a CPU: no figures.\n"
    if said:
        yield ", ".join(said) + f". Checks: {counted(known.get('check', {}))}.\n"
    bench, train = known.get("bench", {}), known.get("train", {})
    yield from ceilings(bench)
    goals = list(verdicts(known, facts.get("name", "")))
    yield from titled(
        "Goals", [*table("goal", "wanted", "measured", ""), *(row(*each) for each in goals if each[2:] != UNKNOWN)]
    )
    if unknown := [each[0] for each in goals if each[2:] == UNKNOWN]:
        yield f"Goals {NONE}: {'; '.join(unknown)}.\n"
    yield from titled("Figures", figures(bench, train))
    yield from material(known.get("real-1", {}))
    yield from titled("Drafters distilled from it", distilled(known.get("real-2", {})))


def titled(title: str, rows: list[str]) -> list[str]:
    """A table with its title; nothing for a table without rows."""
    return [f"{title}:\n\n" + "\n".join(rows) + "\n"] if len(rows) > 2 else []


def counted(check: Section) -> str:
    counts = Counter(entry["status"] for entry in check.values())
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "none"


def verdicts(known: dict[str, Section], card: str) -> Iterable[tuple[str, str, str, str]]:
    """(goal, bound, measured value, verdict) of each goal, from `visible` results."""
    for goal in (goal.on(card) for goal in (*GOALS, real_target(known))):
        value, entry = goal.value(known), known.get(goal.section, {}).get(goal.case, {})
        if value is not None:
            measured = shown(value, goal.unit) + (unsteady(entry) if goal.figure[-1] == "floor_share" else "") + age(entry)
            yield goal.text, goal.wanted, measured, "reached" if goal.reached(value) else "missed"
        else:
            ended = {BLOCKED: "blocked", FAILED: "failed"}.get(entry.get("status", ""), "")
            yield goal.text, goal.wanted, NONE, f"{ended}: {entry['note']}" if ended else ""


def goals_text(known: dict[str, Any]) -> str:
    """The goals as text for a terminal."""
    card = known.get("machine", {}).get("name", "")
    cells = [("goal", "wanted", "measured", ""), *verdicts(visible(known), card)]
    widths = [max(len(row[i]) for row in cells) for i in range(3)]
    return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]).rstrip() for row in cells)


def ceilings(bench: Section) -> Iterable[str]:
    """The best that any case saw, and how far the windows of one case were apart."""
    seen = [entry["figures"] for _, entry in measured(bench, "") if "copy_bandwidth" in entry["figures"]]
    if seen:
        names = {
            "copy_bandwidth": ("copy", "TB/s"),
            "read_bandwidth": ("read", "TB/s"),
            "product_flops": ("product", "TFLOP/s"),
        }
        best = {key: [f[key] for f in seen if key in f] for key in (*names, "spread")}
        said = [
            f"{name} {max(best[key]) / 1e12:,.{0 if unit == 'TFLOP/s' else 2}f} {unit}" if best[key] else f"{name} {NONE}"
            for key, (name, unit) in names.items()
        ]
        spread = f"; windows of one case differ by up to {percent(max(best['spread']))}" if best["spread"] else ""
        yield f"Ceilings: {', '.join(said)}{spread}.\n"


def figures(bench: Section, train: Section) -> list[str]:
    """All that was timed, one row for each."""
    rows = table("what", "measured", "of the ceiling", "ratio", "more")
    for cells in itertools.chain(
        steps(bench), drafting(bench), operators(bench), trainings(train), rivals(train), losses(train), drafters(train)
    ):
        rows.append(row(usual(cells[0]), *cells[1:]))
    return rows


def usual(case: str) -> str:
    """A case without what the page says of all cases."""
    return case.replace(" Llama-3.1-8B", "").replace(" context=4096", "")


def steps(bench: Section) -> Iterable[Cells]:
    for name, entry in measured(bench, "step "):
        case = " ".join(word for word in name.split() if not word.startswith("nodes="))
        for nodes, f in entry["figures"].items():
            if isinstance(f, dict):
                more = [f"outside the target {percent(f['outside_target'])}"] if "outside_target" in f else []
                more += [f"waits of the host {f['waits']} in {f['replays']}"] if f.get("waits") else []
                ratio = "" if nodes == "1" else f"{f['over_plain']:.3f} plain steps"
                yield f"{case} nodes={nodes}", f"{f['ms']:.3f} ms{age(entry)}", of_ceiling(f, entry), ratio, ", ".join(more)


def drafting(bench: Section) -> Iterable[Cells]:
    """The cheapest step first."""
    for name, entry in sorted(measured(bench, "drafting "), key=lambda pair: pair[1]["figures"]["over_plain"]):
        f = entry["figures"]
        more = f"{f['nodes']} nodes, draft length {f['draft_length']}"
        more += f", drafting {f['draft_ms']:.3f} ms" if "draft_ms" in f else ""
        yield name, f"{f['ms']:.3f} ms{age(entry)}", of_ceiling(f, entry), f"{f['over_plain']:.3f} plain steps", more


def of_ceiling(found: dict[str, Any], entry: dict[str, Any]) -> str:
    """A share of what the ceilings allow, marked where they moved while it was measured, or its bytes were counted later."""
    share = found.get("floor_share", found.get("roofline_share"))
    if share is None:
        return NONE
    return percent(share) + unsteady(entry) + (" (recounted)" if "recounted" in found else "")


def unsteady(entry: dict[str, Any]) -> str:
    return " (unsteady ceiling)" if entry["figures"].get("spread", 0.0) > STEADY else ""


def operators(bench: Section) -> Iterable[Cells]:
    for name, entry in measured(bench, ""):
        f = entry["figures"]
        if "us" in f:
            more = f"{f['bytes'] / 1e6:.3f} MB, {'from memory' if f['cold'] else 'in the cache'}"
            yield name, f"{f['us']:.2f} µs{age(entry)}", of_ceiling(f, entry), "", more


def trainings(train: Section) -> Iterable[Cells]:
    for name, entry in measured(train, "training "):
        f = entry["figures"]
        yield name, f"{f['tokens_per_s']:,.0f} tokens/s{age(entry)}", f"MFU {percent(f['mfu'])}", "", gib(f["peak_bytes"])


def rivals(train: Section) -> Iterable[Cells]:
    """Forward, loss and backward of another toolkit's module and of ours. Memory: beyond weights and states."""
    for name, entry in measured(train, "rival "):
        f = entry["figures"]
        more = f"{gib(f['ours_bytes'])}, theirs {gib(f['theirs_bytes'])}"
        yield name, f"{f['ours_tokens_per_s']:,.0f} tokens/s{age(entry)}", "", f"{f['times']:.2f} times theirs", more


def losses(train: Section) -> Iterable[Cells]:
    for name, entry in measured(train, "loss "):
        f = entry["figures"]
        more = f"{percent(f['fused_bytes'] / f['plain_bytes'])} of its memory"
        yield name, f"{f['fused_ms']:.1f} ms{age(entry)}", "", f"{f['plain_ms'] / f['fused_ms']:.2f} times plain torch", more


def drafters(train: Section) -> Iterable[Cells]:
    for name, entry in measured(train, "drafter "):
        f = entry["figures"]
        more = f"loss {f['first_loss']:.3f} to {f['last_loss']:.3f} in {f['steps']} steps"
        yield f"training {name}", f"{f['tokens_per_s']:,.0f} tokens/s{age(entry)}", "", "", more


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def material(real: Section) -> Iterable[str]:
    """The training data of the drafters' target, and its output."""
    found = {name: entry["figures"] for name, entry in measured(real, "real ")}
    if len(found) == 3:
        text, target, data = found["real text"], found["real target"], found["real data"]
        yield (
            f"A target trained on the spot{age(real['real target'])}: {target['parameters']:,} parameters, "
            f"{target['trained_tokens']:,} tokens of {text['files']:,} Python sources ({text['tokens']:,} tokens, "
            f"{text['vocabulary']:,} in the vocabulary) in {target['seconds']:.0f} s, {target['tokens_per_s']:,.0f} tokens/s; "
            f"loss {target['first_loss']:.2f} to {target['last_loss']:.2f}, on text set apart {number(target['held_loss'])}. "
            f"It wrote {data['conversations']:,} continuations, {data['written_tokens']:,} tokens.\n"
        )


def distilled(real: Section) -> list[str]:
    """One row for each recipe, the highest tau first; those that failed last. Speedups are those of the timed prompts."""
    names = ("recipe", "tau", "expected", "alpha by position", "nodes", "timed tau", "speedup", "batch 8", "sampled tau")
    rows = table(*names, "sampled speedup", "exact", "loops", "parameters", "steps", "training tokens/s")
    for name, entry in sorted(measured(real, "distil "), key=lambda pair: -pair[1]["figures"]["tau"]):
        f = entry["figures"]
        alpha, (alone, *_, last) = " ".join(number(a) for a in f["alpha"][:6]), list(f["batches"].values())
        sampled = next(iter(f["sampled"].values()), {})
        speed = (number(alone["tau"]), f"{number(alone['speedup'])}{age(entry)}", number(last["speedup"]))
        speed = (*speed, number(sampled.get("tau")), number(sampled.get("speedup")), f["exact"], f["loops"])
        how = (f"{f['parameters']:,}", f["steps"], number(f["tokens_per_s"], 0))
        shape = (number(f["tau"]), number(f["expected_tau"]), alpha, number(f["verify_nodes"], 1))
        rows.append(row(name.removeprefix("distil "), *shape, *speed, *how))
    failed = [(name, entry) for name, entry in real.items() if entry["status"] == FAILED]
    width = rows[0].count("|") - 3
    return rows + [row(name.removeprefix("distil "), "failed", *[""] * width) for name, _ in failed]


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def measured(section: Section, start: str) -> list[tuple[str, dict[str, Any]]]:
    found = section.items()
    return [(name, e) for name, e in found if name.startswith(start) and e["status"] == PASSED and e["figures"]]


def age(entry: dict[str, Any]) -> str:
    """Marks figures that other sources gave."""
    return OLDER if older(entry) else ""


def percent(share: float | None) -> str:
    return "" if share is None else shown(share, "%")


def table(*names: str) -> list[str]:
    return [row(*names), row(*("---" for _ in names))]


def row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"
