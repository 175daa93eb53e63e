"""The second part of `make gpu-real`: drafters distilled from the target of `real.py` by `drafttrain fit`, and their
acceptance and speed.

Every recipe trains for the same time. Acceptance and speed are then measured on prompts that neither the target nor a drafter
was trained on. Checks run before. Without the target or its data a recipe is skipped. One that fails
does not affect the others' figures.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Any

from benchmarks.gpu import check, real, report, steps
from benchmarks.gpu.distil import READY, Asked
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.real import Folder, MissingError, Part, Scale, lacking, scale_of, there
from benchmarks.gpu.results import Job, RedError, SkipError
from benchmarks.gpu.sources import ROOT
from benchmarks.gpu.throughput import modules_of
from drafttrain.targets import TargetOptions

SECTION = "real-2"
PROBE, REHEARSED = 24, 2  # steps by which the number of all is found
OPERATORS = (*steps.OPERATORS, "divergence")
LEAST = 30.0  # seconds that must be left for a recipe to begin
PREPARING, LIMIT = 90.0, 90.0  # seconds: of all recipes' preparation; of a turn beyond its training, then its process is ended

# changes to the recipes, which are made for a target of 192 hidden units, for one of 1,024 and some hundred steps
RECIPES: dict[str, tuple[str, ...]] = {
    "medusa": ("train.lr=1.5e-3",),
    "eagle3": ("train.lr=1.2e-3", "drafter.target_layer_ids=null"),
    "dflash": ("train.lr=1.5e-3", "drafter.block_size=8", "drafter.layers=3", "drafter.anchors=64"),
    "draft_model": ("train.lr=5e-4", "drafter.blocks=3"),
}


class Worker:
    """The process of one recipe (`distil.py`)."""

    def __init__(self, asked: Asked) -> None:
        self.asked, self.lines = asked, SimpleQueue[str]()
        shutil.rmtree(asked.output, ignore_errors=True)
        asked.output.mkdir(parents=True)
        command = [sys.executable, "-m", "benchmarks.gpu.distil", asked.written()]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        Thread(target=self._read, daemon=True).start()
        self.prepared = self.ready = False

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.strip())
        self.lines.put("")  # it has ended

    def prepare(self) -> None:
        """The data is there."""
        if not self.prepared:
            self.prepared = True
            self._say("the data is there")

    def wait(self, seconds: float) -> None:
        """Until it waits for its turn. Raises RedError."""
        if not self.ready:
            self.ready = self._answer(seconds) == READY

    def train(self, seconds: float) -> dict[str, Any]:
        """Its turn. Raises RedError, with the log's last line, for every failure."""
        self._say(str(seconds))
        found: dict[str, Any] = json.loads(self._answer(seconds + LIMIT))
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer tells it

    def _answer(self, seconds: float) -> str:
        try:
            found = self.lines.get(timeout=seconds)
        except Empty:
            self.end()
            raise RedError(f"not done after {seconds:.0f} seconds; {last_line(self.asked)}") from None
        if not found:
            raise RedError(f"its process ended with code {self.process.wait()}; {last_line(self.asked)}")
        return found


class Turns:
    """The processes of all recipes, of which one at a time has the GPU. The time that is left is divided among them."""

    def __init__(self, asked: Iterable[Asked], scale: Scale, remaining: Callable[[], float]) -> None:
        self.asked = {one.recipe: one for one in asked}
        self.scale, self.remaining = scale, remaining
        self.workers: dict[str, Worker] = {}

    def start(self, recipes: Iterable[str]) -> None:
        """Start the processes, which import."""
        for recipe in recipes:
            if recipe not in self.workers:
                self.workers[recipe] = Worker(self.asked[recipe])

    def prepare(self) -> None:
        """Until all are prepared or have failed: nobody prepares while another one is measured."""
        ends = perf_counter() + PREPARING
        for worker in self.workers.values():
            worker.prepare()
        for worker in self.workers.values():
            with suppress(RedError):  # said in its turn
                worker.wait(max(1.0, ends - perf_counter()))

    def train(self, recipe: str) -> dict[str, Any]:
        """Raises RedError."""
        self.start([recipe])
        self.prepare()
        left, worker = len(self.workers), self.workers.pop(recipe)
        try:
            if not worker.ready:
                raise RedError(f"its process ended; {last_line(worker.asked)}")
            seconds = max(self.scale.least, self.remaining() / left - self.scale.around)
            return worker.train(min(seconds, self.scale.distilled))
        finally:
            worker.end()

    def end(self) -> None:
        for worker in self.workers.values():
            worker.end()
        self.workers.clear()


def last_line(asked: Asked) -> str:
    lines = asked.log.read_text(encoding="utf-8", errors="replace").split("\n") if asked.log.exists() else []
    said = [line.strip() for line in lines if line.strip()]
    return f"{asked.log}: {said[-1][:200] if said else 'nothing'}"


def turns_of(folder: Folder, machine: Machine, remaining: Callable[[], float]) -> Turns:
    scale = scale_of(machine)
    return Turns([checked_options(name, folder, scale, machine) for name in RECIPES], scale, remaining)


def first_of(folder: Folder, only: str) -> list[str]:
    """The recipes whose cases' names hold the word and that have no row yet; none where a package is missing."""
    return [] if lacking() else [name for name in RECIPES if only in case_of(name) and not there(folder.row(name))]


def case_of(recipe: str) -> str:
    return f"distil {recipe}"


def checked_options(recipe: str, folder: Folder, scale: Scale, machine: Machine) -> Asked:
    target = TargetOptions("hf", str(folder.target.path), dtype="bfloat16", device="cpu" if machine.rehearsal else "auto")
    given = ["target=hf", f"target.path={target.path}", f"target.dtype={target.dtype}", f"target.device={target.device}"]
    given += [f"data.path={folder.conversations}", f"measure.prompts={folder.prompts}", "measure.transformers=false"]
    given += ["train.precision=bfloat16", "train.keep_last=1", "train.warmup=0.05", "logger=none"]
    overrides = (*given, *scale.distil, *RECIPES[recipe])
    probe, threads = (REHEARSED, 1) if machine.rehearsal else (PROBE, None)
    return Asked(recipe, overrides, folder.row(recipe).path.parent, probe, target, threads)


def jobs(folder: Folder, machine: Machine, turns: Turns) -> list[Job]:
    found = []
    for name in RECIPES:
        row = folder.row(name)
        needs, run = check.needed(OPERATORS, machine, texts=[name]), partial(kept, row, name, turns)
        made, able = partial(there, row), partial(ready, folder)
        least = 0.0 if machine.rehearsal else LEAST
        found.append(Job(case_of(name), "drafters", modules_of(name), run, made, **needs, able=able, seconds=least))
    return found


def kept(row: Part, recipe: str, turns: Turns) -> dict[str, Any]:
    """The drafter's row, which is removed with its data. Raises SkipError where that is missing."""
    if reason := missing(row.source):
        raise SkipError(reason)
    figures = turns.train(recipe)
    with row.written(figures):
        pass
    return figures


def ready(folder: Folder) -> bool:
    return missing(folder.data) is None


def missing(data: Part | None) -> str | None:
    """The missing requirements of a recipe: packages, or the target's data."""
    if names := lacking():
        return f"{', '.join(names)} cannot be imported: run make gpu-wheels, or install what drafttrain depends on"
    try:
        assert data is not None
        _ = data.figures
    except MissingError as error:
        return str(error)
    return None


def announce(known: dict[str, Any]) -> None:
    """Print what a machine's results say of the target and its drafters."""
    print(*report.material(known.get(real.SECTION, {})), *report.distilled(known.get(SECTION, {})), sep="\n", flush=True)
