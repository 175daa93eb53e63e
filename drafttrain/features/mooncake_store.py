"""A client of Mooncake's store: reads objects that other machines have put there, over TCP or RDMA, and removes them.

A `mooncake_master` knows which machine holds which object; the bytes come from that machine's memory. Released versions read
here: mooncake-transfer-engine 0.3.13. Its client can be used by several threads. It holds Python's lock while it connects, and
a call after `close` ends the process, so both are guarded here.

Shapes: N bytes.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Event, Lock
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.errors import UserError

INSTALL = "pip install 'drafttrain[mooncake]' (Linux on x86-64)"
DEVICES = Path("/sys/class/infiniband")  # RDMA devices of a Linux machine
CONNECT = 10.0  # seconds for the master to accept a connection
ALIGNED = 64  # bytes to which the parts of the buffer are aligned, as hs_connectors aligns tensors
SUSPECT = 120.0  # seconds in which a part whose transfer failed is not used again: the transfer may still write to it
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0005, 0.02  # seconds between two looks for an object
ENDING = 5.0  # seconds that the end of a run waits for the object of a request that was answered
NOT_FOUND, NOT_READY, TOO_SMALL = -704, -703, -600  # of Mooncake's error codes
# read by Mooncake when it is loaded: fewer lines on stderr, and an error after seconds, not after 90
SETTINGS = {"MC_LOG_LEVEL": "ERROR", "MC_YLT_LOG_LEVEL": "ERROR", "MC_STORE_CLIENT_SETUP_RETRIES": "2"}


class StoreError(Exception):
    """An object is missing, late or of another size, or the master or the object's machine is away. Another try may succeed."""


class MissingError(StoreError):
    """No object has this name."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How the store is reached. group: the options' group, for messages."""

    master: str  # host:port of mooncake_master
    host: str | None = None  # the name of this machine for the others; None: its address towards the master
    protocol: str = "tcp"  # tcp | rdma
    device: str = ""  # RDMA devices, with commas; empty: Mooncake chooses
    buffer: int = 2**30  # bytes in which objects arrive; no object may be larger
    group: str = "features.mooncake"

    def check(self) -> None:
        """Raise UserError for values that cannot be right."""
        split_address(self.master, f"{self.group}.master")
        if self.protocol == "tcp":
            if self.device:
                raise UserError(f"{self.group}.device is {self.device!r}, but {self.group}.protocol is tcp; leave it out")
            return
        devices = sorted(entry.name for entry in DEVICES.iterdir()) if DEVICES.is_dir() else []
        missing = [name for name in self.device.split(",") if name and name not in devices]
        if missing or not devices:
            raise UserError(
                f"{self.group}.protocol is rdma, but this machine has {'no RDMA device ' + missing[0] if missing else 'none'}; "
                f"{'choose ' + ', '.join(devices) if devices else f'set {self.group}.protocol=tcp'}"
            )


def split_address(address: str, option: str) -> tuple[str, int]:
    """Host and port of `host:port`. Raises UserError for another form."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 2**16 or any(c in host for c in "/, "):
        raise UserError(f"{option} is {address!r}; give the address of mooncake_master as HOST:PORT")
    return host.strip("[]"), int(port)


def mooncake() -> Any:
    """Mooncake's module. Raises UserError where it cannot be imported."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake import store
    except ModuleNotFoundError as error:
        raise UserError(f"Mooncake is not installed ({error}); {INSTALL}") from error
    except ImportError as error:  # a library of the system
        raise UserError(f"Mooncake cannot be imported: {error}; Debian and Ubuntu have it: apt install libibverbs1") from error
    return store


class MooncakeStore:
    """A connection to the store, for several threads. It is made at the first use, and again after a failure."""

    def __init__(self, settings: StoreSettings) -> None:
        """Raises UserError for settings that cannot be right, and where Mooncake is not installed."""
        settings.check()
        self.settings = settings
        self._module = mooncake()
        self._buffer = Buffer(settings.buffer)
        self._client: Any = None
        self._connecting = Lock()
        self._state = Condition()
        self._calls, self._closed = 0, False

    def exists(self, *keys: str) -> list[bool]:
        """Whether objects of these names are there. Raises StoreError where the master does not say."""
        statuses = self._called("batch_is_exist", list(keys))
        for status in statuses:
            if status not in (0, 1):
                raise self._fault("is_exist", status)
        return [status == 1 for status in statuses]

    def wait(self, keys: Sequence[str], deadline: float, closed: Event) -> str:
        """Wait for the first object of these names; where several are there, the first in this order.

        deadline: of `time.monotonic`. closed: ends the wait, `ENDING` seconds later. Raises MissingError where none
        comes in time.
        """
        delay, ending = SHORTEST_PAUSE, False
        while True:
            for key, present in zip(keys, self.exists(*keys), strict=True):
                if present:
                    return key
            if closed.is_set() and not ending:  # the server has answered and puts the object: nothing else would remove it
                ending, deadline = True, min(deadline, time.monotonic() + ENDING)
            if time.monotonic() >= deadline:
                raise MissingError(f"no object {keys[-1]} was put in time")
            if ending:
                time.sleep(delay)
            else:
                closed.wait(delay)
            delay = min(2 * delay, LONGEST_PAUSE)

    def get(self, key: str, nbytes: int) -> Tensor:
        """[N] the object's bytes, which must be so many. It waits while the buffer is full.

        Raises UserError for more bytes than the buffer has, and StoreError for another size and an object that cannot be read.
        """
        if nbytes < 1:
            raise StoreError(f"the object {key} is said to have {nbytes} bytes")
        if nbytes > self.settings.buffer:
            raise UserError(
                f"an object of {nbytes} bytes is larger than {self.settings.group}.buffer ({self.settings.buffer}); raise it"
            )
        with self._buffer.part(nbytes) as part_N:
            status = self._called("get_into", key, part_N.data_ptr(), nbytes)
            if status == nbytes:
                return part_N.clone()
            if status >= 0 or status == TOO_SMALL:
                raise StoreError(f"the object {key} has {f'{status} bytes' if status >= 0 else 'more bytes'}, not {nbytes}")
            if status in (NOT_FOUND, NOT_READY):
                raise MissingError(f"no object {key}")
            self._buffer.suspect(part_N)
            raise self._fault(f"get of {key}", status)

    def size(self, key: str) -> int:
        """The object's bytes. Raises StoreError where it is missing."""
        size = int(self._called("get_size", key))
        if size == NOT_FOUND:
            raise MissingError(f"no object {key}")
        if size < 0:
            raise self._fault(f"size of {key}", size)
        return size

    def remove(self, *keys: str) -> None:
        """Remove objects, where they are. Raises StoreError where the master does not answer."""
        for key in keys:
            status = self._called("remove", key, force=True)
            if status not in (0, NOT_FOUND):
                raise self._fault(f"remove of {key}", status)

    def remove_matching(self, pattern: str) -> int:
        """Remove all objects whose names match a regular expression (of C++); how many."""
        count = int(self._called("remove_by_regex", pattern, force=True))
        if count < 0:
            raise self._fault("remove", count)
        return count

    def close(self) -> None:
        """Wait for running calls, and disconnect. Every later call raises StoreError."""
        with self._state:
            self._closed = True
            while self._calls:
                self._state.wait()
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _called(self, name: str, *arguments: Any, **kwargs: Any) -> Any:
        """The result of a call of Mooncake's client."""
        with self._using() as client:
            return getattr(client, name)(*arguments, **kwargs)

    @contextmanager
    def _using(self) -> Iterator[Any]:
        """The client, which is not closed meanwhile."""
        with self._state:
            if self._closed:
                raise StoreError("the store was closed")
            self._calls += 1
        try:
            with self._connecting:
                if self._client is None:
                    self._client = self._connected()
            yield self._client
        finally:
            with self._state:
                self._calls -= 1
                self._state.notify_all()

    def _connected(self) -> Any:
        """A new client. Raises UserError for a host that does not exist, and StoreError where the master does not answer."""
        settings = self.settings
        local_address = self._reached()
        client = self._module.MooncakeDistributedStore()
        # no segment: this machine gives the store no memory. no local buffer: objects arrive in the registered one
        status = client.setup(
            settings.host or local_address, "P2PHANDSHAKE", 0, 0, settings.protocol, settings.device, settings.master
        )
        if status == 0:
            status = client.register_buffer(self._buffer.all_N.data_ptr(), self._buffer.all_N.numel())
        if status != 0:
            raise StoreError(
                f"Mooncake does not connect to its master {settings.master} by {settings.protocol} (status {status}); its own "
                "message is on stderr, and both sides must have the same version"
            )
        return client

    def _reached(self) -> str:
        """This machine's address towards the master. Mooncake's client does not say why it cannot connect."""
        host, port = split_address(self.settings.master, f"{self.settings.group}.master")
        try:
            with socket.create_connection((host, port), CONNECT) as connection:
                address = str(connection.getsockname()[0])
        except socket.gaierror as error:
            raise UserError(f"{self.settings.group}.master is {self.settings.master}, a machine that is not found") from error
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise StoreError(f"no mooncake_master answers at {self.settings.master} ({reason})") from error
        return f"[{address}]" if ":" in address else address

    def _fault(self, operation: str, status: int) -> StoreError:
        return StoreError(f"Mooncake's {operation} failed with status {status}, master {self.settings.master}")


class Buffer:
    """Memory in which objects arrive, given in parts. A request waits until a part is free."""

    def __init__(self, nbytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.all_N = torch.empty(nbytes, dtype=torch.uint8)
        self._clock = clock
        self._changed = Condition()
        self._taken: dict[int, int] = {}  # beginning of a part: its end
        self._suspects: dict[int, float] = {}  # beginning of a part whose transfer failed: until when it is kept

    @contextmanager
    def part(self, nbytes: int) -> Iterator[Tensor]:
        """[N] a part of the buffer, of one byte or more, until the context ends."""
        assert 1 <= nbytes <= self.all_N.numel()
        with self._changed:
            while (start := self._free(nbytes)) is None:
                self._changed.wait(1.0 if self._suspects else None)
            self._taken[start] = start + nbytes
        try:
            yield self.all_N[start : start + nbytes]
        finally:
            with self._changed:
                if start not in self._suspects:
                    del self._taken[start]
                self._changed.notify_all()

    def suspect(self, part_N: Tensor) -> None:
        """Keep a part for `SUSPECT` seconds after its context."""
        with self._changed:
            self._suspects[int(part_N.storage_offset())] = self._clock() + SUSPECT

    def _free(self, nbytes: int) -> int | None:
        """Where so many bytes are free; None: nowhere."""
        for start in [start for start, expiry in self._suspects.items() if expiry <= self._clock()]:
            del self._suspects[start]
            self._taken.pop(start, None)
        start = 0
        for allocated, end in sorted(self._taken.items()):
            if allocated - start >= nbytes:
                break
            start = -(-end // ALIGNED) * ALIGNED
        return start if start + nbytes <= self.all_N.numel() else None
