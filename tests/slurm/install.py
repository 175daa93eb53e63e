"""`python -m tests.slurm.install`: Debian's packages, submitit, Mooncake and schemas of Kubernetes, where they are not there.

Ends with code 2 and one line if it cannot install them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from typing import NoReturn

from tests.slurm import cluster, machines

SECONDS = 300  # for each installation
SCHEMAS = "kubernetes-validate"  # 72 MB, which make install leaves out
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "iproute2", "util-linux", "libibverbs1")
VERBS = "libibverbs.so.1"  # Mooncake is linked to it, whether or not there is RDMA


def main() -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "-c", "constraints.txt"]
    if importlib.util.find_spec("submitit") is None:
        run([*pip, "-e", ".[slurm]"])
    if importlib.util.find_spec("kubernetes_validate") is None and (problem := problem_of([*pip, SCHEMAS])):
        print(f"its test is skipped: {problem}", file=sys.stderr)
    if importlib.util.find_spec("mooncake") is None and (problem := problem_of([*pip, "-e", ".[mooncake]"])):
        print(f"the tests of Mooncake are skipped: {problem}", file=sys.stderr)
    if absent := [*cluster.absent(), *machines.absent(), *verbs_absent()]:
        if os.getuid() or shutil.which("apt-get") is None:
            end(f"there is no {', '.join(absent)}; install Slurm, munge, iproute2 and libibverbs1, as root on Debian: {apt()}")
        print(f"installing {' '.join(PACKAGES)}", flush=True)
        run(["apt-get", "update"])
        run(["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES])
    if reason := cluster.missing():
        end(reason)


def verbs_absent() -> list[str]:
    try:
        ctypes.CDLL(VERBS)
    except OSError:
        return [VERBS]
    return []


def apt() -> str:
    return f"apt-get install {' '.join(PACKAGES)}"


def run(command: list[str]) -> None:
    if problem := problem_of(command):
        end(problem)


def problem_of(command: list[str]) -> str | None:
    """Run the command; one line if it fails."""
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(command, env=quiet, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"{' '.join(command)}: not done after {SECONDS} seconds"
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
    return f"{' '.join(command)}: {lines[-1]}" if done.returncode else None


def end(line: str) -> NoReturn:
    print(f"tests of Slurm: {line}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
