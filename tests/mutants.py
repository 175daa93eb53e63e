"""Planted faults: `python -m tests.mutants --out outputs/mutants --count 300` says which of them the tests find.

Cosmic Ray changes one operator, comparison, number, condition, loop or decorator of the package at a time. Only lines that some
fast test runs are changed, so many in each folder as the folder has lines. Each fault is tried on the tests that run its line,
in a process forked for it: the cheapest first, those of the line's own folder before others. First the fast cases, and then,
while no test fails, the slow cases and the complete grids of the same tests. The command goes on where it was stopped.

It needs `pip install -e '.[mutants]'`. A line that tests run only in other processes is not changed: no test is known for it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("core", "decoding", "model", "objective", "drafters", "data", "export", "train", "targets")
FAST, SLOW, GRIDS = (
    f"{marks} and not engines and not slurm" for marks in ("not slow and not grid", "slow and not grid", "grid")
)
OPERATORS = re.compile(  # not each of two operators in each one's place: a random other one
    r"(ReplaceBinaryOperator|ReplaceComparisonOperator|ReplaceUnaryOperator|AddNot|ReplaceTrue|ReplaceFalse|ReplaceAnd|ReplaceOr|"
    r"ReplaceBreak|ReplaceContinue|NumberReplacer|RemoveDecorator|ZeroIteration|ExceptionReplacer)"
)
KILLED, SURVIVED, LIMIT = "killed", "survived", "limit"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file."""

    path: str  # in the checkout
    operator: str  # Cosmic Ray's name
    occurrence: int
    line: int

    @property
    def key(self) -> str:
        return f"{self.path}:{self.line} {self.operator.removeprefix('core/')} {self.occurrence}"


class Durations:
    """A plugin of pytest that keeps each test's seconds."""

    def __init__(self, path: Path) -> None:
        self.path, self.seconds = path, defaultdict[str, float](float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.seconds))


def cover(out: Path, tests: Sequence[str]) -> None:
    """Run the fast tests once, and keep which test runs which line."""
    (out / "coveragerc").write_text(
        f"[run]\nsource = drafttrain\ndata_file = {out / 'lines.coverage'}\nrelative_files = true\n"
    )
    arguments = ["-n", str(os.cpu_count()), "--dist", "worksteal", "-m", FAST, *tests]
    arguments += ["--cov", "--cov-context=test", "--cov-report=", f"--cov-config={out / 'coveragerc'}"]
    pytest.main(arguments, plugins=[Durations(out / "seconds.json")])


def lines(out: Path) -> dict[str, dict[int, set[str]]]:
    """The tests that run each line of each file."""
    from coverage import CoverageData

    data = CoverageData(str(out / "lines.coverage"))
    data.read()
    found: dict[str, dict[int, set[str]]] = {}
    for path in data.measured_files():
        contexts = {
            line: {name.split("|")[0] for name in names if name} for line, names in data.contexts_by_lineno(path).items()
        }
        found[path] = {line: names for line, names in contexts.items() if names}
    return found


def planted(out: Path, count: int, seed: int, covered: dict[str, dict[int, set[str]]]) -> list[Mutant]:
    """So many of all changes, in each folder by its covered lines; at most one of a line."""
    from cosmic_ray.commands import init
    from cosmic_ray.work_db import WorkDB, use_db

    paths = [path for path in sorted(covered) if path.split("/")[1] in FOLDERS]
    begun = not (out / "changes.sqlite").exists()
    by_folder: dict[str, dict[tuple[str, int], list[Mutant]]] = {folder: defaultdict(list) for folder in FOLDERS}
    with use_db(str(out / "changes.sqlite"), WorkDB.Mode.create if begun else WorkDB.Mode.open) as changes:
        if begun:
            init(paths, changes, {})
        for item in changes.work_items:
            change = item.mutations[0]
            path, line = str(change.module_path), change.start_pos[0]
            if OPERATORS.search(change.operator_name) and covered[path].get(line):
                mutant = Mutant(path, change.operator_name, change.occurrence, line)
                by_folder[path.split("/")[1]][path, line].append(mutant)
    whole = sum(len(found) for found in by_folder.values())
    chosen, mutants = random.Random(seed), []
    for found in by_folder.values():
        for place in chosen.sample(sorted(found), min(len(found), round(count * len(found) / whole))):
            mutants.append(chosen.choice(sorted(found[place], key=lambda mutant: mutant.key)))
    chosen.shuffle(mutants)
    return mutants


class Checkout:
    """A copy of the checkout of its own, in which one fault at a time is planted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.exists():
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
        subprocess.run(["git", "-C", str(folder), "checkout", "--quiet", "."], check=True)

    def result(self, mutant: Mutant, tests: Sequence[str], limit: float) -> dict[str, Any]:
        """Which tests find the fault: those of CI, the fast ones first, or, if none of them does, their complete grids."""
        from cosmic_ray.mutating import use_mutation
        from cosmic_ray.plugins import get_operator

        with use_mutation(self.folder / mutant.path, get_operator(mutant.operator)(), mutant.occurrence) as (_, changed):
            assert changed is not None, mutant.key
            found: dict[str, Any] = {"fault": mutant.key, "tests": len(tests), "ci": self.run(tests, FAST, limit)}
            whole = list(dict.fromkeys(name.split("[")[0] for name in tests))
            for kind, marked in (("ci", SLOW), ("grids", GRIDS)):
                if found["ci"]["outcome"] == SURVIVED:
                    found[kind] = self.run(whole, marked, limit)
        return found

    def run(self, tests: Sequence[str], marked: str, limit: float) -> dict[str, Any]:
        """Whether one of these tests fails, and which one, within so many seconds."""
        names, output = self.folder / "tests.txt", self.folder / "output.txt"
        names.write_text("\n".join(tests))
        begun, status = time.monotonic(), None
        if (child := os.fork()) == 0:
            self.child(f"@{names}", "-x", "-m", marked, "-p", "no:cacheprovider", output=output)
        while status is None and time.monotonic() - begun < limit:
            time.sleep(0.05)
            if (ended := os.waitpid(child, os.WNOHANG))[0]:
                status = ended[1]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        seconds = round(time.monotonic() - begun, 1)
        if status is None:
            os.waitpid(child, 0)
            return {"outcome": LIMIT, "seconds": seconds}
        by = re.search(r"^(?:FAILED|ERROR) (\S+)", output.read_text(errors="replace"), re.MULTILINE)
        passed = os.waitstatus_to_exitcode(status) in (0, 5)  # 5: none of these tests has the mark
        return {"outcome": SURVIVED if passed else KILLED, "seconds": seconds, "by": by.group(1) if by else ""}

    def child(self, *arguments: str, output: Path) -> NoReturn:
        """pytest in this process, on the package and the tests of the copy."""
        os.setsid()
        with open(output, "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "drafttrain")]:
            del sys.modules[name]
        os.chdir(self.folder)
        sys.path[0] = str(self.folder)
        os.environ |= {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        code = 70
        try:
            code = int(pytest.main(list(arguments)))
        finally:
            sys.stdout.flush()
            os._exit(code)


def ordered(mutant: Mutant, tests: set[str], seconds: dict[str, float]) -> list[str]:
    """Those of the fault's own folder first, the quick ones before the long ones."""
    near = f"tests/unit/{Path(mutant.path).parts[1]}/"
    return sorted(tests, key=lambda name: (not name.startswith(near), seconds.get(name, 0.0)))


def work(out: Path, number: int, limit: float, waiting: Any) -> None:
    """One process of several: takes faults until none waits."""
    covered, seconds = lines(out), json.loads((out / "seconds.json").read_text())
    checkout = Checkout(out / f"checkout-{number}")
    while (mutant := waiting.get()) is not None:
        tests = ordered(mutant, covered[mutant.path][mutant.line], seconds)
        line = json.dumps(checkout.result(mutant, tests, limit))
        with open(out / "results.jsonl", "a") as file:
            file.write(line + "\n")


def results(out: Path) -> list[dict[str, Any]]:
    path = out / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def report(out: Path) -> str:
    """Killed by CI (fast or slow cases) over killed by everything, in each folder and in all, and what CI does not find."""
    rows, missed = defaultdict[str, Counter[str]](Counter), []
    for found in results(out):
        ci, grids = found["ci"]["outcome"], found.get("grids", {}).get("outcome", "")
        for row in (found["fault"].split("/")[1], "all"):
            rows[row].update(["faults", f"ci {ci}", *([f"grids {grids}"] if grids else [])])
        if grids == KILLED:
            missed.append(f"{found['fault']} by {found['grids']['by']}")
    head = ("folder", "faults", "killed by CI", "by grids alone", "score", "survived", "at the limit")
    text = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name in [*sorted(rows.keys() - {"all"}), *(["all"] if rows else [])]:
        row = rows[name]
        ci, more = row[f"ci {KILLED}"], row[f"grids {KILLED}"]
        score = f"{ci / (ci + more):.3f}" if ci + more else ""
        limits = row[f"ci {LIMIT}"] + row[f"grids {LIMIT}"]
        text.append(f"| {name} | {row['faults']} | {ci} | {more} | {score} | {row['faults'] - ci - more - limits} | {limits} |")
    return "\n".join([*text, "", *(f"- {line}" for line in missed)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/mutants"))
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for a fault's tests")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, help="no further fault begins after so many")
    parser.add_argument("tests", nargs="*", help="of those that find out which test runs which line; default all")
    given = parser.parse_args()
    out: Path = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    if not (out / "lines.coverage").exists():
        cover(out, given.tests)
    known = {found["fault"] for found in results(out)}
    mutants = [mutant for mutant in planted(out, given.count, given.seed, lines(out)) if mutant.key not in known]
    end = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    import deepspeed  # noqa: F401  # what most tests load, once for all forks
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    forks = multiprocessing.get_context("fork")
    waiting = forks.Queue(1)
    workers = [forks.Process(target=work, args=(out, number, given.limit, waiting)) for number in range(given.workers)]
    for worker in workers:
        worker.start()
    for count, mutant in enumerate(mutants):
        if end is not None and time.monotonic() > end:
            break
        waiting.put(mutant)
        print(f"{count + 1} of {len(mutants)}: {mutant.key}", flush=True)
    for _ in workers:
        waiting.put(None)
    for worker in workers:
        worker.join()
    print(report(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
