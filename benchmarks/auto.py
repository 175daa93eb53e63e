"""What the choice of `drafttrain auto` costs against knowing the best family before: the table of docs/auto.md.

    python -m benchmarks.auto --out DIR [--minutes 6 12] [--candidates medusa eagle eagle3] [--overrides KEY=VALUE ...]

Every candidate has the budget to itself once, and then `auto` has half as much again for the race among them and its winner.
The drafters that come out are measured together, in turn, on the same prompts. --overrides: of the target, its data and the
prompts; without any, the embedded target. What is done is not repeated, so an ended call goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from drafttrain.cli.config import compose_run
from drafttrain.commands.measure import measure_run
from drafttrain.core.files import atomic_write_json
from drafttrain.measure import cells
from drafttrain.measure.runner import CheckpointRef
from drafttrain.runs.checkpoint_source import CheckpointSource

MORE = 1.5  # of a candidate's budget, for `auto`


def decided(name: str, candidates: list[str], minutes: float, overrides: list[str], out: Path) -> dict[str, Any]:
    """What `auto` decided, from its folder if it is done."""
    folder = out / f"{name}-{minutes:g}"
    files = list(folder.glob("auto/*/auto.json"))
    if not files:
        command = [sys.executable, "-m", "drafttrain", "auto", "--yes", f"budget={minutes * 60:.0f}s", "logger=none"]
        named = f"auto.candidates=[{','.join(candidates)}]"
        settings = [named, "auto.batch_sizes=[1]", f"output={folder}", *overrides]
        subprocess.run([*command, *settings], check=True)
        files = list(folder.glob("auto/*/auto.json"))
    found: dict[str, Any] = json.loads(files[0].read_text(encoding="utf-8"))
    return found


def row(minutes: float, candidates: list[str], overrides: list[str], out: Path) -> dict[str, Any]:
    """One budget: every candidate alone, `auto` among them, and all of their drafters measured together."""
    file = out / f"row-{minutes:g}.json"
    if file.is_file():
        known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return known
    auto = decided("auto", candidates, MORE * minutes, overrides, out)  # first: its budget may be too short
    results = {name: decided(name, [name], minutes, overrides, out) for name in candidates} | {"auto": auto}
    settings = ["measure.batch_sizes=[1]", "measure.transformers=false", "measure.minutes=3", *overrides]
    options = compose_run(None, settings).options
    loaded = CheckpointSource.of(results["auto"]["checkpoint"]).load(options.target)
    refs = [CheckpointRef(name, Path(result["checkpoint"]), None) for name, result in results.items()]
    report = measure_run(loaded, refs, options, out / f"together-{minutes:g}", Console())
    speedups = {entry["name"]: entry["speedup"] for entry in report["checkpoints"] if entry["tuned"]}
    found = {
        "minutes": minutes,
        "chose": results["auto"]["recipe"],
        "predicted": results["auto"]["predicted"]["value"],
        "measured": results["auto"]["measured"]["1"],
        "speedups": speedups,
    }
    atomic_write_json(file, found)
    return found


def table(rows: list[dict[str, Any]], candidates: list[str]) -> str:
    """Speedups, all of drafters that were measured together; the last two columns are of `auto`'s own report."""
    names = ("minutes each", *(f"always {name}" for name in candidates), "auto", "it chose", "auto / best")
    lines = []
    for each in rows:
        speedups = each["speedups"]
        best = max(speedups[name] for name in candidates)
        shown = [f"{speedups[name]:.2f}x" for name in (*candidates, "auto")]
        predicted = f"{each['predicted']:.2f}x", f"{each['measured']:.2f}x"
        lines.append((f"{each['minutes']:g}", *shown, each["chose"], f"{speedups['auto'] / best:.2f}", *predicted))
    return cells.rows((*names, "predicted", "measured"), lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, nargs="+", default=[6.0, 12.0])
    parser.add_argument("--candidates", nargs="+", default=["medusa", "eagle", "eagle3"])
    parser.add_argument("--overrides", nargs="*", default=[])
    arguments = parser.parse_args(argv)
    out = arguments.out.resolve()
    rows = [row(minutes, arguments.candidates, arguments.overrides, out) for minutes in arguments.minutes]
    text = table(rows, arguments.candidates)
    (out / "regret.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
