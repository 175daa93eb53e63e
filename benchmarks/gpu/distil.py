"""One drafter distilled by `drafttrain fit`, in a process of its own: the worker of `real_2.py`.

It imports at once, prepares when the data is there, and waits for its turn on the GPU: a line with the seconds that it trains
for. So drafters train and are measured alone, and everything else of theirs overlaps.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO
from unittest import mock

import torch

from drafttrain.targets import TargetOptions
from drafttrain.targets.devices import device_of

READY = "ready"  # said when it waits for its turn; its last line is the drafter's row


@dataclass(frozen=True, slots=True)
class Asked:
    """The worker's task."""

    recipe: str
    overrides: tuple[str, ...]
    output: Path
    probe: int  # steps by which the number of all is found
    target: TargetOptions
    threads: int | None = None  # of torch; None: its default

    def written(self) -> str:
        return json.dumps(asdict(self), default=str)

    @staticmethod
    def read(text: str) -> Asked:
        given = json.loads(text)
        kept = {"overrides": tuple(given["overrides"]), "output": Path(given["output"])}
        return Asked(**given | kept | {"target": TargetOptions(**given["target"])})

    @property
    def log(self) -> Path:
        return self.output / "log.txt"


def distil(asked: Asked, given: TextIO, said: TextIO) -> dict[str, Any]:
    """The drafter's row. Ends the process where the command fails."""
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    stand_in()
    sys.modules["matplotlib"] = None  # type: ignore[assignment]  # a report's plots would take seconds of the turn
    import_module("drafttrain.cli.config")
    command = import_module("drafttrain.commands.fit")
    command.join_world(device_of(asked.target.device))  # DeepSpeed and its group, which the command finds
    given.readline()  # the data is there

    def turn() -> float:
        print(READY, file=said, flush=True)
        return float(given.readline())

    with mock.patch.object(command, "Trainer", partial(timed(command.Trainer), turn)):
        folder = fitted(asked, [f"train.steps={asked.probe}", f"train.checkpoint_every={1 << 30}"])
    return row(asked, folder)


def timed(trainer: Any) -> Any:
    """A trainer that waits for its turn, and trains for a given time: the speed of the first steps gives the number of all."""

    class Timed(trainer):  # type: ignore[misc]
        def __init__(self, turn: Callable[[], float], *given: Any) -> None:
            super().__init__(*given)
            self.turn, self.probing, self.ended = turn, True, list[float]()

        def train(self, *given: Any) -> Any:
            ends = self.turn() + perf_counter()
            super().train(*given)
            self.probing, first = False, self.ended[len(self.ended) // 2 - 1 :]  # the steps before build and tune
            each = (first[-1] - first[0]) / (len(first) - 1)
            self.job.train.steps += max(1, int((ends - first[-1]) / each))
            return super().train(*given)

        def _step(self, *given: Any) -> Any:
            found = super()._step(*given)
            self.ended.append(perf_counter())
            return found

        def _checkpoint(self, *given: Any, **more: Any) -> Any:
            return True if self.probing else super()._checkpoint(*given, **more)

    return Timed


def stand_in() -> None:
    """Import this checkout's settings and recipes as the package's, where it is not installed."""
    for name in ("conf", "recipes"):
        if find_spec(f"drafttrain.{name}") is None:
            sys.modules[f"drafttrain.{name}"] = import_module(name)


def fitted(asked: Asked, settings: Sequence[str]) -> Path:
    """Run `fit` and return the run's directory."""
    from drafttrain.cli.main import run

    recipe = (f"recipe={asked.recipe}", f"on_target=embedded_{asked.recipe}")  # short training
    command = ["fit", *recipe, *asked.overrides, *settings, f"output={asked.output}", "measure.tune=off"]
    if code := run(command):
        sys.exit(code)  # the log's last line says why
    return next(path.parent for path in (asked.output / asked.recipe).glob("*/report.json"))


def row(asked: Asked, folder: Path) -> dict[str, Any]:
    """The row of `benchmarks/families.py`, figures by batch size and by temperature, and the drafter's dtypes."""
    from benchmarks.families import figures
    from drafttrain.measure.flags import best_entry
    from drafttrain.measure.report import FILE, read_report

    report = read_report(folder / FILE)
    entry = best_entry(report)
    found = figures(asked.recipe, report, entry)
    keys = ("speedup", "tau", "draft_cost", "verify_cost", "host_ms", "plain_step_ms", "tokens_per_s", "baseline_tokens_per_s")
    slices = {
        by: {str(s["value"]): {k: s[k] for k in keys} for s in entry["slices"] if s["by"] == by}
        for by in ("batch_size", "temperature")
    }
    precision = next(o.split("=")[1] for o in reversed(asked.overrides) if o.startswith("train.precision="))
    more = {"loops": entry["monitors"]["loops"], "unexplained": entry["unexplained"], "graphs": entry["graphs"]}
    more |= {"flags": entry["flags"], "notes": report["measure"]["notes"], "loss": report["training"]["final_loss"]}
    more |= {"steps": report["training"]["steps"], "seconds": entry["training"]["seconds"], "trained_in": precision}
    # a drafter decodes in its target's precision (`drafters/checkpoint.py`)
    more |= {"batches": slices["batch_size"], "sampled": slices["temperature"], "decodes_in": report["target"]["dtype"]}
    return found | more


@contextmanager
def logged(path: Path) -> Iterator[tuple[TextIO, TextIO]]:
    """Yield streams of the first stdin and stdout. Meanwhile stdout and stderr, those of libraries and compilers too, go to
    this file, and stdin is empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    given, said = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, other in ((0, nothing), (1, file), (2, file)):
        os.dup2(other, number)
    try:
        yield given, said
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def main() -> None:
    asked = Asked.read(sys.argv[1])
    with logged(asked.log) as (given, said):
        found = distil(asked, given, said)
        print(json.dumps(found), file=said, flush=True)


if __name__ == "__main__":
    main()
