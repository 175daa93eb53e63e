"""`torch.cuda` over the devices of `device.cpp`: host memory that says `cuda:N`.

What it refuses, as an error in the process that does it:
- memory, kernels, events, streams, synchronisation, pinned memory and memory figures before `set_device`, and on any device but
  the one that was named there: each opens a context on a GPU, and another process's GPU pays for it;
- `set_device` of another number than LOCAL_RANK, where several processes run and more than one GPU is visible;
- operators whose tensors are on two devices, but for those that a GPU takes too (copies, indices on the host, scalars).

What it does not show: order on streams (all is done when a call returns, so that a missing wait is not seen), memory in use,
CUDA graphs (captures are off), kernels of ours (nvcc's; the torch references run), which operators a GPU lacks, and speed.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

MEMORY = 8 << 30  # bytes of each device
SMALL = (1 << 16, 1)  # bytes and repeats, where the bandwidth of a GPU's memory would be measured


class Devices:
    """What torch.cuda's functions ask."""

    def __init__(self, library: ctypes.CDLL, count: int) -> None:
        self.library, self.count = library, count
        library.standin_open(count)

    def index(self, device: Any = None) -> int:
        if device is None:
            return int(self.library.standin_current())
        if isinstance(device, int):
            return device
        known = torch.device(device)
        return int(self.library.standin_current()) if known.index is None else known.index

    def set_device(self, device: Any) -> None:
        index, own = self.index(device), os.environ.get("LOCAL_RANK", "0")
        if not 0 <= index < self.count:
            raise RuntimeError(f"CUDA error: invalid device ordinal {index}, stand-in has {self.count}")
        bound = int(self.library.standin_bound())
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if (several and self.count > 1 and index != int(own)) or bound not in (-1, index):
            raise RuntimeError(f"stand-in: set_device({index}) with LOCAL_RANK={own}, after set_device({bound})")
        self.library.standin_set(index)

    def used(self, device: Any = None) -> int:
        """The index of a device on which a context is opened."""
        index, bound = self.index(device), int(self.library.standin_bound())
        if bound != index:
            raise RuntimeError(f"stand-in: a context on cuda:{index} by a process that has set device {bound}")
        return index

    @contextmanager
    def exchanged(self, device: Any) -> Iterator[None]:
        before = int(self.library.standin_current())
        self.library.standin_exchange(self.index(device))
        try:
            yield
        finally:
            self.library.standin_exchange(before)


class Stream:
    """Operations are done when they return."""

    devices: Devices
    operators: torch.library.Library
    cuda_stream, stream_id, device_type = 0, 0, 1

    def __init__(self, device: Any = None, priority: int = 0, **more: Any) -> None:
        self.device = torch.device("cuda", self.devices.used(device))
        self.device_index = self.device.index

    def wait_stream(self, other: Stream) -> None: ...
    def wait_event(self, event: Event) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True


class Event:
    def __init__(self, *given: Any, **more: Any) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        Stream.devices.used()
        self.at = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds."""
        return 1000 * (other.at - self.at)

    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


def install(library: ctypes.CDLL, count: int) -> None:
    devices = Stream.devices = Devices(library, count)
    for name, stand_in in functions(devices).items():
        setattr(torch.cuda, name, stand_in)
    torch.version.cuda = "13.0"
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]
    Stream.operators = attention()
    after_import("drafttrain.measure.speed", lambda module: setattr(module.memory_bandwidth, "__defaults__", SMALL))
    after_import("drafttrain.decoding.graph_runner", lambda module: setattr(module, "capturable", lambda *_: False))
    after_import("drafttrain.targets.probe", lambda module: setattr(module, "why_not_captured", lambda _: "a stand-in"))


def attention() -> torch.library.Library:
    """Two operators that a CPU has under another name alone; it calculates the same."""
    aten, own = torch.ops.aten, torch.library.Library("aten", "IMPL")

    def forward(
        q: Tensor, k: Tensor, v: Tensor, bias: Any, lse: bool, dropout: float = 0.0, causal: bool = False, *, scale: Any = None
    ) -> Any:
        out, lse_BhT = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, attn_mask=bias, scale=scale)
        return out, lse_BhT, *torch.zeros(2, dtype=torch.long, device=q.device)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor, lse_BhT: Tensor, seed: Tensor, offset: Tensor,
        dropout: float, wanted: Any, causal: bool = False, *, scale: Any = None
    ) -> Any:  # fmt: skip
        lse_BhT, more = lse_BhT[..., : q.shape[2]].contiguous(), {"attn_mask": bias, "scale": scale}
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse_BhT, dropout, causal, **more)
        return *found, None

    own.impl("_scaled_dot_product_efficient_attention", forward, "CUDA")
    own.impl("_scaled_dot_product_efficient_attention_backward", backward, "CUDA")
    return own


def functions(devices: Devices) -> dict[str, Any]:
    count = devices.count
    card = SimpleNamespace(
        name="stand-in", major=9, minor=0, total_memory=MEMORY, multi_processor_count=1, uuid="0", gcnArchName=""
    )  # fmt: skip
    nothing = ("_lazy_init", "init", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "manual_seed", "manual_seed_all")
    nothing += ("reset_max_memory_allocated", "reset_max_memory_cached", "reset_accumulated_memory_stats")
    figures = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached")
    made = {name: always(None) for name in nothing} | {name: always(0) for name in figures}
    made |= {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_call": lambda call, **more: call(),
        "device_count": lambda: count,
        "current_device": devices.index,
        "set_device": devices.set_device,
        "device": devices.exchanged,
        "device_of": lambda x: devices.exchanged(x.device),
        "get_device_properties": lambda device=None: card,
        "get_device_name": lambda device=None: card.name,
        "get_device_capability": lambda device=None: (card.major, card.minor),
        "is_bf16_supported": lambda *given, **more: True,
        "mem_get_info": lambda device=None: (MEMORY + 0 * devices.used(device), MEMORY),
        "memory_stats": lambda device=None: {},
        "synchronize": lambda device=None: devices.used(device) and None,
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: nullcontext(),
        "current_stream": Stream,
        "default_stream": Stream,
        "is_current_stream_capturing": lambda: False,
        "nccl": SimpleNamespace(version=lambda: (2, 28, 0)),
        "initial_seed": torch.initial_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()] * count,
        "set_rng_state_all": lambda states: None,
        "default_generators": (torch.default_generator,) * count,
        "nvtx": SimpleNamespace(range_push=always(None), range_pop=always(None), mark=always(None)),
    }
    return made


def always(value: Any) -> Callable[..., Any]:
    """A function of its own each time: torch._dynamo lists torch.cuda's functions, and wants none twice."""
    return lambda *given, **more: value


class _After(importlib.abc.MetaPathFinder):
    """Calls `then` with the module `name` as soon as it has been imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], object]) -> None:
        self.name, self.then = name, then

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        assert found is not None and found.loader is not None
        execute = found.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            self.then(module)

        found.loader.exec_module = executed  # type: ignore[method-assign]
        return found


def after_import(name: str, then: Callable[[ModuleType], object]) -> None:
    sys.meta_path.insert(0, _After(name, then))
