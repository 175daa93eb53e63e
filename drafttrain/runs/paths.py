"""Where a command writes its results, and whether what it reads is there. It imports nothing that takes time."""

from __future__ import annotations

import os
import time
from glob import has_magic
from pathlib import Path

from drafttrain.core.errors import UserError
from drafttrain.data.files import check_file, is_local, read_template
from drafttrain.runs.options import RunOptions
from drafttrain.targets import check_there


def dated_path(output: str, kind: str, suffix: str = "") -> Path:
    """`<output>/<kind>/<time><suffix>`: a new path for the results of a command."""
    return Path(output) / kind / (time.strftime("%Y-%m-%d_%H-%M-%S") + suffix)


def check_paths(options: RunOptions) -> None:
    """Raise UserError for a path that is not there, before what reads it is imported. What may be of the hub is left alone."""
    check_there(options.target)
    prompts = options.prompts or options.measure.prompts
    sets = [name for name in (prompts if isinstance(prompts, list) else [prompts]) if isinstance(name, str) and ":" not in name]
    for name in (*options.data.paths, *sets):
        path = Path(os.path.expanduser(name))
        if not has_magic(name) and not path.exists() and is_local(path):
            check_file(path)
    read_template(options.data.template)
    if options.resume not in (None, "auto") and not (Path(options.resume).expanduser() / "run.json").is_file():
        raise not_a_run(options.resume)
    for key, checkpoint in (("checkpoint", options.checkpoint), ("train.init", options.train.init)):
        if checkpoint is not None and not has_magic(checkpoint):
            _check_checkpoint(key, checkpoint, options.output)


def not_a_run(resume: str) -> UserError:
    """The error for `resume`."""
    return UserError(f"resume is {resume!r}, which is not a run directory (no run.json of one); name one, or set resume=auto")


def _check_checkpoint(key: str, name: str, output: str) -> None:
    """A relative path may also be a hub id or a run of W&B; a single word and what is in the output folder are none."""
    is_path = "/" not in name or name.startswith((".", "/", "~")) or Path(output) in Path(name).parents
    if is_path and not os.path.exists(os.path.expanduser(name)):
        raise UserError(f"{key} {name!r} does not exist; name a run, one of its step-NNNNN directories, or a published drafter")
