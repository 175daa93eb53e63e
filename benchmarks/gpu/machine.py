"""The measured GPU, and how it is measured: events around replays of CUDA graphs, compared with what the machine reaches.

A rehearsal runs the same code on a CPU, without graphs or events, to find errors; its times mean nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from time import perf_counter
from typing import Generic, TypeVar

import torch
from torch import cuda
from torch.profiler import ProfilerActivity, profile

Made = TypeVar("Made")

STREAMED = 4 << 30  # bytes of the copy, and of the sum, that show what memory allows
IN_A_ROW = 8  # of them between two events
SQUARE = 8192  # of the matrices whose product shows what the tensor cores allow
WINDOWS = 3  # timed at each look at the ceilings
HELD_BACK = 1_000_000  # cycles that the device sleeps before a timed window, while the host launches its work
WARM = 3
LAUNCH = "cudaGraphLaunch"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")  # an asynchronous copy is none


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

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds of the work that this call starts on the device, between two events on its stream.

        The device sleeps first: an event on an idle device is reached at once, and the host's launches would count.
        """
        if self.rehearsal:
            began = perf_counter()
            work()
            return perf_counter() - began
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        torch.cuda._sleep(HELD_BACK)
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
        self.work, self.graph, self.machine = work, None, machine
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

    def seconds(self, count: int) -> float:
        """Seconds of one replay, from `count` in a row, so that gaps between graphs hardly count; in a rehearsal from one."""
        count = 1 if self.machine.rehearsal else count

        def several() -> None:
            for _ in range(count):
                self.run()

        return self.machine.seconds(several) / count


class Ceilings:
    """What memory and tensor cores reach on this machine: the best of a session, since clocks and addresses vary.

    Bytes per second of a copy (read and written) and of a sum (read alone), and operations per second of a bfloat16 product.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.seen: dict[str, list[float]] = {"copy_bandwidth": [], "read_bandwidth": [], "product_flops": []}

    def look(self) -> Ceilings:
        """Measure again, in fresh memory; without enough of it the earlier looks count."""
        count, side = (1 << 14, 64) if self.machine.rehearsal else (STREAMED // 4, SQUARE)
        if self.machine.free < 3 * 4 * count and self.seen["copy_bandwidth"]:
            return self
        source = torch.randn(count, device=self.machine.device)
        target, square = torch.empty_like(source), torch.randn(side, side, device=self.machine.device, dtype=torch.bfloat16)
        works: dict[str, tuple[float, Callable[[], object]]] = {
            "copy_bandwidth": (2 * source.nbytes, lambda: target.copy_(source)),
            "read_bandwidth": (source.nbytes, source.sum),
            "product_flops": (2.0 * side**3, lambda: square @ square),
        }
        for name, (amount, work) in works.items():
            work()
            for _ in range(WINDOWS):
                taken = self.machine.seconds(lambda work=work: [work() for _ in range(IN_A_ROW)])  # type: ignore[misc]
                self.seen[name].append(IN_A_ROW * amount / taken)
        return self

    @property
    def bandwidth(self) -> float:
        """Bytes per second: the most that a copy or a sum has reached."""
        return max(*self.seen["copy_bandwidth"], *self.seen["read_bandwidth"])

    @property
    def flops(self) -> float:
        return max(self.seen["product_flops"])

    @property
    def figures(self) -> dict[str, float]:
        """For a case's record. spread: between the best and the worst window of the faster stream, as a share of the best."""
        best = {name: max(values) for name, values in self.seen.items()}
        faster = max(self.seen["copy_bandwidth"], self.seen["read_bandwidth"], key=max)
        return best | {"spread": 1.0 - min(faster) / max(faster)}


@lru_cache
def ceilings(machine: Machine) -> Ceilings:
    """Of this process."""
    return Ceilings(machine)


def race(contenders: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median seconds of each contender, in turn. Each does its work once and returns the seconds; the first `WARM` repeats do
    not count.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(WARM + repeats):
        taken = {name: work() for name, work in contenders.items()}
        if number >= WARM:
            for name, seconds in taken.items():
                times[name].append(seconds)
    return {name: median(found) for name, found in times.items()}


def waits(work: Callable[[], object], machine: Machine) -> tuple[int, int]:
    """(how often the host waits between the first replay's launch and the last one's, how many graphs the work replays), from a
    profile. Without a GPU both are 0.
    """
    activities = [ProfilerActivity.CPU] + ([] if machine.rehearsal else [ProfilerActivity.CUDA])
    with profile(activities=activities) as seen:
        work()
        machine.wait()
    events = list(seen.events() or [])
    launches = [e.time_range.start for e in events if e.name == LAUNCH]
    between = [e for e in events if launches and min(launches) <= e.time_range.start <= max(launches)]
    return sum(e.name in WAITS for e in between), len(launches)


def known(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
