"""Who prepares records: this process, processes of a pool, or another process that shares the folder with this one."""

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
from drafttrain.data.store import Block, Store, encode_block

POLL = 0.05  # seconds between looks at a folder that another process fills
MOST = 16  # processes by default
KILLED = "a process that prepares data was killed, for want of memory perhaps; lower data.workers"
IGNORED = ("SIGINT", "SIGTERM", "SIGUSR1")  # they go to all of a terminal's or a job's processes; these end with their parent


@dataclass(frozen=True, slots=True)
class Task:
    """Records of one source."""

    source: int
    numbers: Sequence[int]


@dataclass(frozen=True, slots=True)
class Done:
    source: int
    block: Block


class Team(Iterator[Done], ABC):
    """Prepares tasks in the order in which they are added; an iterator over what is done."""

    @abstractmethod
    def add(self, tasks: Sequence[Task]) -> None:
        """After what was added before."""

    def finished(self) -> Iterator[Done]:
        """What is done already."""
        return iter(())

    def close(self) -> None:
        """Begin no more."""


class Here(Team):
    """This process, in memory, when it is asked for the next."""

    def __init__(self, sources: Sequence[Source], encoder: Encoder) -> None:
        self._sources, self._encoder = sources, encoder
        self._tasks: deque[Task] = deque()

    def add(self, tasks: Sequence[Task]) -> None:
        self._tasks.extend(tasks)

    def __next__(self) -> Done:
        task = self._tasks.popleft()
        return Done(task.source, encode_block(self._sources[task.source], self._encoder, task.numbers))


class Pool(Team):
    """Processes that write blocks. Who waits for one meanwhile prepares what none has begun: all, until they have started."""

    def __init__(self, sources: Sequence[Source], encoder: Encoder, stores: Sequence[Store], workers: int) -> None:
        # processes of a server that was started clean: a fork of this one would have its threads' locks and its GPU
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        context = multiprocessing.get_context(method)
        context.set_forkserver_preload([__name__])
        self._work = Work(list(sources), encoder, list(stores))
        self._pool = ProcessPoolExecutor(workers, context, _begin, (self._work,))
        self._lock = threading.Lock()
        self._waiting: deque[Task] | None = deque()  # for the processes to start; None: they have
        self._futures: deque[tuple[Task, Future[str]]] = deque()
        self._end = weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        own = weakref.ref(self)
        self._broken = False
        self._pool.submit(int).add_done_callback(lambda first: pool._started(first) if (pool := own()) is not None else None)

    def add(self, tasks: Sequence[Task]) -> None:
        with self._lock:
            if self._waiting is None:
                self._submit(tasks)
            else:
                self._waiting.extend(tasks)

    def _started(self, first: Future[int]) -> None:
        with self._lock:
            if first.cancelled() or not self._end.alive:
                return
            self._broken = first.exception() is not None
            if not self._broken:
                waiting, self._waiting = self._waiting, None
                self._submit(waiting or ())

    def _submit(self, tasks: Iterable[Task]) -> None:
        try:
            self._futures.extend((task, self._pool.submit(_prepare, task)) for task in tasks)
        except BrokenProcessPool:
            self._broken = True  # said to who waits

    def __next__(self) -> Done:
        with self._lock:
            if self._broken:
                raise WorkerError(KILLED)
            task = self._waiting.popleft() if self._waiting else None
        if task is not None:
            return self._read(task, self._work(task))
        for place, (task, future) in enumerate(self._futures):
            if future.done() or future.cancel():  # one that no process has begun is prepared by who waits
                del self._futures[place]
                return self._read(task, self._work(task) if future.cancelled() else self._result(future))
        task, future = self._futures.popleft()
        return self._read(task, self._result(future))

    def _result(self, future: Future[str]) -> str:
        try:
            return future.result()
        except BrokenProcessPool as error:
            raise WorkerError(KILLED) from error

    def _read(self, task: Task, name: str) -> Done:
        store = self._work.stores[task.source]
        if (block := store.read(name)) is None:  # of another process, and damaged since
            store.remove(name)
            block = store.read(self._work(task))
        assert block is not None, "written whole"
        return Done(task.source, block)

    def finished(self) -> Iterator[Done]:
        while self._futures and self._futures[0][1].done() and self._futures[0][1].exception() is None:
            yield next(self)

    def close(self) -> None:
        with self._lock:
            self._end()


class Follower(Team):
    """Another process of this machine writes the blocks. It is asked for the same, and waited for without end: a launcher ends
    all processes with one that fails."""

    def __init__(self, stores: Sequence[Store], seen: Sequence[set[str]]) -> None:
        self._stores, self._known = stores, [set(names) for names in seen]

    def add(self, tasks: Sequence[Task]) -> None:
        pass

    def __next__(self) -> Done:
        while True:
            for source, store in enumerate(self._stores):
                for name in sorted(store.names() - self._known[source]):
                    if (block := store.read(name)) is not None:
                        self._known[source].add(name)
                        return Done(source, block)
            time.sleep(POLL)


def spare_cores() -> int:
    """Those that this process may use, less the one it is on itself."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST, allowed - 1))


@dataclass(frozen=True, slots=True)
class Work:
    """What turns a task into a block on disk, and gives the block's name."""

    sources: list[Source]
    encoder: Encoder
    stores: list[Store]

    def __call__(self, task: Task) -> str:
        store = self.stores[task.source]
        name = store.name(task.numbers)  # another machine's process may have been here
        if (store.folder / name).exists():
            return name
        return store.write(encode_block(self.sources[task.source], self.encoder, task.numbers))


_work: Work | None = None  # of a worker process


def _begin(work: Work) -> None:
    """What a worker process starts with."""
    global _work
    for name in IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _work = work


def _prepare(task: Task) -> str:
    assert _work is not None
    return _work(task)


def _end_with_parent() -> None:
    """A parent that was killed closes nothing."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
