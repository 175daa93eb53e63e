"""`python -m tests.slurm.install`: what the tests of Slurm need and this machine lacks: Debian's packages, and submitit.

Ends with code 2 and one line if it cannot install them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from typing import NoReturn

from tests.slurm import cluster, machines

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "iproute2", "util-linux")


def main() -> None:
    if importlib.util.find_spec("submitit") is None:
        run([sys.executable, "-m", "pip", "--quiet", "install", "-c", "constraints.txt", "-e", ".[slurm]"])
    if absent := [*cluster.absent(), *machines.absent()]:
        if os.getuid() or shutil.which("apt-get") is None:
            end(f"there is no {', '.join(absent)}; install Slurm, munge and iproute2, as root on Debian: {apt()}")
        print(f"installing {' '.join(PACKAGES)}", flush=True)
        run(["apt-get", "update"])
        run(["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES])
    if reason := cluster.missing():
        end(reason)


def apt() -> str:
    return f"apt-get install {' '.join(PACKAGES)}"


def run(command: list[str]) -> None:
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, env=quiet, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        end(f"{' '.join(command)}: {lines[-1]}")


def end(line: str) -> NoReturn:
    print(f"tests of Slurm: {line}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
