"""What is particular to an engine that gives states: how it is asked, and how its states arrive.

`servers.py` has what all engines share: retries, waits, comparisons. A file for each engine has a class with this protocol.

Shapes: T tokens, K keys (of tapped blocks, and of the final state), H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any, Protocol

from torch import Tensor

from drafttrain.features.answers import AnswerRequest
from drafttrain.features.transport import RequestNames


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
