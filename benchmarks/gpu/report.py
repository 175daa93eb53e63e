"""The results of all GPUs as tables, between two markers of a page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu.goals import GOALS, shown
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.results import BLOCKED, FAILED, FOLDER, PASSED, Section, older, visible
from benchmarks.gpu.sources import ROOT
from drafttrain.core.files import atomic_write_text

PAGE = ROOT / "docs" / "performance.md"
BEGIN = "<!-- figures: written by the make gpu-... commands -->"
END = "<!-- end of figures -->"
NONE = "not measured yet"
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
    facts, known = known.get("machine", {}), visible(known)
    said = [f"{name} {facts[name]}" for name in ("memory", "cuda", "torch", "triton", "transformers") if name in facts]
    yield f"### {facts.get('name', 'No GPU so far')}\n"
    if facts.get("name") == "rehearsal":
        yield "A rehearsal on a CPU: no figures.\n"
    if said:
        yield ", ".join(said) + f". Checks: {counted(known.get('check', {}))}.\n"
    bench, train = known.get("bench", {}), known.get("train", {})
    yield from ceilings(bench)
    yield goals(known)
    yield from titled("Steps", steps(bench))
    yield from titled("Drafters' steps", drafting(bench))
    yield from titled("Compared with transformers", against_transformers(bench))
    yield from titled("Attention of a prompt", prefills(bench))
    yield from titled("Attention of a prompt's chunk", prompt_chunks(bench))
    yield from titled("Operators", operators(bench))
    yield from titled("Training steps", trainings(train))
    yield from titled("Training steps of others", rivals(train))
    yield from titled("The training loss", losses(train))
    yield from titled("Training", drafters(train))
    yield from material(known.get("real-1", {}))
    yield from titled("Drafters distilled from it", distilled(known.get("real-2", {})))
    yield from titled("Decode steps outside a graph", uncaptured(known.get("check", {})))


def titled(title: str, rows: list[str]) -> list[str]:
    """A table with its title; nothing for a table without rows."""
    return [f"{title}:\n\n" + "\n".join(rows) + "\n"] if len(rows) > 2 else []


def counted(check: Section) -> str:
    counts = Counter(entry["status"] for entry in check.values())
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "none"


def goals(known: dict[str, Section]) -> str:
    """The goals that were measured or could not be, and how many are left."""
    cells = list(verdicts(known))
    shown = [row(*each) for each in cells if each[2] != NONE or each[3]]
    left = f"\nFurther goals, {NONE}: {len(cells) - len(shown)}.\n" if len(shown) < len(cells) else ""
    return "\n".join([*table("goal", "wanted", "measured", ""), *shown]) + f"\n{left}"


def verdicts(known: dict[str, Section]) -> Iterable[tuple[str, str, str, str]]:
    """(goal, bound, measured value, verdict) of each goal, from `visible` results."""
    for goal in GOALS:
        value, entry = goal.value(known), known.get(goal.section, {}).get(goal.case, {})
        if value is not None:
            measured = shown(value, goal.unit) + age(entry)
            yield goal.text, goal.wanted, measured, "reached" if goal.reached(value) else "missed"
        else:
            ended = {BLOCKED: "blocked", FAILED: "failed"}.get(entry.get("status", ""), "")
            yield goal.text, goal.wanted, NONE, f"{ended}: {entry['note']}" if ended else ""


def goals_text(known: dict[str, Any]) -> str:
    """The goals as text for a terminal."""
    cells = [("goal", "wanted", "measured", ""), *verdicts(visible(known))]
    widths = [max(len(row[i]) for row in cells) for i in range(3)]
    return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]).rstrip() for row in cells)


def ceilings(bench: Section) -> Iterable[str]:
    """The best that any case saw, and how far the windows of one case were apart."""
    seen = [entry["figures"] for _, entry in measured(bench, "") if "read_bandwidth" in entry["figures"]]
    if seen:
        best = {name: max(f[name] for f in seen) for name in ("copy_bandwidth", "read_bandwidth", "product_flops")}
        yield (
            f"Ceilings: copy {best['copy_bandwidth'] / 1e12:.2f} TB/s, read {best['read_bandwidth'] / 1e12:.2f} TB/s, bfloat16 "
            f"product {best['product_flops'] / 1e12:.0f} TFLOP/s; windows of one case differ by up to "
            f"{percent(max(f['spread'] for f in seen))}.\n"
        )


def steps(bench: Section) -> list[str]:
    """One row for each model, batch, context and node count."""
    names = ("model", "batch", "context", "nodes", "ms", "of the floor", "/ plain", "outside the target")
    rows = table(*names, "outside products and attention", "host waits", "capture")
    for name, entry in measured(bench, "step "):
        model, batch, context, *how = (part.split("=")[-1] for part in name.split()[1:])
        model = with_weights(model, name)
        context = " ".join([context, *(word for word in how if word in ("ragged", "sampled"))])
        for nodes, found in entry["figures"].items():
            if isinstance(found, dict):
                rest = percent(1.0 - found["products"] - found["attention"]) if "products" in found else ""
                waits = f"{found['waits']} in {found['replays']}" if "waits" in found else ""
                capture = f"{found['capture_seconds']:.1f} s, {found['capture_bytes'] / 2**20:.0f} MiB"
                floor, outside = floor_of(found, entry), percent(found.get("outside_target"))
                times = (f"{found['ms']:.3f}{age(entry)}", floor, f"{found['over_plain']:.3f}", outside)
                rows.append(row(model, batch, context, nodes, *times, rest, waits, capture))
    return rows


def drafting(bench: Section) -> list[str]:
    """One row for each family, the cheapest step first."""
    names = ("family", "model", "context", "draft length", "nodes", "parameters", "ms", "draft, ms", "plain, ms", "/ plain")
    rows = table(*names, "of the floor")
    for name, entry in sorted(measured(bench, "drafting "), key=lambda pair: pair[1]["figures"]["over_plain"]):
        f, (family, model, context, *_) = entry["figures"], name.removeprefix("drafting ").split()
        shape = (
            family,
            with_weights(model, name),
            context.removeprefix("context="),
            f["draft_length"],
            f["nodes"],
            f"{f['parameters']:,}",
        )
        times = (f"{f['ms']:.3f}{age(entry)}", number(f.get("draft_ms"), 3), f"{f['plain_ms']:.3f}", f"{f['over_plain']:.3f}")
        rows.append(row(*shape, *times, floor_of(f, entry)))
    return rows


def with_weights(model: str, case: str) -> str:
    """The model's name with how it is quantised, from a case's name."""
    return " ".join([model, *(word.removeprefix("weights=") for word in case.split() if word.startswith("weights="))])


def floor_of(found: dict[str, Any], entry: dict[str, Any]) -> str:
    """A share of the floor, marked where the ceiling moved while it was measured."""
    return percent(found.get("floor_share")) + (" (unsteady ceiling)" if entry["figures"].get("spread", 0.0) > STEADY else "")


def against_transformers(bench: Section) -> list[str]:
    rows = table("model", "context", "other", "ours, ms", "theirs, ms", "theirs / ours")
    for other in ("generate", "compiled loop"):
        for name, entry in measured(bench, f"{other} "):
            model, context = name.removeprefix(f"{other} ").split()
            ours, theirs = entry["figures"]["ours_ms"], entry["figures"]["theirs_ms"]
            size = context.removeprefix("context=")
            rows.append(row(model, size, other, f"{ours:.3f}{age(entry)}", f"{theirs:.3f}", f"{theirs / ours:.2f}"))
    return rows


def prefills(bench: Section) -> list[str]:
    """One row for each order of torch's kernels."""
    rows, found = [], measured(bench, "prefill attention")
    for _, entry in found:
        for order, f in entry["figures"].items():
            if not rows:
                rows = table("order", "kernel", *(f"{n} tokens, ms" for n in f["ms"]), "new length, ms", "again, ms")
            times = (number(ms, 3) for ms in f["ms"].values())
            rows.append(row(order + age(entry), f["kernel"], *times, number(f["first_ms"], 3), number(f["second_ms"], 3)))
    return rows


def prompt_chunks(bench: Section) -> list[str]:
    """One row for each order of torch's kernels and each prefix."""
    rows = table("order", "positions before", "ms", "with a mask, ms", "times faster")
    for _, entry in measured(bench, "prefill attention"):
        for order, f in entry["figures"].items():
            for prefix, own in f.get("chunks", {}).items():
                times = f"{number(own['ms'], 3)}{age(entry)}", number(own["masked_ms"], 3)
                rows.append(row(order, f"{int(prefix):,}", *times, f"{own['masked_ms'] / own['ms']:.1f}"))
    return rows


def operators(bench: Section) -> list[str]:
    rows = table("operator", "µs", "MB", "of the roofline", "inputs")
    for name, entry in measured(bench, ""):
        found = entry["figures"]
        if "us" in found:
            share, where = percent(found.get("roofline_share")), "from memory" if found["cold"] else "in the cache"
            rows.append(row(name, f"{found['us']:.2f}{age(entry)}", f"{found['bytes'] / 1e6:.3f}", share, where))
    return rows


def trainings(train: Section) -> list[str]:
    """The rows of the straightforward way are shown where not all fit in memory."""
    names = ("family", "target", "context", "rows", "tokens/s", "MFU", "GiB", "eager, tokens/s", "its GiB", "its rows")
    rows = table(*names, "times faster")
    for name, entry in measured(train, "training "):
        f, (family, model, context) = entry["figures"], name.removeprefix("training ").split()
        ours = (f["rows"], f"{f['tokens_per_s']:,.0f}{age(entry)}", percent(f["mfu"]), f"{f['peak_bytes'] / 2**30:.1f}")
        eager: tuple[object, ...] = ("out of memory", "", 0, "")
        if f["eager_rows"]:
            eager = (f"{f['eager_tokens_per_s']:,.0f}", f"{f['eager_bytes'] / 2**30:.1f}", f["eager_rows"], number(f["times"]))
        rows.append(row(family, model, context.removeprefix("context="), *ours, *eager))
    return rows


def rivals(train: Section) -> list[str]:
    """Forward, loss and backward of another toolkit's module and of ours. Memory: beyond weights and states."""
    names = ("other", "family", "target", "context", "rows", "ours, tokens/s", "theirs", "times faster")
    rows = table(*names, "ours, GiB", "theirs, GiB")
    for name, entry in measured(train, "rival "):
        f, (other, family, model, context) = entry["figures"], name.removeprefix("rival ").split()
        speed = (f"{f['ours_tokens_per_s']:,.0f}{age(entry)}", f"{f['theirs_tokens_per_s']:,.0f}", number(f["times"]))
        memory = (f"{f[f'{way}_bytes'] / 2**30:.1f}" for way in ("ours", "theirs"))
        rows.append(row(other, family, model, context.removeprefix("context="), f["rows"], *speed, *memory))
    return rows


def losses(train: Section) -> list[str]:
    rows = table("loss", "fused, ms", "plain torch, ms", "times faster", "fused, MiB", "plain torch, MiB", "of its memory")
    for name, entry in measured(train, "loss "):
        f = entry["figures"]
        times = (f"{f['fused_ms']:.1f}{age(entry)}", f"{f['plain_ms']:.1f}", f"{f['plain_ms'] / f['fused_ms']:.2f}")
        fused, plain = f["fused_bytes"], f["plain_bytes"]
        memory = (f"{fused / 2**20:.0f}", f"{plain / 2**20:.0f}", percent(fused / plain))
        rows.append(row(name.removeprefix("loss "), *times, *memory))
    return rows


def drafters(train: Section) -> list[str]:
    rows = table("family", "steps", "tokens/s", "first loss", "last loss")
    for name, entry in measured(train, "drafter "):
        found = entry["figures"]
        family, speed = name.removeprefix("drafter "), f"{found['tokens_per_s']:,.0f}{age(entry)}"
        rows.append(row(family, found["steps"], speed, f"{found['first_loss']:.3f}", f"{found['last_loss']:.3f}"))
    return rows


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


def uncaptured(check: Section) -> list[str]:
    """For drafters whose decode steps involve the host: the time that the GPU waits for it."""
    rows = table("case", "ms per step", "GPU idle, ms", "of the step")
    for name, entry in measured(check, "texts "):
        f = entry["figures"]
        if "host_gap_ms" in f:
            share = percent(f["host_gap_ms"] / f["round_ms"])
            rows.append(row(name, f"{f['round_ms']:.3f}{age(entry)}", f"{f['host_gap_ms']:.3f}", share))
    return rows


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def measured(section: Section, start: str) -> list[tuple[str, dict[str, Any]]]:
    found = section.items()
    return [(name, e) for name, e in found if name.startswith(start) and e["status"] == PASSED and e["figures"]]


def age(entry: dict[str, Any]) -> str:
    """Marks figures that other sources gave."""
    return " (older sources)" if older(entry) else ""


def percent(share: float | None) -> str:
    return "" if share is None else shown(share, "%")


def table(*names: str) -> list[str]:
    return [row(*names), row(*("---" for _ in names))]


def row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"
