"""Measures the cost of a training step: its time by part, its share of the device's peak, its memory, and a trace.

Its floating-point operations are counted from those that one micro-batch runs.
Shapes: B sequences, T positions, S keys, h heads, g KV heads, D head width.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from drafttrain.core.errors import UserError
from drafttrain.model.batch import TrainBatch

AFTER, LENGTH = 5, 3  # in steps: one-time costs are over after 5 steps, and a trace of 3 steps is small


def window(option: Any, first: int, last: int) -> range:
    """The steps to record, counted from 1. Raises UserError for anything but false, true or two steps in order.

    option: `train.profile`. first: the steps done before this session. last: the last step of the run.
    """
    if option is False or option is None:
        return range(0)
    if option is True:
        start = min(first + AFTER, max(first, last - LENGTH + 1))
        return range(start, start + LENGTH)
    steps = list(option) if isinstance(option, list | tuple) else []
    if len(steps) != 2 or not all(type(s) is int for s in steps) or not 1 <= steps[0] <= steps[1]:
        raise UserError(f"train.profile is {option!r}; set it to true, false, or the first and last step such as [10,12]")
    return range(steps[0], steps[1] + 1)


class Profile:
    """Profiles `steps` (counted from 1) and writes a Chrome trace to `file`. `step` wraps each training step.

    file: None: record nothing in this process.
    """

    def __init__(self, steps: range, file: Path | None, say: Callable[[str], None]) -> None:
        self.steps, self.file, self.say = steps if file else range(0), file, say
        self._running: profile | None = None

    def __enter__(self) -> Profile:
        return self

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        if step in self.steps and self._running is None:
            on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._running = profile(activities=[ProfilerActivity.CPU, *on_gpu])
            self._running.start()
        yield
        if step + 1 not in self.steps:
            self._write()

    def _write(self) -> None:
        if self._running is None:
            return
        profiler, self._running = self._running, None
        profiler.stop()
        profiler.export_chrome_trace(str(self.file))
        self.say(f"trace: {self.file}; open it at https://ui.perfetto.dev or in chrome://tracing")

    def __exit__(self, *_: object) -> None:
        self._write()


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of one step in one process. Shares are shares of its seconds."""

    seconds: float
    target_share: float  # the frozen target's forward pass; 0 for a target that is trained too
    data_share: float  # waiting for data
    rest_share: float
    mfu: float | None  # model FLOPs utilisation, of the dense bfloat16 peak; None if the peak is unknown
    peak_memory: int  # bytes, since the process began
    flops: float  # see `Flops`

    def values(self) -> dict[str, Any]:
        """The figures to log. Seconds are logged as a rate, and operations as mfu."""
        return {name: value for name, value in asdict(self).items() if name not in ("seconds", "flops")}


class Meter:
    """Clocks for the parts of a step. On a GPU, events time the target's part; they are read later, without a sync."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.peak, self.flops = device, peak_of(device), Flops()
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._begin()

    def _begin(self) -> None:
        self._began, self._data, self._target, self._work = perf_counter(), 0.0, 0.0, 0.0

    @contextmanager
    def data(self) -> Iterator[None]:
        """Wraps waiting for the next batch."""
        start = perf_counter()
        yield
        self._data += perf_counter() - start

    @contextmanager
    def target(self) -> Iterator[None]:
        """Wraps the frozen target's forward pass."""
        if self.device.type != "cuda":
            start = perf_counter()
            yield
            self._target += perf_counter() - start
            return
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        yield
        events[1].record()
        self._events.append(events)

    @contextmanager
    def micro_batch(self, batch: TrainBatch) -> Iterator[None]:
        """Wraps forward and backward of both models."""
        with self.flops.counting(batch):
            yield
        self._work += self.flops.of(batch)

    def step(self) -> StepCost:
        """End a step, and return its cost. The next step begins."""
        target = self._target
        while self._events and self._events[0][1].query():
            start_event, end_event = self._events.pop(0)
            target += start_event.elapsed_time(end_event) / 1000
        seconds = perf_counter() - self._began
        data, target = min(self._data / seconds, 1.0), min(target / seconds, 1.0)
        mfu = None if self.peak is None else self._work / seconds / self.peak
        cost = StepCost(seconds, target, data, max(0.0, 1.0 - data - target), mfu, peak_memory(self.device), self._work)
        self._begin()
        return cost

    def pause(self) -> None:
        """Leave out the time since the last step, which was not training."""
        self._begin()


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: of tensors on a GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max_rss if sys.platform == "darwin" else max_rss * 1024


# The first name that occurs in the device's name counts. A longer name comes before its prefix.
PEAKS = (
    ("GB200", 2500e12),  # NVIDIA GB200 NVL72 data sheet, 2024
    ("B200", 2250e12),  # NVIDIA DGX B200 data sheet, 2024: 72 PFLOP/s in FP8 sparse for 8, a quarter of it dense in BF16
    ("H200", 989.4e12),  # NVIDIA H200 data sheet, 2023
    ("GH200", 989.4e12),  # NVIDIA GH200 data sheet, 2023
    ("H100 PCIe", 756e12),  # NVIDIA H100 data sheet, 2022
    ("H100 NVL", 835e12),  # NVIDIA H100 NVL data sheet, 2023
    ("H100", 989.4e12),  # SXM5; NVIDIA H100 white paper, 2022, table 2
    ("H800", 989.4e12),  # as the H100: its links differ
    ("A100", 312e12),  # NVIDIA A100 white paper, 2020, table 1
    ("A800", 312e12),
    ("A10G", 70e12),  # AWS G5 instances
    ("A10", 125e12),  # NVIDIA A10 data sheet, 2021
    ("L40S", 362e12),  # NVIDIA L40S data sheet, 2023
    ("L4", 121e12),  # NVIDIA L4 data sheet, 2023
    ("RTX 4090", 165.2e12),  # NVIDIA Ada white paper, 2022, appendix A, accumulated in FP32
    ("RTX 3090", 71e12),  # NVIDIA Ampere GA102 white paper, 2020, appendix A, accumulated in FP32
    ("MI300X", 1307.4e12),  # AMD Instinct MI300X data sheet, 2023
)


def peak_of(device: torch.device) -> float | None:
    """The device's peak in FLOP/s; None for a CPU and for a device that is not in the table."""
    return named_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def named_peak(name: str) -> float | None:
    """The peak in FLOP/s of the device with this name; None if it is not in the table."""
    return next((peak for pattern, peak in PEAKS if pattern in name), None)


class Flops:
    """Operations of target and drafter, forward and backward, for any micro-batch.

    The first micro-batch is counted by torch's formulas: 2 m n k for a matrix product; both products of attention over all
    T * T pairs, causal or not (the convention of PaLM, arXiv 2204.02311, appendix B); and the gradients that are computed:
    2 products for a trained matrix, 1 for a frozen one. From these counts, any micro-batch takes

        flops = per_position * B T + per_pair * B T^2

    The second term is attention. Padding to the longest row counts. Recomputation to save memory does not count, and neither do
    products inside our own kernels (attention over trees; training uses torch's attention). With sequence parallelism the count
    is that of this process, expressed in the whole length T.
    """

    def __init__(self) -> None:
        self.per_position: float | None = None
        self.per_pair = 0.0

    @contextmanager
    def counting(self, batch: TrainBatch) -> Iterator[None]:
        """Wraps one whole micro-batch; counts the first one."""
        if self.per_position is not None:
            yield
            return
        B, T = len(batch.token_BT), batch.length
        with _Counter() as counter:
            yield
        self.per_position, self.per_pair = counter.products / (B * T), counter.attention / (B * T * T)

    def of(self, batch: TrainBatch) -> float:
        """Operations of this micro-batch, without those of padding that all its rows have."""
        B, T = len(batch.token_BT), batch.longest
        return (self.per_position or 0.0) * B * T + self.per_pair * B * T * T


def _forward(q_BhTD: Tensor, k_BgSD: Tensor, v_BgSD: Tensor, *_: Any) -> int:
    B, h, T, D = q_BhTD.shape
    return 2 * B * h * T * k_BgSD.shape[2] * (D + v_BgSD.shape[3])


def _backward(_out: Tensor, q_BhTD: Tensor, k_BgSD: Tensor, v_BgSD: Tensor, *_: Any) -> int:
    """As torch counts it: the scores once more, and four products for the gradients."""
    B, h, T, D = q_BhTD.shape
    return 2 * B * h * T * k_BgSD.shape[2] * (3 * D + 2 * v_BgSD.shape[3])


KERNELS = ("efficient", "flash", "cudnn")
# torch 2.11's own formulas take no keys that several query heads share
ATTENTION: dict[str, Callable[..., int]] = {f"aten::_scaled_dot_product_{name}_attention": _forward for name in KERNELS}
ATTENTION |= {f"aten::_scaled_dot_product_{name}_attention_backward": _backward for name in KERNELS}


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.products = self.attention = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry and not self._again():
            count_flops = ATTENTION.get(packet._qualified_op_name)
            flops = count_flops(*args) if count_flops else flop_registry[packet](*args, **(kwargs or {}), out_val=out)
            if "attention" in str(packet):
                self.attention += flops
            else:
                self.products += flops
        return out

    @staticmethod
    def _again() -> bool:
        """Whether activation checkpointing is recomputing a forward pass, during the backward pass.

        Grad mode cannot tell: it may be off there too, as inside a `Function`.
        """
        if torch._C._current_graph_task_id() == -1:
            return False
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
            frame = frame.f_back  # type: ignore[assignment]
        return frame is not None
