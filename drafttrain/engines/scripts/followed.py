"""Runs a command until the standard input ends: `python -P followed.py COMMAND...`. A trainer that is killed leaves none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

GRACE = 5.0  # seconds for the command to end by itself


def main() -> None:
    """Exit with the command's code."""
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
    threading.Thread(target=_follow, args=(process,), daemon=True).start()
    sys.exit(process.wait())


def _follow(process: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):
        pass
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    main()
