"""Training steps compared with named alternatives: forward, loss and backward on the same batch and target's states.

    python -m benchmarks.train [steps] [rivals] [--repeats 5] [--divide N] [--results DIR] [--base DIR] [--rivals PYTHON]

Each side is a process with one thread. Its time is processor time, interleaved, the median of repeats: other work does not
count. The sides must compute the same, else only that is printed, and the exit code is 1. Each section writes its figures to
DIR/SECTION.json.

steps: four drafters' steps compared with those of an older checkout, DIR with its virtual environment in DIR/.venv; without it,
alone. Loss and norm of the gradients must agree. Peak memory: tensors of forward and backward, gradients included, without
weights.

rivals: an EAGLE-3 step compared with SpecForge's and speculators' modules; left out without PYTHON, an interpreter with
drafttrain and both toolkits. Losses differ by constants and by positions at a row's end, so only the norms are compared.
PYTHON's environment is made beside the project's, whose torch stays:

    python -m venv outputs/rivals/venv && outputs/rivals/venv/bin/pip install -e .
    outputs/rivals/venv/bin/pip install --no-deps specforge==0.2.0 speculators==0.9.0 hs-connectors==0.9.0 loguru openai \\
        python-dotenv pydantic-settings triton

The target is a random Llama whose head is as large, compared with its layers, as Llama-3.2-1B's: vocabulary / hidden size is
64, the MLP is 4 times as wide. `loss.chunk` is a quarter of the positions, as 1,024 is of 4,096.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import WIDTH, DiffersError, write_record
from drafttrain.cli.quiet import quiet

WORKER = Path(__file__).with_name("step_worker.py")
RESULTS = Path("outputs") / "benchmarks" / "train"
HIDDEN, RATIO, LENGTH, ROWS = 256, 64, 512, 2
FAMILIES: dict[str, dict[str, Any]] = {
    "eagle3": {"steps": 7},
    "eagle3, part of the vocabulary": {"steps": 7, "draft_vocab": HIDDEN * RATIO // 4},
    "medusa": {},
    "dflash": {"anchors": LENGTH // 4},
}
DTYPES = ("float32", "bfloat16")
CLOSE = {"float32": 1e-4, "bfloat16": 2e-2}  # allowed relative difference of a checkout's loss and gradients
RIVALS = ("specforge", "speculators")
RIVALS_CLOSE = 5e-2  # of the gradients' norms
STEPS = (3, 7)  # of EAGLE-3


@dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    repeats: int
    divide: int  # all sizes are divided by it
    say: Callable[[str], None]  # shows a line of progress
    base: Path | None  # an older checkout to compare with
    rivals: Path | None  # an interpreter with other toolkits

    def of(self, size: int, least: int) -> int:
        """A size, divided."""
        return max(least, size // self.divide)


@dataclass(frozen=True)
class Found:
    """The result of a section."""

    table: Table | None  # for the reader; None: it was left out
    record: list[dict[str, Any]]  # plain data for a file


class Side:
    """One interpreter's process. rival: the toolkit whose step it takes."""

    def __init__(self, python: Path, *rival: str) -> None:
        command = [str(python), str(WORKER), *rival]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, what: str, case: dict[str, Any]) -> dict[str, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"what": what, "case": case}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise DiffersError("a side's process ended; its message is above")
        found: dict[str, float] = json.loads(line)
        return found

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@contextmanager
def ended(sides: Sequence[Side]) -> Iterator[None]:
    try:
        yield
    finally:
        for side in sides:
            side.end()


def cases(settings: Settings) -> dict[tuple[str, str], dict[str, Any]]:
    hidden, length = settings.of(HIDDEN, 32), settings.of(LENGTH, 64)
    model = {"vocab_size": RATIO * hidden, "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": 8}
    model |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4}
    model |= {"max_position_embeddings": 2 * length}
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
    table = Table("family", "dtype", "tokens/s", "base's", "times", "peak, MiB", "base's", box=None, width=WIDTH)
    record = []
    with ended(sides):
        for (name, dtype), case in cases(settings).items():
            found = raced(sides, case, settings.repeats, ("loss", "norm"), CLOSE[dtype])
            found["peak"] = [side.ask("peak", case)["peak"] for side in sides]
            settings.say(f"{name}, {dtype}: {found['tokens_per_s'][0]:,.0f} tokens/s")
            record.append({"family": name, "dtype": dtype, "case": case} | found)
            rates = [f"{rate:,.0f}" for rate in found["tokens_per_s"]] + [""]
            peaks = [f"{most / 2**20:,.0f}" for most in found["peak"]] + [""]
            times = "" if found["times"] is None else f"{found['times']:.2f}"
            table.add_row(name, dtype, *rates[:2], times, *peaks[:2])
    return Found(table, record)


def rivals(settings: Settings) -> Found:
    if settings.rivals is None:
        settings.say("rivals need --rivals PYTHON, an interpreter with specforge and speculators; left out")
        return Found(None, [])
    names = [f"{name}'s" for name in RIVALS]
    table = Table("steps", "dtype", "tokens/s", *names, "times the faster", box=None, width=WIDTH)
    record, all_cases = [], cases(settings)
    sides = [Side(Path(sys.executable)), *(Side(settings.rivals, name) for name in RIVALS)]
    with ended(sides):
        for count in STEPS:
            for dtype in DTYPES:
                case = all_cases["eagle3", dtype] | {"options": {"steps": count}}
                found = raced(sides, case, settings.repeats, ("norm",), RIVALS_CLOSE)
                settings.say(f"{count} steps, {dtype}: {found['times']:.2f} times the faster rival's")
                record.append({"steps": count, "dtype": dtype, "case": case} | found)
                rates = [f"{rate:,.0f}" for rate in found["tokens_per_s"]]
                table.add_row(str(count), dtype, *rates, f"{found['times']:.2f}")
    return Found(table, record)


def raced(sides: list[Side], case: dict[str, Any], repeats: int, compared: Sequence[str], close: float) -> dict[str, Any]:
    """Tokens per processor second of each side; times: of the fastest other side's speed, the median of the repeats' ratios,
    None without another side.

    Raises DiffersError where a compared figure of another side differs by more than `close`.
    """
    own, *others = [side.ask("step", case) for side in sides]
    apart = [abs(other[what] / own[what] - 1.0) for other in others for what in compared]
    if not all(each <= close for each in apart):
        raise DiffersError(f"{case['family']}, {case['dtype']}: {' or '.join(compared)} differ by {max(apart):.1e}")
    seconds = [[side.ask("step", case)["seconds"] for side in sides] for _ in range(repeats)]
    ours, *theirs = zip(*seconds, strict=True)
    ratios = [median(other / mine for mine, other in zip(ours, column, strict=True)) for column in theirs]
    rates = [case["rows"] * case["length"] / median(column) for column in (ours, *theirs)]
    return {"tokens_per_s": rates, "times": min(ratios, default=None), "apart": apart}


SECTIONS: dict[str, Callable[[Settings], Found]] = {"steps": steps, "rivals": rivals}


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.train", description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--divide", type=int, default=1, help="all sizes by this, where time or memory is short")
    parser.add_argument("--base", type=Path, help="an older checkout with its .venv, for steps")
    parser.add_argument("--rivals", type=Path, help="an interpreter with the other toolkits, for rivals")
    parser.add_argument("--results", type=Path, default=RESULTS)
    found = parser.parse_args(given)
    if unknown := [name for name in found.sections if name not in SECTIONS]:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if found.repeats < 1 or found.divide < 1:
        parser.error(f"--repeats is {found.repeats}, --divide {found.divide}; both must be 1 or more")
    return found


def main(given: list[str] | None = None) -> int:
    asked, differ, console = arguments(given), False, Console(width=WIDTH)
    quiet()

    def say(text: str) -> None:
        console.print(text, style="dim", soft_wrap=True)

    settings = Settings(asked.repeats, asked.divide, say, asked.base, asked.rivals)
    for name in asked.sections or SECTIONS:
        try:
            found = SECTIONS[name](settings)
        except DiffersError as difference:
            console.print(f"{name} not timed: {difference}", style="red")
            differ = True
            continue
        if found.table is not None:
            console.print(found.table)
            record = {"divide": asked.divide, name: found.record}
            write_record(asked.results / f"{name}.json", **record)
    console.print(f"figures: {asked.results}")
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
