"""The effect of training settings: expected tau on held-out conversations after equal steps, one row for each setting.

    python -m benchmarks.quality --recipes eagle3 medusa --steps 300 600 --vary "" "train.optimizer=muon train.lr=5e-3"
                                 [--target DIR --data DIR --template FILE] [--seeds 0 1] [--out DIR] [--every 500]
                                 [--table] [--plot FILE]

Each recipe is trained with each of the overrides in `--vary` ("": none) and each number of steps, on the same batches. Runs
that exist are not repeated, and one that was stopped continues from its last checkpoint (--every: steps between two of them);
--table prints the existing ones. --plot: a picture of the curves, expected tau by steps. --target: a transformers model
directory that replaces the embedded target, with conversations that it wrote (`drafttrain prepare`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafttrain.cli import main as cli
from drafttrain.commands import fit

assert fit  # loaded once, before processes are forked

ROWS = "rows.jsonl"
DASHES = ("--", "-", ":", "-.")


@dataclass(frozen=True)
class Setting:
    """One training run."""

    target: str
    recipe: str
    steps: int
    vary: str  # overrides of the recipe, separated by blanks
    seed: int


def settings(given: argparse.Namespace) -> Iterator[Setting]:
    """The requested settings, with each recipe's variants next to each other."""
    name = Path(given.target).name if given.target else "embedded"
    for steps, recipe, vary, seed in itertools.product(given.steps, given.recipes, given.vary, given.seeds):
        yield Setting(name, recipe, steps, vary.strip(), seed)


def trained(setting: Setting, given: argparse.Namespace) -> dict[str, Any]:
    """The figures of a new training run."""
    folder = given.out / "run"
    command = ["fit", f"recipe={setting.recipe}", f"output={folder}"]
    command += [f"train.steps={setting.steps}", f"train.seed={setting.seed}", "resume=auto"]
    command += [f"train.checkpoint_every={min(setting.steps, given.every or setting.steps)}"]
    command += ["measure=off", "logger=none", "train.keep_last=1", *given.also]
    if given.target:
        command += ["target=hf", f"target.path={given.target}", f"data.path={given.data}"]
        command += [f"on_target=embedded_{setting.recipe}"]  # a small target, too
        command += [f"data.template={given.template}"] if given.template else []
    before, said = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, given.out / "run.log"
    process = multiprocessing.get_context("fork").Process(target=_fit, args=([*command, *setting.vary.split()], said))
    process.start()
    process.join()
    if process.exitcode:
        return asdict(setting) | {"error": said.read_text(encoding="utf-8").strip()[-300:]}
    checkpoint = last_checkpoint(folder / setting.recipe, setting.steps)
    progress = json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8"))
    last = (checkpoint.parent.parent / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    return asdict(setting) | {
        "expected_tau": progress["expected_tau"],
        "loss": json.loads(last)["loss"],
        "cpu_seconds": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before, 1),
        "checkpoint": str(checkpoint),
    }


def last_checkpoint(folder: Path, step: int) -> Path:
    """The newest checkpoint of this step, of all runs in the folder: the newest run may be another, which was stopped."""
    found = (path for path in folder.glob("*/checkpoints/step-*") if int(path.name.split("-")[1]) == step)
    return max(found, key=lambda path: path.stat().st_mtime_ns)


def _fit(command: list[str], said: Path) -> None:
    """Train in a separate process, whose output goes to this file."""
    with said.open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.exit(cli.run(command))


def rows_of(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("target", "recipe", "steps", "vary", "seed"))


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each recipe and variant, a column for each target and number of steps; seeds are averaged."""
    columns = sorted({(row["target"], row["steps"]) for row in rows})
    lines = ["| recipe | settings | " + " | ".join(f"{target} {steps}" for target, steps in columns) + " |"]
    lines.append("|---" * (len(columns) + 2) + "|")
    for recipe, vary in sorted({(row["recipe"], row["vary"]) for row in rows}):
        cells = []
        for column in columns:
            found = [
                row["expected_tau"]
                for row in rows
                if (row["recipe"], row["vary"], (row["target"], row["steps"])) == (recipe, vary, column)
                and "expected_tau" in row
            ]
            cells.append(f"{sum(found) / len(found):.3f}" if found else "")
        lines.append(f"| {recipe} | {vary or 'as it is'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Expected tau by steps, a line for each target, recipe and variant; seeds are averaged."""
    lines: dict[str, dict[int, list[float]]] = {}
    for row in sorted(rows, key=lambda row: (row["target"], row["recipe"], row["vary"])):
        if "expected_tau" in row:
            parts = ("" if row["target"] == "embedded" else row["target"], row["recipe"], row["vary"])
            line = lines.setdefault(" ".join(part for part in parts if part), {})
            line.setdefault(row["steps"], []).append(row["expected_tau"])
    draw(lines, path)


def draw(lines: Mapping[str, Mapping[int, Sequence[float]]], path: Path) -> None:
    """A picture of these lines: by label, the values after each number of steps, whose means are drawn.

    Labels that are equal up to a comma have one colour; the words after it decide the dashes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(label.partition(",")[0] for label in lines))}
    dashes = dict(zip(dict.fromkeys(label.partition(",")[2] for label in lines), DASHES, strict=False))
    for label, line in lines.items():
        (name, _, kind), steps = label.partition(","), sorted(line)
        values = [sum(line[one]) / len(line[one]) for one in steps]
        axis.plot(steps, values, marker="o", color=colours[name], linestyle=dashes.get(kind, "-"), label=label)
    axis.set_xscale("log")
    ticks = sorted({steps for line in lines.values() for steps in line})
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], minor=False)
    axis.minorticks_off()
    axis.set_xlabel("training steps, each run with its own schedule to the end")
    axis.set_ylabel("expected tau, held-out conversations")
    figure.legend(loc="outside right upper", frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=[])
    parser.add_argument("--steps", type=int, nargs="+", default=[300])
    parser.add_argument("--vary", nargs="+", default=[""])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--also", nargs="*", default=[], help="overrides of all, not part of a row's name")
    parser.add_argument("--target")
    parser.add_argument("--data")
    parser.add_argument("--template")
    parser.add_argument("--out", type=Path, default=Path("outputs/quality"))
    parser.add_argument("--every", type=int, help="steps between checkpoints, from which a stopped run continues")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / ROWS
    wanted, failed = [] if given.table else list(settings(given)), False
    for setting in wanted:
        if key(asdict(setting)) in {key(row) for row in rows_of(file) if "expected_tau" in row}:
            continue
        row = trained(setting, given)
        failed |= "error" in row
        with file.open("a", encoding="utf-8") as opened:
            opened.write(json.dumps(row) + "\n")
        found = row.get("error") or f"expected tau {row['expected_tau']:.3f}  {row['cpu_seconds']:.0f} CPU seconds"
        print(f"{setting.target} {setting.recipe} {setting.steps} {setting.vary or 'as it is'}: {found}", flush=True)
    print(table(rows_of(file)))
    if given.plot is not None:
        plot(rows_of(file), given.plot)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
