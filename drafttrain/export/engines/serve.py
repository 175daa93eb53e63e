"""Run one engine's script on a job: `python -P serve.py ENGINE.py JOB RESULT`, as explained in drafttrain/export/engine.py."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path


def main() -> None:
    script, job, place = map(Path, sys.argv[1:])
    try:
        result = runpy.run_path(str(script))["decoded"](json.loads(job.read_text(encoding="utf-8")))
    except Exception as error:
        said = " ".join(str(error).split())[:400]
        place.write_text(json.dumps({"error": f"{type(error).__name__}: {said}"}), encoding="utf-8")
        raise
    place.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
