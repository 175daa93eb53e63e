"""This process's part of a target that several processes share, and their communication.

All of them run the same program on the same input in lock step. Each decides by itself which tokens it accepts and when it
stops. They decide alike because all of them see the same bits:
- each slice of the vocabulary's logits is computed by one process and copied to the others;
- an all-reduce of gloo or NCCL adds up each element in one place (the owner of its chunk in a ring, the root of a tree, or the
  switch) and copies the sum, so that the residual stream and the tapped states are the same everywhere;
- everything in between is the same program on the same kind of device. A group of different GPUs does not satisfy this.

Decisions that depend on the clock are made by the first process and shared.

Shapes: B rows, N positions, S rows of another kind, H hidden, V vocabulary, W columns of one process.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from drafttrain.core.errors import Interrupted, UserError
from drafttrain.targets.devices import bind

Value = TypeVar("Value")

SILENT = 10.0  # seconds that processes may take to meet before one says what it waits for
SILENT_WATCHED = 120.0  # the same under torch's elastic agent, which ends them all when one fails
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # variables of a launcher
ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PATIENCE = timedelta(minutes=30)  # the others wait while the first process runs the whole model's forward at load time


@dataclass(frozen=True, slots=True)
class Part:
    """Rank and size of this process among the processes that share a target.

    `sum` and `joined` never sync with the host and allocate like any operation, so that a CUDA graph can contain them.
    """

    rank: int = 0
    size: int = 1
    group: Any = None  # process group; None: the default group

    @property
    def first(self) -> bool:
        """Whether this process prints, writes files and reads the clock for all."""
        return self.rank == 0

    def sum(self, x_BNH: Tensor) -> Tensor:
        """The sum over all processes, in place where possible."""
        if self.size > 1:
            x_BNH = x_BNH.contiguous()
            distributed.all_reduce(x_BNH, group=self.group)
        return x_BNH

    def joined(self, x_BNW: Tensor, width: int) -> Tensor:
        """[..., width]: all processes' columns next to each other, without the padding at the end."""
        if self.size == 1:
            return x_BNW
        x_BNW = x_BNW.contiguous()
        columns = [torch.empty_like(x_BNW) for _ in range(self.size)]
        distributed.all_gather(columns, x_BNW, group=self.group)
        padding = x_BNW.shape[-1] * self.size - width
        return torch.cat(columns, -1)[..., :width].contiguous() if padding else torch.cat(columns, -1)

    def exchanged(self, x_SH: Tensor, sent: list[int], taken: list[int]) -> Tensor:
        """All processes' rows for this one, in the processes' order. sent, taken: number of rows for and from each process."""
        taken_SH = x_SH.new_empty(sum(taken), *x_SH.shape[1:])
        distributed.all_to_all_single(taken_SH, x_SH.contiguous(), taken, sent, group=self.group)
        return taken_SH

    def share(self, value: Value) -> Value:
        """The first process's value, on every process. Takes plain values only, and is never called inside a step."""
        if self.size == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def check(self, value: object) -> None:
        """Raise RuntimeError if a process has another value than the first one: then none of their results is valid."""
        if self.share(value) != value:
            raise RuntimeError(f"process {self.rank} of {self.size} decoded other tokens than the first; are their GPUs alike?")


WHOLE = Part()


def join(size: int, device: torch.device) -> Part:
    """Form the group of the `size` processes that torchrun's environment variables name. The caller has checked `size`."""
    bind(device)
    if size == 1:
        return WHOLE
    if not distributed.is_initialized():
        backend, bound = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        with meeting():
            distributed.init_process_group(backend, timeout=PATIENCE, device_id=bound)
        end_at_exit()
    return Part(int(os.environ["RANK"]), size)


def check_launched() -> None:
    """Raise UserError for a launcher's variables that are not whole, or name no process of a group."""
    env = {name: os.environ[name] for name in LAUNCHED if name in os.environ}
    multi_process = env.get("WORLD_SIZE", "1") != "1"
    if "RANK" not in env and not multi_process:
        return
    missing = [name for name in LAUNCHED if name not in env and name != "LOCAL_RANK"]
    fault = f"without {', '.join(missing)}" if missing else None
    numbers = [value for name, value in env.items() if name != "MASTER_ADDR"]
    if fault is None and not all(value.isdecimal() for value in numbers):
        fault = "where a number is expected"
    elif fault is None and int(env["RANK"]) >= int(env["WORLD_SIZE"]):
        fault = "which is no rank of so many processes"
    if fault is not None:
        raise UserError(f"the environment has {_spoken(env)}, {fault}; start with torchrun or launcher.nproc, {_unset(env)}")


@contextmanager
def meeting() -> Iterator[None]:
    """While the processes that the environment names meet. After some seconds it says what is waited for.

    A launcher that watches over the processes tells itself why one has ended: then a signal leaves no line here, and the wait
    may be longer. A signal ends this process at once: torch waits outside of Python, where no handler runs. Raises UserError if
    they do not meet, unless a launcher watches over them.
    """
    check_launched()
    watched = "TORCHELASTIC_RUN_ID" in os.environ
    done, wake = os.pipe()
    os.set_blocking(wake, False)
    main = threading.current_thread() is threading.main_thread()  # Python allows it nowhere else
    old_wakeup_fd = signal.set_wakeup_fd(wake, warn_on_full_buffer=False) if main else -1
    watcher = threading.Thread(target=_watch, args=(done, watched), daemon=True)
    watcher.start()
    try:
        yield
    except (distributed.DistNetworkError, distributed.DistStoreError) as error:
        if watched:
            raise
        raise UserError(f"the processes have not met: {_waited_for()}") from error
    finally:
        if main:
            signal.set_wakeup_fd(old_wakeup_fd)
        os.write(wake, b"\0")
        watcher.join()
        os.close(wake)
        os.close(done)


def _watch(pipe: int, watched: bool) -> None:
    """Until the pipe has a zero. Its other bytes are numbers of signals. watched: as in `meeting`."""
    if not select.select([pipe], [], [], SILENT_WATCHED if watched else SILENT)[0]:
        print(f"drafttrain: {_waited_for()}", file=sys.stderr, flush=True)
    while number := os.read(pipe, 1)[0]:
        if number in ENDING:
            line = f"\ndrafttrain: interrupted by {signal.Signals(number).name}, while it waited for other processes\n"
            if not watched:
                os.write(2, line.encode())
            os._exit(130 if number == signal.SIGINT else Interrupted.CODE)


def _waited_for() -> str:
    env = {name: os.environ[name] for name in LAUNCHED if name in os.environ}
    address = f"{env.get('MASTER_ADDR')}:{env.get('MASTER_PORT')}"
    return (
        f"waiting for {env.get('WORLD_SIZE')} processes to meet at {address}, because the environment has {_spoken(env)}; if "
        f"no launcher has started this process, end it, {_unset(env)}"
    )


def _spoken(env: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in env.items())


def _unset(env: dict[str, str]) -> str:
    return f"or run it alone: env {' '.join(f'-u {name}' for name in env)} drafttrain ..."


def end_at_exit() -> None:
    """Destroy the process group at exit if the process has not done so itself, because of an error or a mistake.

    Otherwise gloo's threads would abort the process with another exit code than its own. A forked child has the group without
    its threads and leaves it alone.
    """
    owner = os.getpid()

    def end() -> None:
        if os.getpid() == owner and distributed.is_initialized() and distributed.get_backend() == "gloo":
            distributed.destroy_process_group()

    atexit.register(end)


def leave(part: Part) -> None:
    """Destroy the group after all processes have arrived."""
    if part.size > 1:
        distributed.barrier(group=part.group)
        distributed.destroy_process_group(part.group)
