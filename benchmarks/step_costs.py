"""What a training step of XPress costs beside DFlash's, and which of its parts take it.

    python -m benchmarks.step_costs [--repeats 7] [--count] [--json FILE]

Forward, loss and backward of the same batch and states, on the random target of `benchmarks/steps.py`. Counted operations of
products are exact and the same on every machine: those with the vocabulary (heads, of states and of refined states) and all
others (layers, refiner). Times are processor time of one thread, interleaved, the median of repeats; take them on a quiet
machine. --count leaves them out. XPress is also taken without its free passes, and without the loss of the slots' own logits.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.common import WIDTH, interleaved
from benchmarks.section import Settings
from benchmarks.step_worker import Case
from benchmarks.steps import HIDDEN, LENGTH, RATIO, ROWS, cases

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", {}),
    "xpress": ("xpress", {}),
    "xpress, no free passes": ("xpress", {"free_passes": 0}),
    "xpress, no loss of the slots' own logits": ("xpress", {"base_weight": 0.0}),
    "xpress, neither": ("xpress", {"free_passes": 0, "base_weight": 0.0}),
}


class Operations(TorchDispatchMode):
    """Counts multiplications and additions of products: `vocabulary` where a side is the vocabulary's, else `other`."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.found = vocab, {"vocabulary": 0, "other": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            sides = [size for x in (*args, out) if isinstance(x, torch.Tensor) for size in x.shape]
            kind = "vocabulary" if self.vocab in sides else "other"
            self.found[kind] += count(*args, **(kwargs or {}), out_val=out)
        return out


def case_of(family: str, options: dict[str, Any]) -> Case:
    """With the sizes of `benchmarks/steps.py`."""
    like = cases(Settings(torch.device("cpu"), 1))["dflash", "float32"]
    return Case(like | {"family": family, "options": like["options"] | options})


def seconds(case: Case) -> float:
    began = process_time()
    case.step()
    return process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--count", action="store_true", help="count operations alone, without times")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    steps, record = {name: case_of(*case) for name, case in CASES.items()}, []
    runs = [partial(seconds, case) for case in steps.values()]
    times = [[0.0]] * len(steps) if given.count else interleaved(given.repeats, *runs)
    columns = ("step", "tokens/s", "of dflash's time", "vocabulary", "other", "of dflash's operations")
    table = Table(*columns, box=None, width=WIDTH)
    least, first = median(times[0]), None
    for (name, case), taken in zip(steps.items(), times, strict=True):
        with Operations(HIDDEN * RATIO) as operations:
            case.step()
        made = operations.found
        first = first or sum(made.values())
        speed = ROWS * LENGTH / median(taken) if least else None
        ratio = median(a / b for a, b in zip(taken, times[0], strict=True)) if least else None
        record.append({"name": name, "tokens_per_s": speed, "time_ratio": ratio, **made})
        shown = [f"{speed:.0f}", f"{ratio:.2f}"] if speed and ratio else ["-", "-"]
        table.add_row(name, *shown, *(f"{n / 1e9:.1f} G" for n in made.values()), f"{sum(made.values()) / first:.2f}")
    Console(width=WIDTH).print(table)
    if given.json is not None:
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
