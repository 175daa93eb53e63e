"""Where a command writes its results."""

from __future__ import annotations

import time
from pathlib import Path


def dated_path(output: str, kind: str, suffix: str = "") -> Path:
    """`<output>/<kind>/<time><suffix>`: a new path for the results of a command."""
    return Path(output) / kind / (time.strftime("%Y-%m-%d_%H-%M-%S") + suffix)
