"""One command run in lock step by the processes that share its target."""

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
    """This process's part of `target.tensor_parallel` processes; all but the first are silent meanwhile.

    Raises UserError when the processes that were started are not those that share the target, and for settings that they
    could not follow in lock step.
    """
    size = options.target.tensor_parallel
    _check(size, max(options.launcher.nproc, int(os.environ.get("WORLD_SIZE", 1))), command)
    if size > 1 and options.decode.fallback:
        raise UserError(
            f"decode.fallback decides by the clock, which target.tensor_parallel={size} processes do not share; leave one out"
        )
    if size > 1 and options.target.device not in ("auto", "cpu"):
        raise UserError(
            f"target.device is {options.target.device!r}, each of target.tensor_parallel={size} processes needs its own; "
            "set target.device=auto or cpu"
        )
    part = join(size, device_of(options.target.device))
    with only_first_prints(part):
        yield part
    leave(part)


@contextmanager
def only_first_prints(part: Part) -> Iterator[None]:
    """All processes but the first are silent."""
    with ExitStack() as silence:
        if not part.first:
            silence.enter_context(redirect_stdout(io.StringIO()))
            silence.enter_context(redirect_stderr(io.StringIO()))
        yield


def _check(size: int, processes: int, command: str) -> None:
    if size < 1:
        raise UserError(f"target.tensor_parallel is {size}; set it to 1 or more")
    if size == processes:
        return
    if size == 1:
        raise UserError(
            f"{command} runs in one process, {processes} were asked for; leave launcher.nproc out, or let them share the "
            f"target with target.tensor_parallel={processes}"
        )
    raise UserError(
        f"target.tensor_parallel is {size}, processes are {processes}; set launcher.nproc={size}, "
        f"or start them with torchrun --nproc-per-node {size}"
    )
