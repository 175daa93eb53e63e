"""The measured GPU, and how it is measured: events around replays of CUDA graphs, compared with a copy's bandwidth.

A rehearsal runs the same code on a CPU, without graphs or events, to find errors; its times mean nothing.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from time import perf_counter
from typing import Any, Generic, TypeVar

import torch
from torch import cuda

Made = TypeVar("Made")

COPIED = 1 << 30  # bytes of the copy that other times are compared with
WARM = 3


class NoGpuError(Exception):
    """There is no GPU, or torch does not see it."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine with a GPU."""

    device: torch.device  # for all work
    rehearsal: bool
    name: str  # of the GPU
    facts: dict[str, str] = field(default_factory=dict, compare=False)  # facts that a figure's reader needs

    @staticmethod
    def here(rehearsal: bool) -> Machine:
        """This machine. Raises NoGpuError."""
        facts = {"torch": torch.__version__, "triton": known("triton"), "transformers": known("transformers")}
        if rehearsal:
            torch.set_num_threads(1)  # the work is tiny: threads would only wait for each other
            return Machine(torch.device("cpu"), True, "rehearsal", facts)
        if not cuda.is_available():
            raise NoGpuError(
                f"no GPU that torch {torch.__version__} sees; run this on one, or rehearse it here with REHEARSE=1"
            )
        of = cuda.get_device_properties(0)
        facts |= {"gpu": of.name, "cuda": str(torch.version.cuda), "memory": f"{of.total_memory / 2**30:.0f} GiB"}
        return Machine(torch.device("cuda", 0), False, of.name, facts)

    @property
    def slug(self) -> str:
        """The GPU's name for a file: `nvidia-h200`."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @property
    def cached(self) -> int:
        """Bytes of the last cache before memory."""
        return 1 << 12 if self.rehearsal else int(cuda.get_device_properties(self.device).L2_cache_size)

    @property
    def free(self) -> int:
        """Bytes of free memory."""
        if self.rehearsal:
            return 1 << 30
        cuda.empty_cache()
        return cuda.mem_get_info(self.device)[0]

    def wait(self) -> None:
        if not self.rehearsal:
            cuda.synchronize(self.device)

    def waits(self, work: Callable[[], object]) -> int:
        """How often the work makes the host wait for the device."""
        if self.rehearsal:
            work()
            return 0
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            cuda.set_sync_debug_mode("warn")
            try:
                work()
            finally:
                cuda.set_sync_debug_mode("default")
        return sum("synchronizing" in str(warning.message) for warning in said)

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds of the work that this call starts on the device, between two events on its stream."""
        if self.rehearsal:
            began = perf_counter()
            work()
            return perf_counter() - began
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000


class Replay(Generic[Made]):
    """Work captured as a CUDA graph, after two runs that build and tune; `out` is its result. In a rehearsal `run` does the
    work again, and `out` is its last result.
    """

    def __init__(self, work: Callable[[], Made], machine: Machine) -> None:
        self.work, self.graph = work, None
        if machine.rehearsal:
            self.out = work()
            return
        stream = cuda.Stream(machine.device)
        stream.wait_stream(cuda.current_stream(machine.device))
        with cuda.stream(stream):
            work(), work()
        cuda.current_stream(machine.device).wait_stream(stream)
        machine.wait()
        self.graph = cuda.CUDAGraph()
        with cuda.graph(self.graph):
            self.out = work()

    def run(self) -> None:
        if self.graph is None:
            self.out = self.work()
        else:
            self.graph.replay()


class Copy:
    """A device-to-device copy, timed next to other work. Its bandwidth is the real upper bound."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.source = torch.empty(1 << 16 if machine.rehearsal else COPIED, dtype=torch.uint8, device=machine.device)
        self.target = torch.empty_like(self.source)

    def seconds(self) -> float:
        return self.machine.seconds(lambda: self.target.copy_(self.source))

    def bandwidth(self, times: list[float]) -> float:
        """Bytes read and written per second, from the median of these times."""
        return 2 * self.source.numel() / median(times)


@dataclass(frozen=True, slots=True)
class Race:
    """Median seconds of each contender, of `repeats` in turn, and the bandwidth of a copy among them."""

    seconds: dict[str, float]
    bandwidth: float

    @staticmethod
    def run(contenders: dict[str, Callable[[], float]], copy: Copy, repeats: int) -> Race:
        """contenders: each does its work once and returns the seconds. The first `WARM` repeats do not count."""
        times: dict[str, list[float]] = {name: [] for name in contenders}
        copies = []
        for number in range(WARM + repeats):
            taken = {name: work() for name, work in contenders.items()}
            copied = copy.seconds()
            if number >= WARM:
                copies.append(copied)
                for name, seconds in taken.items():
                    times[name].append(seconds)
        return Race({name: median(found) for name, found in times.items()}, copy.bandwidth(copies))


def known(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def nbytes(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
