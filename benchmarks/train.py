"""Training steps compared with named alternatives, as ratios taken in one run: interleaved, median of repeats.

    python -m benchmarks.train [SECTION ...] [--repeats 5] [--divide N] [--results DIR] [--base DIR] [--rivals PYTHON]

The compared sides of a section must compute the same before timing; otherwise only that is printed, and the exit code is 1.
Each section writes its figures to DIR/SECTION.json.

steps: a drafter's step compared with the one of an older checkout, --base; without it, alone. rivals: an EAGLE-3 step compared
with other toolkits' modules, --rivals; without it, left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.common import WIDTH, DiffersError, write_record
from benchmarks.rival_steps import rivals
from benchmarks.steps import Found, Settings, steps
from drafttrain.cli.quiet import quiet

SECTIONS: dict[str, Callable[[Settings], Found]] = {"steps": steps, "rivals": rivals}
RESULTS = Path("outputs") / "benchmarks" / "train"


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
            write_record(asked.results / f"{name}.json", torch.device("cpu"), **record)
    console.print(f"figures: {asked.results}")
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
