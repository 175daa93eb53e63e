"""One drafter distilled by `drafttrain fit`, in a process that outlives it: the worker of `real_2.py`."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from drafttrain.targets import TargetOptions
from drafttrain.targets.load import load_target

PROBED = "probe"  # folder of the short run that measures the training speed
SAMPLE = 512  # conversations that it reads at most, without those held out


@dataclass(frozen=True, slots=True)
class Asked:
    """The worker's task."""

    recipe: str
    overrides: tuple[str, ...]  # of both runs
    output: Path
    probe: int  # steps of the short run
    seconds: float  # of training
    target: TargetOptions
    threads: int | None = None  # of torch; None: its default


def distil(asked: Asked) -> dict[str, Any]:
    """The drafter's row. Output goes to `log.txt` meanwhile. Raises RuntimeError where the command fails."""
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    stand_in()
    shutil.rmtree(asked.output, ignore_errors=True)
    with logged(asked.output / "log.txt"):
        steps = steps_for(asked)
        folder = fitted(asked, asked.output, [f"train.steps={steps}", f"train.checkpoint_every={steps}"])
        return row(asked, folder) | {"steps": steps}


def stand_in() -> None:
    """Import this checkout's settings and recipes as the package's, where it is not installed."""
    for name in ("conf", "recipes"):
        if find_spec(f"drafttrain.{name}") is None:
            sys.modules[f"drafttrain.{name}"] = import_module(name)


@contextmanager
def logged(path: Path) -> Iterator[None]:
    """Meanwhile stdout and stderr, those of libraries and compilers too, go to this file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [os.dup(number) for number in (1, 2)]
    with path.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
            os.close(old)


def fitted(asked: Asked, output: Path, settings: Sequence[str]) -> Path:
    """Run `fit` and return the run's directory."""
    from drafttrain.cli.main import run

    command = ["fit", f"recipe={asked.recipe}", *asked.overrides, *settings, f"output={output}"]
    if code := run(command):
        raise RuntimeError(f"drafttrain fit ended with exit code {code}")
    gc.collect()
    return next(path.parent for path in (output / asked.recipe).glob("*/run.json"))


def steps_for(asked: Asked) -> int:
    """The steps that fit in the seconds, by the speed of a short run, whose first half builds and tunes."""
    output = asked.output / PROBED
    settings = [f"train.steps={asked.probe}", f"train.checkpoint_every={asked.probe}", f"data.limit={SAMPLE}", "measure=off"]
    folder = fitted(asked, output, settings)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rate = median(json.loads(line)["tokens_per_s"] for line in lines[len(lines) // 2 :])
    made = next((folder / "checkpoints").glob("*/trainer.json"))
    each = json.loads(made.read_text(encoding="utf-8"))["tokens"] / asked.probe
    shutil.rmtree(output)
    return max(asked.probe, int(asked.seconds * rate / each))


def row(asked: Asked, folder: Path) -> dict[str, Any]:
    """The row of `benchmarks/families.py`, and figures by batch size, and the drafter's dtype."""
    from benchmarks.families import best_of, figures, report_of
    from drafttrain.drafters.checkpoint import load_drafter  # with packages that a machine may lack until they are unpacked

    report = report_of(folder)
    entry = best_of(report)
    found = figures(asked.recipe, report, entry)
    keys = ("speedup", "tau", "draft_cost", "verify_cost", "host_ms", "plain_step_ms", "tokens_per_s", "baseline_tokens_per_s")
    batches = {str(s["value"]): {k: s[k] for k in keys} for s in entry["slices"] if s["by"] == "batch_size"}
    drafter, _ = load_drafter(folder / "checkpoints" / entry["name"].split()[0], load_target(asked.target).target)
    types = {str(p.dtype).removeprefix("torch.") for p in drafter.parameters()}
    precision = next(o.split("=")[1] for o in reversed(asked.overrides) if o.startswith("train.precision="))
    more = {"loops": entry["monitors"]["loops"], "unexplained": entry["unexplained"], "graphs": entry["graphs"]}
    more |= {"flags": entry["flags"], "notes": report["measure"]["notes"], "loss": report["training"]["final_loss"]}
    return found | more | {"batches": batches, "trained_in": precision, "decodes_in": " ".join(sorted(types))}
