"""torch's profiler over replayed decode steps: where the GPU's time goes, and whether the host waits between replays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.machine import Machine

LAUNCH = "cudaGraphLaunch"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")  # an asynchronous copy is none
PRODUCTS = ("gemm", "gemv", "nvjet", "cutlass", "xmma", "splitk", "cublas")
ATTENTION = ("attend", "combine", "flash", "fmha")  # our tree attention is `attend` and `combine`


@dataclass(frozen=True, slots=True)
class Trace:
    """waits: of the host, between the first replay's launch and the last one's. The other fields are shares of the kernels'
    time.
    """

    waits: int
    products: float
    attention: float
    replays: int

    @property
    def rest(self) -> float:
        return 1.0 - self.products - self.attention


def traced(work: Callable[[], object], machine: Machine) -> Trace:
    """Profile work that replays graphs. Without a GPU all counts are empty."""
    events = profiled(work, machine)
    launches = [e.time_range.start for e in events if e.name == LAUNCH]
    between = [e for e in events if launches and min(launches) <= e.time_range.start <= max(launches)]
    kernels = [(e.name.lower(), e.time_range.elapsed_us()) for e in on_device(events)]
    total = sum(taken for _, taken in kernels) or 1.0

    def share(words: tuple[str, ...]) -> float:
        return sum(taken for name, taken in kernels if any(word in name for word in words)) / total

    return Trace(sum(e.name in WAITS for e in between), share(PRODUCTS), share(ATTENTION), len(launches))


def busy(work: Callable[[], object], machine: Machine) -> float:
    """Seconds that the device works; the rest of the work's time is the host's gap. 0 without a GPU."""
    return sum(e.time_range.elapsed_us() for e in on_device(profiled(work, machine))) / 1e6


def profiled(work: Callable[[], object], machine: Machine) -> list[Any]:
    """The profiler's events."""
    activities = [ProfilerActivity.CPU] + ([] if machine.rehearsal else [ProfilerActivity.CUDA])
    with profile(activities=activities) as seen:
        work()
        machine.wait()
    return list(seen.events() or [])


def on_device(events: list[Any]) -> list[Any]:
    return [e for e in events if e.device_type == DeviceType.CUDA]
