"""`make gpu`: all sections in one command, the most important cases first, within a budget of minutes; ends with the goals.

Every result is written when it is known, and the same command continues where the last one ended. This process only watches
another one that does the work (`stages.py`), and imports nothing that takes time. A case that ends that process, or hangs,
counts as failed, and a new process continues with the next case.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, time

MINUTES = 45.0
AGAIN = 75  # exit code of a process whose device takes no more work
HANGS = 600.0  # seconds of one case after which its process is killed
POLL = 0.2  # seconds between two checks of the process
Key = tuple[str, str]  # (section, name) of a case


def watch(arguments: Sequence[str], minutes: float) -> int:
    """Run `work` in a separate process, and in a new one where that ends or hangs before its time. Returns the exit code."""
    began, dead, ended = perf_counter(), "", set[Key | None]()
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "running.json"
        while True:
            left = 60 * minutes - (perf_counter() - began)
            more = ["--budget", str(left), "--watched", str(note), *(["--dead", dead] if dead else [])]
            kept = [word for word in arguments if not (dead and word == "--force")]
            child = subprocess.Popen([sys.executable, "-m", "benchmarks.gpu.stages", *kept, *more])
            try:
                dead = awaited(child, note)
            finally:
                child.kill()
            if not dead:
                return child.returncode
            key = interrupted(note)
            if child.returncode != AGAIN and (key is None or key in ended):
                print(f"gpu: {dead}, and no case was running that had not done so before", file=sys.stderr)
                return 1
            ended.add(key)
            print(f"{dead}; a new process goes on with the next case", flush=True)


def awaited(child: subprocess.Popen[bytes], note: Path) -> str:
    """Why the process ended before its time; empty where it did not."""
    while child.poll() is None:
        try:
            if time() - note.stat().st_mtime > HANGS:
                child.kill()
                child.wait()
                return f"not done in {HANGS:.0f} s"
        except OSError:
            pass  # between two cases
        try:
            child.wait(POLL)
        except subprocess.TimeoutExpired:
            continue
    if child.returncode in (0, 1, 2):
        return ""
    return "the device takes no more work" if child.returncode == AGAIN else f"its process ended with code {child.returncode}"


def interrupted(note: Path) -> Key | None:
    """The case that was running when a process ended, from its `Runner`'s note."""
    try:
        found = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return str(found["section"]), str(found["name"])


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    known, _ = parser.parse_known_args()  # the other process reads them all
    return watch(sys.argv[1:], known.minutes)


if __name__ == "__main__":
    sys.exit(main())
