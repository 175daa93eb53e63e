"""CUDA graphs on a CPU, for tests: what runs under capture is recorded operation by operation, and a replay runs it again.

A replay knows the recorded tensors and nothing else: what the host decided, read or allocated at capture stays as it was
then, as in a real graph. So a step that replays right depends on device tensors alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drafttrain import ahead

FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")
ASKING = ("item", "tolist", "__bool__", "__int__", "__index__", "__float__", "nonzero", "cpu", "numpy")
FRESH = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")  # a graph's memory keeps what it held


class Recorded(TorchDispatchMode):
    """Refuses what a graph cannot hold: questions to the device, data brought to it, shapes that depend on data."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        assert name not in FORBIDDEN, f"{func} asks the device"
        assert name != "lift_fresh" or args[0].ndim == 0, "data is brought to the device"  # numbers are launch arguments
        if name in ("index", "index_put", "index_put_"):
            assert not any(i is not None and i.dtype == torch.bool for i in args[1]), f"{func} counts what a mask selects"
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    @property
    def shapes(self) -> list[Any]:
        """What ran, by name and argument shapes."""
        return [
            (func.name(), [tuple(x.shape) for x in tree_leaves(args) if isinstance(x, torch.Tensor)])
            for func, args, _, _ in self.calls
        ]

    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            if func.name().split("::")[1].split(".")[0] in FRESH:
                continue
            taken = {storage(x) for x in tree_leaves((args, kwargs))}
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and storage(old) not in taken:
                    old.copy_(new)


def storage(x: Any) -> int | None:
    """Where a tensor's memory begins; None for what has none to look at."""
    return x.untyped_storage().data_ptr() if isinstance(x, torch.Tensor) and not x.is_mkldnn else None


@contextmanager
def recorded() -> Iterator[Recorded]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the host asks the device")

    with pytest.MonkeyPatch.context() as patch, Recorded() as calls:
        for name in ASKING:
            patch.setattr(torch.Tensor, name, refuse)
        yield calls


class Graph:
    """In place of torch.cuda.CUDAGraph."""

    made = 0

    def __init__(self) -> None:
        self.calls = Recorded()
        Graph.made += 1

    def replay(self) -> None:
        self.calls.replay()


class Event:
    """In place of torch.cuda.Event."""

    def __init__(self, **_: Any) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: Event) -> float:
        return 1.0


@contextmanager
def capture(graph: Graph, **_: Any) -> Iterator[None]:
    with recorded() as calls:
        graph.calls = calls
        yield


@pytest.fixture
def cpu_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that run ahead capture graphs, on the CPU."""
    Graph.made = 0
    stream = SimpleNamespace(wait_stream=lambda _: None)
    fake = SimpleNamespace(
        CUDAGraph=Graph,
        Event=Event,
        Stream=lambda _: stream,
        current_stream=lambda _: stream,
        stream=lambda _: nullcontext(),
        synchronize=lambda _: None,
        graph=capture,
        graph_pool_handle=lambda: None,
        memory_reserved=lambda _: 0,
    )
    monkeypatch.setattr(ahead, "cuda", fake)
    monkeypatch.setattr(ahead, "pinned", lambda x: x)
