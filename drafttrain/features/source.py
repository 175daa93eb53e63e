"""What is particular to an engine that gives states: how it is asked, and how its states come to the trainer.

`servers.py` has what all engines share: retries, waits, comparisons. A file for each engine has a class with the protocol
`StatesSource`. Where states do not travel in the answer, it says in `kv_transfer_params` where they are, and a `Transport`
reads each once and removes it.

Shapes: T tokens, L layer ids, K keys (of tapped blocks, and of the final state), H hidden.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from threading import Event
from time import time_ns
from typing import Any, Protocol

from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.core.files import HOST, process_runs
from drafttrain.features.answers import AnswerRequest
from drafttrain.model.images import has_images

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


class ImageFiles(Protocol):
    """The images of the target's sequences."""

    token_id: int  # the target's placeholder of one row
    before: str  # what its texts have before the rows of an image
    known: dict[int, Any]  # by the id of the first row; each has the number of its `rows`

    def content(self, base: int) -> bytes:
        """The file of the image whose first row has this id. Raises UserError if it has changed."""


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


class Ask(Protocol):
    """Sends a request to a server. path: below the server's address. Gives the JSON of the answer.

    Raises AbsentError where another try may succeed, and UserError where every repetition would be refused too.
    """

    def __call__(self, method: str, path: str, body: Any = None) -> Any: ...


@dataclass(frozen=True, slots=True)
class Description:
    """What a server says of itself."""

    engine: str
    version: str
    details: Any = None  # of the engine's own class


@dataclass(frozen=True, slots=True)
class Received:
    """The states of one request."""

    hidden_TKH: Tensor
    ids: list[int] | None  # the tokens that they belong to, where the server says so
    written: list[int] = field(default_factory=list)  # token ids of the target's answer


@dataclass(frozen=True, slots=True)
class StatesRequest:
    """A request for the states of a sequence, and for an answer of the target to it."""

    name: str  # of this request alone
    ids: Sequence[int]
    deadline: float  # of `time.monotonic`
    closed: Event  # ends the wait
    answer: AnswerRequest | None = None  # the states of an answer come too, but that of its last token. Only vLLM is asked


def text_of(engine: str, request: StatesRequest) -> list[int]:
    """The token ids of a request to an engine that is given text alone. Raises UserError for images."""
    if has_images(request.ids):
        raise UserError(f"features.engine={engine} takes text alone, but a conversation has images; set it to vllm")
    return list(request.ids)


class StatesSource(Protocol):
    """An engine's way to give states."""

    names: RequestNames  # of this process
    way_out: str  # how to start a server that gives the states, for messages
    keys: tuple[int, ...]  # of the states, in the order of K: numbers of blocks, and FINAL for the state after the last norm

    def label(self, key: int) -> str:
        """A state's name in the engine's numbering, for messages."""
        ...

    def describe(self, url: str, ask: Ask) -> Description:
        """Ask a server what it is. Raises UserError where it cannot give the states of the longest conversation."""
        ...

    def states(self, url: str, description: Description, ask: Ask, request: StatesRequest) -> Received:
        """The states of a sequence. Raises AbsentError, WrongError and UserError as `Ask` does."""
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Remove what servers have left of requests that failed."""
        ...

    def sweep(self, late: bool = False) -> None:
        """Remove what servers have left of this process's requests, and of processes that have ended. As `Transport.sweep`."""
        ...

    def close(self) -> None:
        """Disconnect from where states come from. Nothing can be received afterwards."""
        ...
