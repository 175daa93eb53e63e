"""Run one engine's script on a job: `python -P serve.py ENGINE.py JOB RESULT`. drafttrain/engines/process.py explains it, and
drafttrain/engines/timed_process.py for an engine that is timed.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the job and write its result or its error."""
    script, job_path, result_path = map(Path, sys.argv[1:])
    job = json.loads(job_path.read_text(encoding="utf-8"))
    if job["parent"] is not None:
        threading.Thread(target=end_with, args=(job["parent"], job_path.parent), daemon=True).start()
    try:
        functions = runpy.run_path(str(script))
        output = functions["decoded"](job) if job["timed"] is None else answering(functions["opened"], job)
    except Exception as error:
        reason = " ".join(str(error).split())[:400]
        result_path.write_text(json.dumps({"error": f"{type(error).__name__}: {reason}"}), encoding="utf-8")
        raise
    result_path.write_text(json.dumps(output), encoding="utf-8")


def answering(opened: Callable[..., Any], job: dict[str, Any]) -> dict[str, Any]:
    """Answer waves of prompt numbers from stdin until it ends. From here on stdout is only for answers."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with opened(job) as (info, answer):
        print(json.dumps(info), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
    return {}


def end_with(parent: int, folder: Path) -> None:
    """When the process that started this one has ended, remove the job's files and end this process and its children."""
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
