"""The projection's formula compared with real runs of two processes on this CPU.

A CPU can tell whether computing and communication add up to a step. Two independent runs of one process each, at the same
time, give the seconds of computing, with cores and memory shared as two processes share them. A sum over two processes of as
many bytes as the drafter's gradients gives the seconds of communication. Their sum is compared with a run of two processes.
Repeats alternate and medians are taken; other load on the machine is in all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from rich.table import Table
from torch import distributed, multiprocessing

from benchmarks.common import WIDTH
from drafttrain.drafters import families
from drafttrain.model.drafter import trainable
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import load_target

FAMILY, ROWS, STEPS, REPEATS, SUMS = "eagle3", 8, 12, 3, 20
FIT = [sys.executable, "-m", "drafttrain", "fit", f"recipe={FAMILY}", f"train.steps={STEPS}", "train.checkpoint_every=1000"]
FIT += [f"train.micro_batch={ROWS}", "data.limit=300", "measure=off", "logger=none", "deepspeed=zero1"]


def check(say: Callable[[str], None]) -> Table:
    """Run the check. Raises RuntimeError with the last lines of a run that fails."""
    alone, together, summed = [], [], []
    for repeat in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            at = Path(folder)
            pair = [fit(at / str(i), f"train.global_batch={ROWS}", f"train.seed={i}") for i in range(2)]
            alone.append(sum(seconds(run, at / str(i)) for i, run in enumerate(pair)) / 2)
            run = fit(at / "two", f"train.global_batch={2 * ROWS}", "launcher.nproc=2")
            together.append(seconds(run, at / "two"))
        summed.append(sum_seconds())
        said = f"computing {alone[-1]:.3f} s, sum of gradients {summed[-1]:.3f} s, two processes {together[-1]:.3f} s"
        say(f"repeat {repeat + 1}: {said}")
    table = Table("of a step", "seconds", "of repeats", box=None, width=WIDTH)
    predicted = [a + b for a, b in zip(alone, summed, strict=True)]
    rows = {"computing, two processes at once": alone, "sum of gradients over two": summed, "predicted": predicted}
    for name, found in (rows | {"measured, two processes": together}).items():
        table.add_row(name, f"{median(found):.3f}", f"{min(found):.3f}-{max(found):.3f}")
    ratios = [a / b for a, b in zip(together, predicted, strict=True)]
    table.add_row("measured / predicted", f"{median(ratios):.2f}", f"{min(ratios):.2f}-{max(ratios):.2f}")
    return table


def fit(output: Path, *settings: str) -> subprocess.Popen[str]:
    command = [*FIT, *settings, f"output={output}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def seconds(run: subprocess.Popen[str], output: Path) -> float:
    """Seconds of a step of average size, from the median rate of the later half."""
    said, _ = run.communicate()
    if run.returncode:
        raise RuntimeError("\n".join(said.splitlines()[-5:]))
    (metrics,) = output.glob("*/*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "tokens_per_s" in line]
    (state,) = output.glob("*/*/checkpoints/*/trainer.json")
    tokens = json.loads(state.read_text(encoding="utf-8"))["tokens"] / STEPS
    return tokens / median(line["tokens_per_s"] for line in steps[len(steps) // 2 :])


def sum_seconds() -> float:
    """Seconds of all-reducing the drafter's gradients over two processes."""
    made = families()[FAMILY]
    size = trainable(made.build(made.options(), load_target(TargetOptions()).target))
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_sum, (size, folder), nprocs=2)
        return float((Path(folder) / "seconds").read_text(encoding="utf-8"))


def _sum(rank: int, size: int, folder: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    gradients, found = torch.zeros(size), []
    for _ in range(SUMS):
        distributed.barrier()
        began = perf_counter()
        distributed.all_reduce(gradients)
        found.append(perf_counter() - began)
    if rank == 0:
        (Path(folder) / "seconds").write_text(str(median(found)), encoding="utf-8")
    distributed.destroy_process_group()
