"""Where a command writes its results, and whether what it reads is there. It imports nothing that takes time."""

from __future__ import annotations

import os
import time
from glob import has_magic
from pathlib import Path

from drafttrain.data.files import check_file
from drafttrain.runs.options import RunOptions
from drafttrain.targets import check_there


def dated_path(output: str, kind: str, suffix: str = "") -> Path:
    """`<output>/<kind>/<time><suffix>`: a new path for the results of a command."""
    return Path(output) / kind / (time.strftime("%Y-%m-%d_%H-%M-%S") + suffix)


def check_paths(options: RunOptions) -> None:
    """Raise UserError for a path that is not there, before what reads it is imported. What may be of the hub is left alone."""
    check_there(options.target)
    prompts = options.prompts or options.measure.prompts
    for name in (options.data.path, *(prompts if isinstance(prompts, list) else [prompts])):
        if isinstance(name, str) and name.startswith(("/", "./", "../", "~")) and not has_magic(name):
            path = Path(os.path.expanduser(name))
            if not path.exists():
                check_file(path)
