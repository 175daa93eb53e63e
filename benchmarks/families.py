"""All families compared with the same budget: the table and the plot of docs/families/README.md.

    python benchmarks/families.py [--steps 1200] [--nodes 18] [--only NAME ...] [--out DIR] [--doc FILE]
                                  [--target DIR --data FILE --prompts FILE]

Runs `drafttrain fit recipe=NAME` for every recipe of the embedded target, with equal data, steps, batch and tree nodes. Runs
that exist with these settings are not repeated. --target: a transformers model directory that replaces the embedded target,
with conversations that it wrote and prompts for it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from drafttrain.measure import cells
from drafttrain.measure.plots import INK, colour, panels, save
from drafttrain.measure.report import FILE, read_report

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "families" / "README.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
SHOWN = ("recipe", "tau", "c_d", "c_v", "speedup", "parameters")  # on the page; families.md of --out has every column
BATCH = 4  # conversations of a step
MINUTES = 2.0  # of timing, for every recipe


@dataclass(frozen=True)
class Budget:
    steps: int
    nodes: int
    minutes: float
    target: str | None
    data: str | None
    prompts: str | None

    def overrides(self) -> list[str]:
        given = [f"train.steps={self.steps}", f"train.checkpoint_every={self.steps}", f"train.global_batch={BATCH}"]
        given += [f"train.micro_batch={BATCH}", f"decode.tree_nodes={self.nodes}", f"measure.minutes={self.minutes}"]
        given += ["measure.batch_sizes=[1]", "measure.transformers=false", "logger=none"]
        given += [] if self.target is None else ["target=hf", f"target.path={self.target}"]
        given += [] if self.data is None else [f"data.path={self.data}"]
        return given + ([] if self.prompts is None else [f"measure.prompts={self.prompts}"])


def recipes() -> list[str]:
    """The recipes of the embedded target."""
    found = []
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        body = yaml.safe_load(path.read_text(encoding="utf-8"))
        if "target" not in body and not any("override /target" in entry for entry in body.get("defaults", [])):
            found.append(path.stem)
    return found


def run(name: str, budget: Budget, out: Path) -> Path:
    """The run directory of this recipe with this budget. The run is made unless it exists."""
    marker = out / name / "budget.json"
    settings = [name, *budget.overrides()]
    if marker.exists() and json.loads(marker.read_text(encoding="utf-8"))["settings"] == settings:
        return Path(json.loads(marker.read_text(encoding="utf-8"))["run"])
    command = [sys.executable, "-m", "drafttrain", "fit", f"recipe={name}", f"output={out}", "resume=auto", "measure.tune=off"]
    subprocess.run([*command, *budget.overrides()], check=True)
    newest = max((path.parent for path in (out / name).glob(f"*/{FILE}")), key=lambda path: path.name)
    marker.write_text(json.dumps({"settings": settings, "run": str(newest)}), encoding="utf-8")
    return newest


def rows_of(name: str, folder: Path) -> list[dict[str, Any]]:
    """The rows of the checkpoint after training, and of an earlier one."""
    report = read_report(folder / FILE)
    last = max(entry["step"] for entry in report["checkpoints"])
    rows = []
    for entry in report["checkpoints"]:
        said = " ".join([name, *entry["name"].split()[1:], *(["untrained"] if entry["step"] == 0 < last else [])])
        rows.append(figures(said, report, entry))
    return rows


def figures(name: str, report: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """The figures of one checkpoint that the report has."""
    training = (report["training"] or {}) if entry["step"] else {}
    return {
        "family": name,
        **{key: entry[key] for key in ("tau", "expected_tau", "draft_cost", "verify_cost", "verify_nodes", "speedup")},
        "exact": f"{entry['exact_matches']}/{entry['prompts']}",
        "alpha": [a[0] for a in entry["alpha_by_position"]],
        "parameters": entry["parameters"],
        "tokens_per_s": training.get("tokens_per_s"),
    }


def cells_of(row: dict[str, Any]) -> dict[str, str]:
    """What the table says of one recipe, by column."""
    return {
        "recipe": row["family"],
        "tau": cells.number(row["tau"]),
        "expected": cells.number(row["expected_tau"]),
        "alpha by position": " ".join(cells.number(a) for a in row["alpha"][:6]),
        "c_d": cells.number(row["draft_cost"]),
        "c_v": cells.number(row["verify_cost"]),
        "nodes": cells.number(row["verify_nodes"], 1),
        "speedup": cells.number(row["speedup"]),
        "exact": row["exact"],
        "parameters": cells.count(row["parameters"]),
        "training tokens/s": cells.number(row["tokens_per_s"], 0),
    }


def table(rows: list[dict[str, Any]], columns: Sequence[str] | None = None) -> str:
    """One line a recipe, the greatest tau first. columns: None shows all."""
    lines = [cells_of(row) for row in sorted(rows, key=lambda r: -r["tau"])]
    shown = columns or list(lines[0])
    return cells.rows(shown, [[line[name] for name in shown] for line in lines])


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    rows = sorted(rows, key=lambda r: r["tau"])
    names, place = [r["family"] for r in rows], range(len(rows))
    figure, (axes,) = panels(1, 8.0, height=0.45 * len(rows) + 1.4)
    axes.barh(place, [r["tau"] for r in rows], color=colour(0), label="tau, tokens per decode step")
    axes.plot([r["speedup"] or 0.0 for r in rows], place, "o", color=colour(1), label="speedup over plain decoding")
    axes.axvline(1.0, color=INK, linewidth=0.8)
    axes.set_yticks(list(place), names)
    axes.set_xlim(0)
    axes.margins(y=0.01)
    axes.legend(loc="lower right", frameon=False)
    save(figure, path)


def write(doc: Path, text: str) -> None:
    """Write the table between the markers of the page."""
    page = doc.read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    doc.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--nodes", type=int, default=18)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--target")
    parser.add_argument("--data")
    parser.add_argument("--prompts")
    parser.add_argument("--out", type=Path, default=Path("outputs/families"))
    parser.add_argument("--doc", type=Path, help="the page with the table; of the embedded target docs/families/README.md")
    given = parser.parse_args()
    doc = given.doc or (PAGE if given.target is None and given.only is None else None)
    budget = Budget(given.steps, given.nodes, given.minutes, given.target, given.data, given.prompts)
    names = given.only or recipes()
    folders, failed = {}, []
    for name in names:
        try:
            folders[name] = run(name, budget, given.out)
        except subprocess.CalledProcessError:  # its message is printed already; the other families go on
            failed.append(name)
    if not folders:
        return 1
    rows = [row for name, folder in folders.items() for row in rows_of(name, folder)]
    text = table(rows)
    print(text)
    (given.out / "families.md").write_text(text + "\n", encoding="utf-8")
    (given.out / "families.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    plot(rows, given.out / "families.png")
    if doc is not None:
        spent = f"{budget.steps} steps of {BATCH} conversations, trees of {budget.nodes} nodes"
        plot(rows, doc.parent / "families.png")
        command = f"make families STEPS={budget.steps} NODES={budget.nodes}"
        command += "" if budget.minutes == MINUTES else f' FLAGS="--minutes {budget.minutes:g}"'
        note = f"{spent}, {torch.get_num_threads()} CPU threads; `{command}`"
        trained = [row for row in rows if "untrained" not in row["family"]]
        write(doc, f"{note}\n\n{table(trained, SHOWN)}\n\n![tau and speedup by recipe](families.png)")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
