"""A stand-in for an engine's script. `drafttrain/engines/process.py` explains its form.

STANDIN says what it does: `fast` and `slow` answer, `crash` and `hang` do not; `slow` waits for a file `go` in RECORD. That is
a folder for the environment that it had and the process that it was. The later the step, the lower its tau.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def opened(job: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Callable[[list[int]], dict[str, Any]]]]:
    found = re.search(r"engine-(\d+)\.", job["drafter"])
    step, how = int(found[1]) if found else 0, os.environ["STANDIN"]
    assert list(Path(job["drafter"]).glob("*.safetensors")), "the export is whole"
    if "RECORD" in os.environ:
        about = {"environment": dict(os.environ), "process": os.getpid(), "group": os.getpgid(0)}
        file = Path(os.environ["RECORD"]) / f"{step}.json"
        file.with_suffix(".aside").write_text(json.dumps(about))
        file.with_suffix(".aside").rename(file)
    if how == "crash":
        print("a bad day", file=sys.stderr, flush=True)
        os._exit(3)
    while how == "slow" and not Path(os.environ["RECORD"], "go").exists():
        time.sleep(0.01)
    time.sleep(600 if how == "hang" else 0)

    def answer(wave: list[int]) -> dict[str, Any]:
        texts = [{"tokens": [1] * 11, "first": 0.1, "ended": 0.2, "ahead": 1} for _ in wave]
        return {"texts": texts, "verifications": len(wave) * (4 + step % 10), "drafted": 10, "accepted": 4}

    yield {"versions": {"standin": "1"}, "begins": "plain"}, answer
