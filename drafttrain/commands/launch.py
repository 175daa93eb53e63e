"""Floor 5: run a command in this process, or in `launcher.nproc` processes of this machine."""

from __future__ import annotations

import logging
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from drafttrain.commands.quiet import quiet
from drafttrain.commands.run import RunOptions
from drafttrain.errors import UserError

Work = Callable[[RunOptions, dict[str, Any]], object]


def launch(work: Work, options: RunOptions, resolved: dict[str, Any]) -> None:
    """Call `work(options, resolved)`, here or in every process of a new local group with torchrun's environment variables.

    work: a function of a module, since other processes import it by name.
    Raises UserError for a bad `launcher.nproc` and for what a process raised it for; ChildFailedError when one fails otherwise.
    """
    count = options.launcher.nproc
    if count < 1:
        raise UserError(f"launcher.nproc is {count}; set it to 1 or more")
    if count == 1:
        work(options, resolved)
        return
    if "RANK" in os.environ:
        raise UserError(f"launcher.nproc={count} under torchrun, which has started its processes; leave launcher.nproc out")
    with tempfile.TemporaryDirectory(prefix="drafttrain-") as folder:
        _launch_locally(work, options, resolved, Path(folder))


def _launch_locally(work: Work, options: RunOptions, resolved: dict[str, Any], folder: Path) -> None:
    count = options.launcher.nproc
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    for library in ("torch.distributed", "torch.multiprocessing.spawn"):
        logging.getLogger(library).setLevel(logging.CRITICAL)  # the processes report their own errors
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        local_addr="localhost",
    )
    try:
        elastic_launch(config, _work_in_process)(work, options, resolved, folder)
    except SignalException as error:  # the launcher has caught Ctrl-C and ended the processes
        raise KeyboardInterrupt from error
    except ChildFailedError as error:
        for note in sorted(folder.iterdir()):
            raise UserError(note.read_text(encoding="utf-8")) from error
        raise


def _work_in_process(work: Work, options: RunOptions, resolved: dict[str, Any], folder: Path) -> None:
    """In a new process: a user's mistake goes back as a note in `folder`, without a traceback on the console."""
    quiet()
    try:
        work(options, resolved)
    except UserError as error:
        (folder / f"rank-{int(os.environ['RANK']):05}").write_text(str(error), encoding="utf-8")
        raise SystemExit(2) from error
    except Exception:
        traceback.print_exc()
        raise
