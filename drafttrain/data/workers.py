"""Prepares records: in this process, in worker processes, or in another process that shares the folder with this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from drafttrain.core.errors import WorkerError
from drafttrain.data.chat import Encoder
from drafttrain.data.sources import Source
from drafttrain.data.store import BlockStore, RecordBlock, encode_block

POLL = 0.05  # seconds between checks of a folder that another process fills
MAX_WORKERS = 16  # most processes by default
KILLED = "a process that prepares data was killed, for want of memory perhaps; lower data.workers"
IGNORED = ("SIGINT", "SIGTERM", "SIGUSR1")  # sent to all processes of a terminal or job; workers end with their parent


@dataclass(frozen=True, slots=True)
class Task:
    """Records of one source to prepare."""

    source: int
    numbers: Sequence[int]


@dataclass(frozen=True, slots=True)
class PreparedBlock:
    """A prepared block and the number of its source."""

    source: int
    block: RecordBlock


class Preparer(Iterator[PreparedBlock], ABC):
    """Prepares tasks in the order in which they are added. Iterates over the prepared blocks."""

    @abstractmethod
    def add(self, tasks: Sequence[Task]) -> None:
        """Append tasks."""

    def finished(self) -> Iterator[PreparedBlock]:
        """Blocks that are prepared already."""
        return iter(())

    def close(self) -> None:
        """Start no more tasks."""


class InProcess(Preparer):
    """Prepares in this process and in memory, when the next block is requested."""

    def __init__(self, sources: Sequence[Source], encoder: Encoder) -> None:
        self._sources, self._encoder = sources, encoder
        self._tasks: deque[Task] = deque()

    def add(self, tasks: Sequence[Task]) -> None:
        self._tasks.extend(tasks)

    def __next__(self) -> PreparedBlock:
        task = self._tasks.popleft()
        return PreparedBlock(task.source, encode_block(self._sources[task.source], self._encoder, task.numbers))


class WorkerPool(Preparer):
    """Worker processes that write blocks. While they start, and when it must wait, the caller prepares unstarted
    tasks itself.
    """

    def __init__(self, sources: Sequence[Source], encoder: Encoder, stores: Sequence[BlockStore], workers: int) -> None:
        # forkserver or spawn: a fork of this process would inherit the locks of its threads and its GPU context
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        context = multiprocessing.get_context(method)
        context.set_forkserver_preload([__name__])
        self._writer = BlockWriter(list(sources), encoder, list(stores))
        self._pool = ProcessPoolExecutor(workers, context, _start_worker, (self._writer,))
        self._lock = threading.Lock()
        self._waiting: deque[Task] | None = deque()  # tasks until the processes have started; None afterwards
        self._futures: deque[tuple[Task, Future[str]]] = deque()
        self._end = weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        self_ref = weakref.ref(self)
        self._broken = False
        self._pool.submit(int).add_done_callback(
            lambda probe: pool._started(probe) if (pool := self_ref()) is not None else None
        )

    def add(self, tasks: Sequence[Task]) -> None:
        with self._lock:
            if self._waiting is None:
                self._submit(tasks)
            else:
                self._waiting.extend(tasks)

    def _started(self, probe: Future[int]) -> None:
        with self._lock:
            if probe.cancelled() or not self._end.alive:
                return
            self._broken = probe.exception() is not None
            if not self._broken:
                queued, self._waiting = self._waiting, None
                self._submit(queued or ())

    def _submit(self, tasks: Iterable[Task]) -> None:
        try:
            self._futures.extend((task, self._pool.submit(_prepare, task)) for task in tasks)
        except BrokenProcessPool:
            self._broken = True  # the next `__next__` raises

    def __next__(self) -> PreparedBlock:
        with self._lock:
            if self._broken:
                raise WorkerError(KILLED)
            task = self._waiting.popleft() if self._waiting else None
        if task is not None:
            return self._read(task, self._writer(task))
        for index, (task, future) in enumerate(self._futures):
            if future.done() or future.cancel():  # a task that no process has started is prepared here
                del self._futures[index]
                return self._read(task, self._writer(task) if future.cancelled() else self._result(future))
        task, future = self._futures.popleft()
        return self._read(task, self._result(future))

    def _result(self, future: Future[str]) -> str:
        try:
            return future.result()
        except BrokenProcessPool as error:
            raise WorkerError(KILLED) from error

    def _read(self, task: Task, name: str) -> PreparedBlock:
        store = self._writer.stores[task.source]
        if (block := store.read(name)) is None:  # another process wrote it, and it has been damaged since
            store.remove(name)
            block = store.read(self._writer(task))
        assert block is not None, "written atomically"
        return PreparedBlock(task.source, block)

    def finished(self) -> Iterator[PreparedBlock]:
        while self._futures and self._futures[0][1].done() and self._futures[0][1].exception() is None:
            yield next(self)

    def close(self) -> None:
        with self._lock:
            self._end()


class Follower(Preparer):
    """Waits for blocks that another process of this machine writes. Both request the same tasks.

    It waits without a time limit, because a launcher ends all processes when one fails.
    """

    def __init__(self, stores: Sequence[BlockStore], seen: Sequence[set[str]]) -> None:
        self._stores, self._known = stores, [set(names) for names in seen]

    def add(self, tasks: Sequence[Task]) -> None:
        pass

    def __next__(self) -> PreparedBlock:
        while True:
            for source, store in enumerate(self._stores):
                for name in sorted(store.names() - self._known[source]):
                    if (block := store.read(name)) is not None:
                        self._known[source].add(name)
                        return PreparedBlock(source, block)
            time.sleep(POLL)


def spare_cores() -> int:
    """Cores that this process may use, less the one it runs on, at most `MAX_WORKERS`."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_WORKERS, available - 1))


@dataclass(frozen=True, slots=True)
class BlockWriter:
    """Prepares a task, writes its block to disk and returns the block's name."""

    sources: list[Source]
    encoder: Encoder
    stores: list[BlockStore]

    def __call__(self, task: Task) -> str:
        store = self.stores[task.source]
        name = store.name(task.numbers)  # a process of another machine may have written it
        if (store.folder / name).exists():
            return name
        return store.write(encode_block(self.sources[task.source], self.encoder, task.numbers))


_writer: BlockWriter | None = None  # set in worker processes


def _start_worker(writer: BlockWriter) -> None:
    """Initialise a worker process."""
    global _writer
    for name in IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _writer = writer


def _prepare(task: Task) -> str:
    assert _writer is not None
    return _writer(task)


def _end_with_parent() -> None:
    """End this worker when its parent has ended. A killed parent does not close its pool."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
