"""A drafter's training step compared with an older checkout's: forward, loss and backward on the same batch and states.

    python -m benchmarks.train steps --base DIR        DIR: the older checkout, with its virtual environment in DIR/.venv

Each side is a process with one thread. Its time is processor time, interleaved, the median of repeats: other work on the
machine does not count. Peak memory is that of one step: tensors of forward and backward, gradients included, without weights.
Loss and norm of the gradients must agree.

The target is a random Llama whose head is as large, compared with its layers, as Llama-3.2-1B's: vocabulary / hidden size is
64, the MLP is 4 times as wide. `loss.chunk` is a quarter of the positions, as 1,024 is of 4,096.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.common import WIDTH, DiffersError

WORKER = Path(__file__).with_name("step_worker.py")
HIDDEN, RATIO, LENGTH, ROWS = 256, 64, 512, 2
FAMILIES: dict[str, dict[str, Any]] = {
    "eagle3": {"steps": 7},
    "eagle3, part of the vocabulary": {"steps": 7, "draft_vocab": HIDDEN * RATIO // 4},
    "medusa": {},
    "dflash": {"anchors": LENGTH // 4},
}
DTYPES = ("float32", "bfloat16")
GOALS = {"eagle3": 1.8, "medusa": 1.2, "dflash": 1.5}
CLOSE = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    repeats: int
    divide: int = 1  # all sizes are divided by it
    say: Callable[[str], None] = lambda text: None  # shows a line of progress
    base: Path | None = None  # an older checkout to compare with
    rivals: Path | None = None  # an interpreter with other toolkits

    def of(self, size: int, least: int = 1) -> int:
        """A size, divided."""
        return max(least, size // self.divide)


@dataclass(frozen=True)
class Found:
    """The result of a section."""

    table: Table | None  # for the reader; None: it was left out
    record: list[dict[str, Any]]  # plain data for a file


class Side:
    """One checkout's process."""

    def __init__(self, python: Path, worker: Path = WORKER, *arguments: str) -> None:
        command = [str(python), str(worker), *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, what: str, case: dict[str, Any]) -> dict[str, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"what": what, "case": case}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise DiffersError("a checkout's process ended; its message is above")
        found: dict[str, float] = json.loads(line)
        return found

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def cases(settings: Settings) -> dict[tuple[str, str], dict[str, Any]]:
    hidden, length = settings.of(HIDDEN, 32), settings.of(LENGTH, 64)
    model = {"vocab_size": RATIO * hidden, "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": 8}
    model |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 2 * length,
    }
    found = {}
    for name, options in FAMILIES.items():
        own = options | ({"draft_vocab": RATIO * hidden // 4} if "draft_vocab" in options else {})
        own |= {"anchors": length // 4} if "anchors" in options else {}
        for dtype in DTYPES:
            case = {"family": name.split(",")[0], "options": own, "dtype": dtype, "model": model, "loss": "kl"}
            found[name, dtype] = case | {"rows": ROWS, "length": length, "chunk": ROWS * length // 4}
    return found


def steps(settings: Settings) -> Found:
    sides = [Side(Path(sys.executable))]
    if settings.base is not None:
        sides.append(Side(settings.base / ".venv" / "bin" / "python"))
    table = Table("family", "dtype", "tokens/s", "base's", "times", "goal", "peak, MiB", "base's", box=None, width=WIDTH)
    record = []
    try:
        for (name, dtype), case in cases(settings).items():
            found = measured(sides, case, settings.repeats)
            settings.say(f"{name}, {dtype}: {found['tokens_per_s'][0]:,.0f} tokens/s")
            record.append({"family": name, "dtype": dtype, "case": case} | found)
            rates = [f"{rate:,.0f}" for rate in found["tokens_per_s"]] + [""]
            peaks = [f"{most / 2**20:,.0f}" for most in found["peak"]] + [""]
            times = "" if found["times"] is None else f"{found['times']:.2f}"
            goal = str(GOALS.get(case["family"], ""))
            table.add_row(name, dtype, *rates[:2], times, goal, *peaks[:2])
    finally:
        for side in sides:
            side.end()
    return Found(table, record)


def measured(sides: list[Side], case: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Tokens per processor second and peak bytes of each side; times: of the base's speed, the median of the repeats' ratios.

    Raises DiffersError where losses or gradients differ.
    """
    first = [side.ask("step", case) for side in sides]
    for what in ("loss", "norm"):
        apart = abs(first[0][what] - first[-1][what]) / abs(first[-1][what])
        if not apart <= CLOSE[case["dtype"]]:
            raise DiffersError(f"{case['family']}, {case['dtype']}: the {what}s are {apart:.1e} apart")
    seconds = [[side.ask("step", case)["seconds"] for side in sides] for _ in range(repeats)]
    tokens = case["rows"] * case["length"]
    times = median(base / own for own, base in seconds) if len(sides) > 1 else None
    return {
        "tokens_per_s": [tokens / median(column) for column in zip(*seconds, strict=True)],
        "times": times,
        "peak": [side.ask("peak", case)["peak"] for side in sides],
    }
