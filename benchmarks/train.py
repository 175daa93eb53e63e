"""Training compared with named alternatives, as ratios taken in one run: interleaved, median of repeats.

    python -m benchmarks.train [SECTION ...] [--repeats 5] [--device auto] [--divide N] [--results DIR] [--base DIR]
                             [--rivals PYTHON]

The compared sides of a section must compute the same before timing; otherwise only that is printed, and the exit code is 1.
Each section writes its figures to DIR/SECTION.json, and a plot where there is one.

packing: rows that hold several conversations, compared with one conversation per row. objective: the chunked objective,
compared with one that keeps all logits: time and peak memory by vocabulary and length. attention: of unrolled and of block
drafters, compared with a dense mask: time and peak memory by length. overlap: the target's next states started before the
drafter's step, compared with one after the other. reading: cached features read while the batch before them trains, compared
with one after the other. steps: a drafter's step compared with the one of an older checkout, --base; without it, alone.
rivals: an EAGLE-3 step compared with other toolkits' modules, --rivals; without it, left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from benchmarks.attention import attention
from benchmarks.common import WIDTH, DiffersError, write_record
from benchmarks.objective import objective
from benchmarks.overlap import overlap
from benchmarks.packing import packing
from benchmarks.reading import reading
from benchmarks.rival_steps import rivals
from benchmarks.section import Found, Settings
from benchmarks.steps import steps
from drafttrain.cli.quiet import quiet
from drafttrain.core.errors import UserError
from drafttrain.targets.devices import device_of

SECTIONS: dict[str, Callable[[Settings], Found]] = {
    "packing": packing,
    "objective": objective,
    "attention": attention,
    "overlap": overlap,
    "reading": reading,
    "steps": steps,
    "rivals": rivals,
}
RESULTS = Path("outputs") / "benchmarks" / "train"


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.train", description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--divide", type=int, default=1, help="all sizes by this, where time or memory is short")
    parser.add_argument("--base", type=Path, help="an older checkout with its .venv, for steps")
    parser.add_argument("--rivals", type=Path, help="an interpreter with the other toolkits, for rivals")
    parser.add_argument("--results", type=Path, default=RESULTS)
    found = parser.parse_args(given)
    if unknown := [name for name in found.sections if name not in SECTIONS]:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if found.repeats < 1 or found.divide < 1:
        parser.error(f"--repeats is {found.repeats}, --divide {found.divide}; both must be 1 or more")
    try:
        found.device = device_of(found.device)
    except UserError as error:
        parser.error(str(error).replace("target.device", "--device"))
    return found


def main(given: list[str] | None = None) -> int:
    asked, differ, console = arguments(given), False, Console(width=WIDTH)
    quiet()
    settings = Settings(
        asked.device,
        asked.repeats,
        asked.divide,
        lambda text: console.print(text, style="dim", soft_wrap=True),
        asked.base,
        asked.rivals,
    )
    for name in asked.sections or SECTIONS:
        try:
            found = SECTIONS[name](settings)
        except DiffersError as difference:
            console.print(f"{name} not timed: {difference}", style="red")
            differ = True
            continue
        for table in found.tables:
            console.print(table)
        write_record(asked.results / f"{name}.json", asked.device, divide=asked.divide, **found.record)
        if found.plot is not None:
            found.plot(asked.results / f"{name}.png")
    console.print(f"figures: {asked.results}")
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
