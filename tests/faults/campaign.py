"""Tries of every kind in turn until the time is up, with the result of each; the table and the record."""

from __future__ import annotations

import json
import random
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.faults.child import Ended

REFUSED = "refused"  # exit code 2 (or 3, 4 where a check failed), in one line that says what is wrong
UNCHANGED = "unchanged"  # the result is that of an undisturbed run
ACCEPTED = "accepted"  # a user's own file, without a checksum, with legal values: another result, no traceback
FAILURE = "failure"
RESULTS = (REFUSED, UNCHANGED, ACCEPTED, FAILURE)
KEPT = 3000  # characters of output that a failure keeps


@dataclass(frozen=True, slots=True)
class TryResult:
    """The result of one try."""

    what: str  # its row in the table: the file or input, and the damage
    result: str
    expected: str = ""
    got: str = ""
    command: str = ""
    out: str = ""
    err: str = ""
    count: int = 1  # number of tries that it stands for, where one process makes many


def failed(what: str, expected: str, got: str, command: str = "", ended: Ended | None = None) -> TryResult:
    out, err = (ended.out[-KEPT:], ended.err[-KEPT:]) if ended else ("", "")
    return TryResult(what, FAILURE, expected, got, command, out, err)


class Kind(Protocol):
    """A kind of fault. `prepare` makes once what all tries share; `attempt` makes one try."""

    name: str

    def prepare(self, folder: Path) -> None: ...

    def attempt(self, draw: random.Random, folder: Path) -> list[TryResult]:
        """One try, decided by the generator only. folder: an empty one for this try."""
        ...


@dataclass
class Counts:
    """Results of one kind by subject, the seconds spent, and the failures."""

    seconds: float = 0.0
    attempts: int = 0
    results: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, seed: int, outcomes: Sequence[TryResult], seconds: float) -> None:
        self.seconds += seconds
        self.attempts += 1
        for outcome in outcomes:
            self.results.setdefault(outcome.what, Counter())[outcome.result] += outcome.count
            if outcome.result == FAILURE:
                self.failures.append({"seed": seed, **asdict(outcome)})

    def total(self, *results: str) -> int:
        return sum(counter[result] for counter in self.results.values() for result in results or RESULTS)


def tried(kind: Kind, seed: int, folder: Path) -> list[TryResult]:
    """One try of a kind by its seed, in a folder that is empty before and removed afterwards."""
    scratch = folder / "try"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        return kind.attempt(random.Random(f"{kind.name} {seed}"), scratch)
    except Exception:  # the campaign goes on, and the record has it
        return [failed("the campaign itself", "a try", traceback.format_exc()[-KEPT:])]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def run(
    kinds: Sequence[Kind], minutes: float, seed: int, out: Path, console: Console, most: int | None = None
) -> dict[str, Counts]:
    """Make tries until the time is up, always of the kind that has had the least time. most: tries of each kind.

    The i-th try of every kind has the seed `seed * 1_000_000 + i`. The record is written again every half minute.
    """
    counts = {kind.name: Counts() for kind in kinds}
    began = written = time.monotonic()
    for kind in kinds:
        console.print(f"preparing: {kind.name}", highlight=False)
        kind.prepare(out / kind.name)
    until = time.monotonic() + 60 * minutes
    with _progress(console) as progress:
        task = progress.add_task("faults", total=60 * minutes)
        while time.monotonic() < until:
            open_kinds = [kind for kind in kinds if most is None or counts[kind.name].attempts < most]
            if not open_kinds:
                break
            kind = min(open_kinds, key=lambda one: counts[one.name].seconds)
            own, start = counts[kind.name], time.monotonic()
            number = seed * 1_000_000 + own.attempts
            own.add(number, tried(kind, number, out / kind.name), time.monotonic() - start)
            for failure in own.failures[len(own.failures) - 1 :] if own.failures and own.failures[-1]["seed"] == number else ():
                console.print(f"{kind.name} {number}: {failure['what']}: {failure['got']}"[:400], markup=False, highlight=False)
            shown = "  ".join(f"{name} {c.total():,}" + f"/{c.total(FAILURE)}" for name, c in counts.items())
            progress.update(task, completed=time.monotonic() - until + 60 * minutes, description=shown, refresh=True)
            if time.monotonic() - written > 30:
                write(out, counts, seed, time.monotonic() - began)
                written = time.monotonic()
    write(out, counts, seed, time.monotonic() - began)
    return counts


def _progress(console: Console) -> Progress:
    """Show progress without a thread, because children are forked."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal)


def write(out: Path, counts: dict[str, Counts], seed: int, seconds: float) -> None:
    kinds = {
        name: {
            "tries": own.total(),
            "failures": own.total(FAILURE),
            "seconds": round(own.seconds, 1),
            "results": {what: dict(results) for what, results in sorted(own.results.items())},
            "failed": own.failures,
        }
        for name, own in counts.items()
    }
    aside = out / "result.json.new"
    aside.write_text(
        json.dumps({"seed": seed, "seconds": round(seconds, 1), "kinds": kinds}, indent=1) + "\n", encoding="utf-8"
    )
    aside.replace(out / "result.json")


def table(counts: dict[str, Counts]) -> Table:
    shown = Table("kind", "what", "tries", *RESULTS, box=None)
    for name, own in counts.items():
        for what, results in sorted(own.results.items()):
            shown.add_row(name, what, f"{sum(results.values()):,}", *(f"{results[result]:,}" for result in RESULTS))
        shown.add_row(name, "all", f"{own.total():,}", *(f"{own.total(result):,}" for result in RESULTS), style="bold")
    return shown


def markdown(record: Path) -> str:
    """The counts of a record by kind, as rows for docs/reliability.md."""
    rows = []
    for name, kind in json.loads(record.read_text(encoding="utf-8"))["kinds"].items():
        total = Counter[str]()
        for results in kind["results"].values():
            total.update(results)
        rows.append(f"| `{name}` | {kind['tries']:,} | " + " | ".join(f"{total[result]:,}" for result in RESULTS) + " |")
    return "\n".join(rows)


def again(record: Path) -> Iterator[tuple[str, int]]:
    """(kind, seed) of each failure in a record."""
    for name, kind in json.loads(record.read_text(encoding="utf-8"))["kinds"].items():
        yield from dict.fromkeys((name, int(failure["seed"])) for failure in kind["failed"])


def checked(outcome: TryResult, ended: Ended, command: str) -> TryResult:
    """The result with the command added, and for a failure the end of its output."""
    kept = (ended.out[-KEPT:], ended.err[-KEPT:]) if outcome.result == FAILURE else ("", "")
    return replace(outcome, command=command, out=kept[0], err=kept[1])


def judged(ended: Ended, what: str, command: str, same: Callable[[], str | None], names: Sequence[str] = ()) -> TryResult:
    """The verdict: refused in one line that contains one of these names, or the same result. same: returns the difference or
    None.
    """
    expected = (
        f"exit code 2 in one line that names {' or '.join(names)}, or the same result" if names else "one line, or the same"
    )
    if fault := broken(ended):
        return failed(what, expected, fault, command, ended)
    if ended.line is not None:
        if names and not any(name in ended.line for name in names):
            return failed(what, expected, f"the line does not name it: {ended.line}", command, ended)
        return TryResult(what, REFUSED, command=command)
    if ended.code != 0:
        return failed(what, expected, f"exit code {ended.code}", command, ended)
    if differs := same():
        return failed(what, expected, f"exit code 0 and another result: {differs}", command, ended)
    return TryResult(what, UNCHANGED, command=command)


def broken(ended: Ended) -> str | None:
    """The behaviour that is an error for every input."""
    if ended.late:
        return f"no end within {ended.seconds:.0f} s"
    if ended.left:
        return f"processes are left: {', '.join(ended.left)}"
    if ended.traceback:
        return "a traceback: " + next((line for line in reversed((ended.err + ended.out).splitlines()) if line.strip()), "")
    if ended.code < 0:
        return f"ended by signal {-ended.code}"
    return None
