"""Runs a command in lock step in the processes that share a target."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout

from drafttrain.core.errors import UserError
from drafttrain.runs.options import RunOptions
from drafttrain.targets.devices import device_of
from drafttrain.targets.parallel import Part, join, leave


@contextmanager
def shared_target(options: RunOptions, command: str) -> Iterator[Part]:
    """This process's part of a target that `target.tensor_parallel` or `target.expert_parallel` processes share.

    Only the first process prints. Raises UserError if the number of processes is another one, and for settings that do not
    work in lock step.
    """
    setting, size = options.target.shared_by
    _check(setting, size, max(options.launcher.processes, int(os.environ.get("WORLD_SIZE", 1))), command)
    if size > 1 and options.decode.fallback:
        raise UserError(f"decode.fallback depends on timings, which differ among {setting}={size} processes; leave one out")
    if size > 1 and options.target.device not in ("auto", "cpu"):
        raise UserError(
            f"target.device is {options.target.device!r}, but each of {setting}={size} processes needs a separate "
            "device; set target.device=auto or cpu"
        )
    part = join(size, device_of(options.target.device))
    with only_first_prints(part):
        yield part
    leave(part)


@contextmanager
def only_first_prints(part: Part) -> Iterator[None]:
    """Suppress the output of all processes but the first."""
    with ExitStack() as silence:
        if not part.first:
            silence.enter_context(redirect_stdout(io.StringIO()))
            silence.enter_context(redirect_stderr(io.StringIO()))
        yield


def _check(setting: str, size: int, processes: int, command: str) -> None:
    if size == processes:
        return
    if size == 1:
        cause = f" (WORLD_SIZE={processes} in the environment)" if os.environ.get("WORLD_SIZE") == str(processes) else ""
        raise UserError(
            f"{command} runs in one process, but {processes} were started{cause}; leave launcher.nproc out, or let them share "
            f"the target with target.tensor_parallel={processes}"
        )
    raise UserError(
        f"{setting} is {size}, but the number of processes is {processes}; set launcher.nproc={size}, "
        f"or start them with torchrun --nproc-per-node {size}"
    )
