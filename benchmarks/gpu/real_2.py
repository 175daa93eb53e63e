"""`make gpu-real-2`: drafters distilled from the target of `make gpu-real-1` by `drafttrain fit`, and their acceptance and
speed.

Every recipe trains for the same time. Acceptance and speed are then measured on prompts that neither the target nor a drafter
was trained on. Checks run before, as in `make gpu-bench`. Without the target or its data it refuses to run. A recipe that
fails does not affect the others' figures.
"""

from __future__ import annotations

import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from typing import Any

from benchmarks.gpu import check, report, steps, wheels
from benchmarks.gpu.distil import Asked, distil
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.real import Folder, MissingError, Part, Scale, lacking, scale_of, there
from benchmarks.gpu.suite import Job, RedError, SkipError, Suite
from benchmarks.gpu.throughput import modules_of
from drafttrain.targets import TargetOptions

SECTION = "real-2"
PROBE, REHEARSED = 24, 2  # steps of the short run
OPERATORS = (*steps.OPERATORS, "divergence")
LEAST = 90.0  # seconds that must be left for a recipe to begin
LIMIT = 150.0  # seconds of one recipe, all in all, after which its process is ended

# changes to the recipes, which are made for a target of 192 hidden units, for one of 1,024
RECIPES: dict[str, tuple[str, ...]] = {
    "medusa": ("train.lr=1e-3",),
    "eagle3": ("train.lr=5e-4", "drafter.taps=null"),
    "dflash": ("train.lr=6e-4", "drafter.block_size=8", "drafter.layers=3", "drafter.anchors=64"),
    "draft_model": ("train.lr=3e-4", "drafter.blocks=3"),
}


class Worker:
    """One process for all recipes, so that slow imports and builds happen once; a new process after each failure."""

    def __init__(self) -> None:
        self.pool: ProcessPoolExecutor | None = None

    def ask(self, asked: Asked) -> dict[str, Any]:
        """Raises RedError, with the log's last line, for every failure."""
        self.pool = self.pool or ProcessPoolExecutor(1, get_context("spawn"))
        try:
            return self.pool.submit(distil, asked).result(LIMIT)
        except TimeoutError:
            self.end()
            raise RedError(f"not done after {LIMIT:.0f} seconds; {last_line(asked)}") from None
        except BrokenProcessPool:
            self.end()
            raise RedError(f"its process died; {last_line(asked)}") from None
        except Exception as error:
            self.end()
            traceback.print_exc()  # the worker's own, too
            reason = " ".join(str(error).split())[:200]
            raise RedError(f"{type(error).__name__}: {reason}; {last_line(asked)}") from error

    def end(self) -> None:
        if self.pool is not None:
            for process in list((self.pool._processes or {}).values()):
                process.kill()
            self.pool.shutdown()
            self.pool = None


def last_line(asked: Asked) -> str:
    path = asked.output / "log.txt"
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    said = [line.strip() for line in lines if line.strip()]
    return f"{path}: {said[-1][:200] if said else 'nothing'}"


def checked_options(recipe: str, folder: Folder, scale: Scale, machine: Machine) -> Asked:
    target = TargetOptions("hf", str(folder.target.path), dtype="bfloat16", device="cpu" if machine.rehearsal else "auto")
    given = ["target=hf", f"target.path={target.path}", f"target.dtype={target.dtype}", f"target.device={target.device}"]
    given += [f"data.path={folder.conversations}", f"measure.prompts={folder.prompts}", "measure.transformers=false"]
    given += ["train.precision=bfloat16", "train.keep_last=1", "train.warmup=0.05", "logger=none"]
    overrides = (*given, *scale.distil, *RECIPES[recipe])
    probe, threads = (REHEARSED, 1) if machine.rehearsal else (PROBE, None)
    return Asked(recipe, overrides, folder.row(recipe).path.parent, probe, scale.distilled, target, threads)


def jobs(folder: Folder, machine: Machine, worker: Worker) -> list[Job]:
    found = []
    for name in RECIPES:
        asked, row = checked_options(name, folder, scale_of(machine), machine), folder.row(name)
        needs, run = check.needed(OPERATORS, machine, texts=[name]), partial(kept, row, asked, worker)
        made, able = partial(there, row), partial(ready, folder)
        least = 0.0 if machine.rehearsal else LEAST
        found.append(Job(f"distil {name}", "drafters", modules_of(name), run, made, **needs, able=able, seconds=least))
    return found


def kept(row: Part, asked: Asked, worker: Worker) -> dict[str, Any]:
    """The drafter's row, which is removed with its data. Raises SkipError where that is missing."""
    if reason := missing(row.source):
        raise SkipError(reason)
    figures = worker.ask(asked)
    with row.written(figures):
        return figures


def ready(folder: Folder) -> bool:
    return missing(folder.data) is None


def missing(data: Part | None) -> str | None:
    """The missing requirements of a recipe: packages, or the output of gpu-real-1."""
    if names := lacking():
        return f"{', '.join(names)} cannot be imported: run make gpu-wheels, or install what drafttrain depends on"
    try:
        assert data is not None
        _ = data.figures
    except MissingError as error:
        return str(error)
    return None


def main() -> int:
    suite, worker = Suite(SECTION, __doc__.splitlines()[0]), Worker()
    wheels.announce()
    folder = Folder(suite.arguments.real, suite.machine)
    if reason := missing(folder.data):
        print(f"gpu-{SECTION}: {reason}", file=sys.stderr)
        return 1
    try:
        code = suite.run(jobs(folder, suite.machine, worker), check.jobs(suite.machine))
    finally:
        worker.end()
    if not suite.machine.rehearsal:
        print("\n".join(report.distilled(suite.results.known.get(SECTION, {}))), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
