"""How a request's states come from the server to the trainer: what every way of transport has.

An answer of the server says in `kv_transfer_params` where the states are. Each is read once and removed.

Shapes: T tokens, L layer ids, H hidden.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from threading import Event
from time import time_ns
from typing import Any, Protocol

from torch import Tensor

from drafttrain.core.files import HOST, process_runs

NAMED = "drafttrain-"


class AbsentError(Exception):
    """A server does not answer, or its states are not there, not whole or late. Another try may succeed."""


class WrongError(Exception):
    """A server has answered with states that cannot be used."""


class NonFiniteError(WrongError):
    """States with values that are not finite: of a server with a fault, or the target's own, as an overflow makes them.

    written: the answer that was requested with them, if it has come.
    """

    def __init__(self, reason: str, written: Sequence[int] | None = None) -> None:
        super().__init__(reason)
        self.written = written


class NoStatesError(Exception):
    """An answer does not say where states are: the server was started in another way."""


@dataclass(frozen=True, slots=True)
class States:
    """What a server has computed for a request."""

    hidden_TLH: Tensor
    token_T: Tensor


class RequestNames:
    """Names of this process's requests. Servers name their states after them, so that all tell whose they are."""

    def __init__(self) -> None:
        self.own = f"{NAMED}{HOST}-{os.getpid()}-{time_ns():x}-"
        self._numbers = count()

    def next(self) -> str:
        """A name that no other request has."""
        return f"{self.own}{next(self._numbers)}-"

    def abandoned(self, name: str) -> bool:
        """Whether this is the name of a process of this machine that has ended."""
        match = re.search(rf"{NAMED}{re.escape(HOST)}-(\d+)-[0-9a-f]+-", name)
        if match is None or match[0] == self.own:
            return False
        return int(match[1]) == os.getpid() or not process_runs(int(match[1]))


class Transport(Protocol):
    """Reads states, from several threads."""

    names: RequestNames

    def receive(self, name: str, params: Any, tokens: int, deadline: float, closed: Event) -> States:
        """Wait for the states of a request, read them and remove them.

        name: of the request. params: the `kv_transfer_params` of its answer, which may hold anything. tokens: of the request.
        deadline: of `time.monotonic`. closed: ends the wait. Raises NoStatesError, AbsentError or WrongError.
        """

    def remove(self, names: Iterable[str]) -> None:
        """Remove the states of failed requests, which a server has put there late."""

    def sweep(self, late: bool = False) -> None:
        """Remove the states of this process, and of processes of this machine that have ended. No request may be running.

        late: servers may still put states of failed requests. What finds them at the next start is then kept.
        """

    def close(self) -> None:
        """Disconnect. Nothing can be received afterwards."""
