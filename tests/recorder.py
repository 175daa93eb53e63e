"""CUDA graphs on a CPU, for tests: what runs under capture is recorded operation by operation, and a replay runs it again.

A replay knows what a real graph knows: addresses. It is as strict about memory as a real one is careless:
- Tensors that were made before the capture are held by weak reference alone. A replay that needs one whose memory the program
  has freed or moved meanwhile fails, where a real graph would read or write whatever lies there now.
- Memory that is allocated under capture belongs to the graph. It is poisoned when the capture ends and before every replay:
  nothing has been computed before the first replay, and the pool may be overwritten between two.
- A capture changes nothing: what it wrote to the program's tensors is put back.
- The host's decisions at capture stay as they were.
So a step that replays right depends on device tensors alone, and on none that goes away.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, get_args

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from drafttrain.decoding import graph_runner as ahead
from drafttrain.decoding import tree_size as treesize
from drafttrain.targets import vision

FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")
ASKING = ("item", "tolist", "__bool__", "__int__", "__index__", "__float__", "nonzero", "cpu", "numpy")
FRESH = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")  # allocate and write nothing
LIFTED = "lift_fresh"  # a number of the program text: an argument of the launch
BRINGING = {"index_put": 2, "index_put_": 2, "copy_": 1}  # the place of what they write
POISON = -77  # of whole numbers


class FreedError(AssertionError):
    """A replay needs memory that the program no longer has."""


@dataclass(frozen=True, slots=True)
class Lent:
    """A tensor of the program: where it was at capture, without keeping it alive."""

    weak: StorageWeakRef
    address: int
    like: tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]  # dtype, offset, shape, strides

    @staticmethod
    def of(x: Tensor) -> Lent:
        storage = x.untyped_storage()
        return Lent(
            StorageWeakRef(storage), storage.data_ptr(), (x.dtype, x.storage_offset(), tuple(x.shape), tuple(x.stride()))
        )

    def __call__(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)
        dtype, offset, shape, strides = self.like
        if storage is None:
            raise FreedError(f"a tensor of {dtype} and shape {list(shape)} was freed")
        if storage.data_ptr() != self.address:
            raise FreedError(f"a tensor of {dtype} and shape {list(shape)} lies elsewhere now")
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)


@dataclass(frozen=True, slots=True)
class Opaque:
    """A tensor of the program without memory to look at (packed weights), by weak reference."""

    weak: weakref.ref[Tensor]

    def __call__(self) -> Tensor:
        x = self.weak()
        if x is None:
            raise FreedError("packed weights were freed")
        return x


@dataclass(frozen=True, slots=True)
class Owned:
    """A tensor in the graph's own memory."""

    tensor: Tensor

    def __call__(self) -> Tensor:
        return self.tensor


Held = Lent | Opaque | Owned
HELD = get_args(Held)


@dataclass(frozen=True, slots=True)
class Call:
    """args, kwargs: with `Held` in place of tensors. made: results in memory of their own."""

    func: Any
    args: Any
    kwargs: Any
    made: list[Tensor | None]
    shapes: list[tuple[int, ...]]
    name: str

    @property
    def computes(self) -> bool:
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in self.func._schema.arguments)
        return self.name not in (*FRESH, LIFTED) and (writes or any(made is not None for made in self.made))

    def again(self) -> None:
        try:
            args, kwargs = filled(self.args), filled(self.kwargs)
        except FreedError as error:
            raise FreedError(f"replaying {self.func}: {error}") from None
        result = self.func(*args, **kwargs)
        for old, new in zip(self.made, leaves(result), strict=True):
            if old is not None:
                old.copy_(new)


class Recorded(TorchDispatchMode):
    """Refuses what a graph cannot hold: questions to the device, data brought to it, shapes that depend on data."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._own: set[int] = set()  # storages that only this graph has
        self._numbers: set[int] = set()  # those of them that lie with the host
        self._before: list[tuple[Tensor, Tensor]] = []  # tensors of the program that were written to, and what they held
        self._seen: set[int] = set()
        self._pool: list[Tensor] = []  # what is poisoned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = short(func), kwargs or {}
        assert name not in FORBIDDEN, f"{func} asks the device"
        assert name != LIFTED or args[0].ndim == 0, "data is brought to the device"
        if name in ("index", "index_put", "index_put_"):
            assert not any(i is not None and i.dtype == torch.bool for i in args[1]), f"{func} counts what a mask selects"
        if name in BRINGING:  # on a GPU `x[index] = 0` copies the number there; `x.index_fill_` takes it as an argument
            values = args[BRINGING[name]]
            assert key(values) not in self._numbers, f"{func} brings a number to the device"
        if name == LIFTED:
            self._own.add(key(args[0]))
            self._numbers.add(key(args[0]))
        self._remember(func, args, kwargs)
        taken = {key(x) for x in tensors((args, kwargs))}
        result = func(*args, **kwargs)
        made = [x if isinstance(x, Tensor) and key(x) not in taken else None for x in leaves(result)]
        self._own |= {key(x) for x in made if x is not None}
        held = tree_map_only(Tensor, self._held, (args, kwargs))
        self.calls.append(Call(func, *held, made, [tuple(x.shape) for x in tensors(args)], name))
        self._pool += [x for x in made if x is not None and not x.is_mkldnn and name != LIFTED]
        return result

    def _held(self, x: Tensor) -> Held:
        if key(x) in self._own:
            return Owned(x)
        return Opaque(weakref.ref(x)) if x.is_mkldnn else Lent.of(x)

    def _remember(self, func: Any, args: Any, kwargs: Any) -> None:
        """What the program's tensors held before this call writes to them."""
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for x in tensors(args[place] if place < len(args) else kwargs.get(argument.name)):
                if key(x) not in self._own | self._seen:
                    whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
                    self._before.append((whole, whole.clone()))
                    self._seen.add(key(x))

    def ended(self) -> None:
        """The capture is over: nothing has been computed, nothing was written."""
        for whole, held in self._before:
            whole.copy_(held)
        self._before.clear()
        self._seen.clear()
        self._poison()

    def _poison(self) -> None:
        for x in self._pool:
            poison(x)

    @property
    def kernels(self) -> Counter[str]:
        """Operations that compute something, by name: a GPU launches at least one kernel for each. Views and empty tensors do
        not count."""
        return Counter(call.name for call in self.calls if call.computes)

    @property
    def shapes(self) -> list[Any]:
        """What ran, by name and argument shapes."""
        return [(call.func.name(), call.shapes) for call in self.calls]

    def replay(self) -> None:
        """Raises FreedError."""
        self._poison()
        for call in self.calls:
            if call.name not in FRESH:
                call.again()


def short(func: Any) -> str:
    return str(func.name().split("::")[1].split(".")[0])


def filled(of: Any) -> Any:
    """Arguments with the tensors that are held. A tree's general functions take more time than the operations themselves."""
    kind = type(of)
    if kind in HELD:
        return of()
    if kind is tuple or kind is list:
        return kind([filled(x) for x in of])
    return {name: filled(x) for name, x in of.items()} if kind is dict else of


def leaves(result: Any) -> list[Any]:
    """An operation's results one after another, as `tree_leaves` has them."""
    return [result] if isinstance(result, Tensor) else tree_leaves(result)


def tensors(of: Any) -> list[Tensor]:
    return [x for x in tree_leaves(of) if isinstance(x, Tensor)]


def key(x: Tensor) -> int:
    """Names a tensor's memory; of what has none to look at, the tensor."""
    return id(x) if x.is_mkldnn else int(x.untyped_storage()._cdata)


def poison(x: Tensor) -> None:
    """Overwrite with what nobody computes."""
    if x.is_floating_point():
        x.fill_(float("nan"))
    elif x.dtype == torch.bool:
        x.fill_(True)
    elif x.dtype.is_signed:
        x.fill_(POISON)


@contextmanager
def recorded() -> Iterator[Recorded]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the host asks the device")

    with pytest.MonkeyPatch.context() as patch, Recorded() as calls:
        for name in ASKING:
            patch.setattr(torch.Tensor, name, refuse)
        patch.setattr(vision, "capturing", lambda _: True)
        yield calls


class Graph:
    """In place of torch.cuda.CUDAGraph. alive: those that nobody has dropped yet."""

    made = 0
    replayed = 0  # operations, since the beginning
    alive: ClassVar[weakref.WeakSet[Graph]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.calls = Recorded()
        Graph.made += 1
        Graph.alive.add(self)

    def reset(self) -> None:
        self.calls = Recorded()

    def replay(self) -> None:
        self.calls.replay()
        Graph.replayed += len(self.calls.calls)


class Event:
    """In place of torch.cuda.Event. Its clock counts replayed operations, a millisecond each; inside a graph it stands."""

    def __init__(self, external: bool = False, **_: Any) -> None:
        self.external, self.at = external, 0

    def record(self) -> None:
        self.at = Graph.replayed

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: Event) -> float:
        return 1.0 if self.external else float(later.at - self.at)


@contextmanager
def capture(graph: Graph, **_: Any) -> Iterator[None]:
    try:
        with recorded() as calls:
            graph.calls = calls
            yield
    finally:
        graph.calls.ended()


def install(patch: Callable[[Any, str, Any], None]) -> None:
    """Sessions that run ahead capture graphs, on the CPU. patch: sets an attribute of a module."""
    Graph.made = 0
    stream = SimpleNamespace(wait_stream=lambda _: None)
    fake = SimpleNamespace(
        CUDAGraph=Graph,
        Event=Event,
        Stream=lambda _: stream,
        current_stream=lambda _: stream,
        set_stream=lambda _: None,
        stream=lambda _: nullcontext(),
        get_sync_debug_mode=lambda: 0,
        set_sync_debug_mode=lambda _: None,
        synchronize=lambda _: None,
        graph=capture,
        graph_pool_handle=lambda: None,
        memory_reserved=lambda _: 0,
        get_device_properties=lambda _: SimpleNamespace(L2_cache_size=0),
    )
    for module in (ahead, treesize):
        patch(module, "cuda", fake)
    patch(ahead, "pinned", lambda x: x)


@pytest.fixture
def cpu_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch.setattr)
