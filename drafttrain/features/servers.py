"""Servers that compute the target's states: one request for each conversation, repeated until one server gives good states.

A request is repeated, with growing waits, by whichever server is free:
- for `patience` seconds where no server answers: no connection, a dropped one, status 408, 425, 429 or 5xx, no answer in
  `timeout` seconds, or no whole states where it says that they are;
- `TRIES` times where the states are wrong: other token ids, another dtype, or values that are not finite.
Then, and where a server refuses a request or gives states of another shape, the run ends. Only a conversation whose states are
not finite again and again, from a server that gives the trainer's own for another one, gets states of NaN: it is left out.

Before a server is used its states of one sequence are compared with the trainer's own (`ReferenceStates`). They are compared
again after a failure, and after `IDLE` seconds without an answer: the server may have been started again with another model.
After a failure no conversation waits for that as long as another server answers.

How an engine is asked and how its states arrive is a `StatesSource`.

Shapes: T tokens, K keys, H hidden.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from threading import Event, Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.features.answers import Answer, AnswerRequest
from drafttrain.features.source import (
    AbsentError,
    Description,
    NonFiniteError,
    Received,
    StatesRequest,
    StatesSource,
    WrongError,
)

if TYPE_CHECKING:
    import httpx


# of a state's difference, by the coarser dtype. 12 blocks on vLLM: 6e-7 in float32, 0.012 in bfloat16, 0.0015 in float32 with
# activations in e4m3
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.06, torch.float8_e4m3fn: 0.06}
NEARER = 0.8  # another key's state is nearer where its difference is below this share of the own one's


@dataclass(frozen=True, slots=True)
class ReferenceStates:
    """The trainer's own states of one sequence, to compare a server's with."""

    ids: list[int]
    keys: tuple[int, ...]  # of the states that a server gives, in its order
    own: Mapping[int, Tensor]  # [T, H] in float32 by key: of `keys`, and of neighbouring blocks
    dtype: torch.dtype  # of the trainer's target, e4m3 where activations are rounded to it

    @property
    def hidden_size(self) -> int:
        return next(iter(self.own.values())).shape[1]

    def fault(self, hidden_TKH: Tensor, label: Callable[[int], str]) -> str | None:
        """Why states of this sequence are not those of the target; None where they are. label: a state's name.

        In half precision rounding can be as large as the difference between two blocks' outputs. So a state must also be
        nearest to the own state of its key.
        """
        size, hidden_size = hidden_TKH.shape[2], self.hidden_size
        if size != hidden_size:
            return f"states of {size} values, the target's have {hidden_size}: it serves another model"
        tolerance = max(TOLERANCE.get(dtype, 0.06) for dtype in (hidden_TKH.dtype, self.dtype))
        for i, key in enumerate(self.keys):
            errors = {other_key: difference(hidden_TKH[:, i].float(), own_TH) for other_key, own_TH in self.own.items()}
            nearest = min(errors, key=errors.__getitem__)
            if errors[key] <= tolerance and errors[nearest] >= NEARER * errors[key]:
                continue
            hint = f"; it is {label(nearest)}" if errors[nearest] <= tolerance else ""
            return (
                f"{label(key)} differs from the target's by {errors[key]:.2g} of its norm, more than rounding does{hint}: "
                "it serves other layer ids, another model or another revision"
            )
        return None


def difference(found_TH: Tensor, own_TH: Tensor) -> float:
    """Median over positions of the difference's norm, as a share of the own state's."""
    return float(((found_TH - own_TH).norm(dim=-1) / own_TH.norm(dim=-1).clamp_min(1e-30)).median())


BUSY = (408, 425, 429)  # and all from 500 on
TRIES = 5  # answers with wrong states for one conversation
SURE = 2  # answers with states that are not finite, after which another conversation's states decide whose fault it is
TOLD = 3  # failures of a server, one after the other, after which a line says so
FIRST_WAIT, LONGEST_WAIT = 0.25, 15.0  # seconds; doubled after every failure of a server
LATE = (5.0, 20.0, 80.0, 320.0)  # seconds after which states that the server has written of a failed request are removed
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # of this machine, which no proxy reaches
IDLE = 10.0  # seconds without an answer after which a server's states are compared again: no server starts in less


class _SharedError(AbsentError):
    """A comparison that another thread has made has failed. It counts once."""


class ClosedError(Exception):
    """The source of states was closed while a request was waiting."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How servers are reached."""

    urls: tuple[str, ...]  # below which the engine's paths are
    key: str | None = field(default=None, repr=False)  # sent as a bearer token; it appears in no message and no file
    timeout: float = 120.0  # seconds for the states of one conversation
    patience: float = 600.0  # seconds to repeat a request while no server answers it
    concurrency: int = 32  # requests at a time
    direct: bool = False  # whether they were started for this run: no proxy is asked for them, whatever the environment says


@dataclass
class _Server:
    """A server, and what is known of it."""

    url: str
    client: httpx.Client
    checking: Lock = field(default_factory=Lock)
    running: int = 0  # requests
    failures: int = 0  # since its last answer
    probe: Thread | None = None  # compares it after a failure, while other servers take the requests
    resumes_at: float = 0.0  # of `monotonic`; no request is sent before
    heard_at: float = -IDLE  # of `monotonic`: its last good answer
    fault: str | None = None  # of the last comparison, where the server did not answer it
    faults: int = 0  # comparisons that it did not answer
    description: Description | None = None  # once it has answered
    dtype: torch.dtype | None = None


@dataclass
class ReceivedCounts:
    """What was received, for the log."""

    requests: int = 0
    tokens: int = 0  # with states
    repeated: int = 0
    answers: int = 0  # that the target wrote
    answer_tokens: int = 0
    answers_cut: int = 0  # without an end token

    def since(self, before: ReceivedCounts) -> ReceivedCounts:
        """What was received after `before`."""
        return ReceivedCounts(*(getattr(self, counter.name) - getattr(before, counter.name) for counter in fields(self)))

    def answer_figures(self) -> dict[str, float | None]:
        """Mean length of the answers in tokens, their end tokens included, and the share of those that were cut off."""
        if not self.answers:
            return {"answer_length": None, "answers_cut": None}
        return {"answer_length": self.answer_tokens / self.answers, "answers_cut": self.answers_cut / self.answers}


class Servers:
    """Requests to servers, from several threads. say: prints a line where a server is lost or found again."""

    def __init__(
        self, settings: ServerSettings, source: StatesSource, reference: ReferenceStates, say: Callable[[str], None]
    ) -> None:
        import httpx

        headers = {"Authorization": f"Bearer {settings.key}"} if settings.key else {}
        limits = httpx.Limits(max_connections=settings.concurrency, max_keepalive_connections=settings.concurrency)
        patience = httpx.Timeout(settings.timeout, connect=min(settings.timeout, 10.0))

        def client(url: str) -> httpx.Client:
            trust_env = not (settings.direct or httpx.URL(url).host in LOOPBACK)
            return httpx.Client(base_url=url, headers=headers, limits=limits, timeout=patience, trust_env=trust_env)

        self.settings, self.source, self.reference, self.say = settings, source, reference, say
        self.servers = [_Server(url, client(url)) for url in settings.urls]
        self.counts, self.versions = ReceivedCounts(), dict[str, str]()
        self.closed = Event()
        self._lock = Lock()
        self._refusal: str | None = None  # why a server that has come back cannot be used
        self._lost: dict[str, list[float]] = {}  # failed requests, and when to remove the states that a server still writes

    @property
    def names(self) -> list[str]:
        """Engines and their versions."""
        return [f"{engine} {version}" for engine, version in sorted(self.versions.items())]

    @property
    def number(self) -> int:
        """Of servers."""
        return len(self.servers)

    @property
    def dtypes(self) -> list[str]:
        """Of the states that servers have given; one for each server that has answered."""
        return [str(server.dtype).removeprefix("torch.") for server in self.servers if server.dtype is not None]

    def reset_counts(self) -> None:
        """Count from 0 again."""
        self.counts = ReceivedCounts()

    def states(self, ids: Sequence[int]) -> Tensor:
        """[T, K, H] the states of a sequence, in the server's dtype.

        Raises UserError where no server gives them, and ClosedError after `close`.
        """
        return self._repeated(ids, None).hidden_TKH

    def answered(self, request: AnswerRequest) -> Answer:
        """The answer that the target writes to a prompt, with its states. Raises as `states`."""
        return self._repeated(request.prompt, request)

    def _repeated(self, ids: Sequence[int], request: AnswerRequest | None) -> Answer:
        """The states of a sequence, with the target's answer to it if one is requested."""
        deadline, wrong_answers = None, 0
        while True:
            if self._refusal is not None:
                raise UserError(self._refusal)
            server = self._chosen()
            if self.closed.wait(max(0.0, server.resumes_at - monotonic())) or self.closed.is_set():
                self._release(server)
                raise ClosedError
            try:
                answer = self._from(server, ids, request)
            except (AbsentError, WrongError) as error:
                if (
                    wrong_answers >= SURE
                    and isinstance(error, NonFiniteError)
                    and (nan := self._nonfinite(server, ids, request, error))
                ):
                    self._succeeded(server, nan, request)
                    return nan
                if not isinstance(error, _SharedError):
                    self._failed(server, error)
                    with self._lock:
                        self.counts.repeated += 1
                wrong_answers += isinstance(error, WrongError)
                deadline = deadline or monotonic() + self.settings.patience
                if wrong_answers >= TRIES:
                    raise UserError(f"{server.url}: {error}, {TRIES} times; {self.source.way_out}") from error
                if monotonic() >= deadline:
                    raise UserError(
                        f"{server.url}: {error}, for {self.settings.patience:g} s; start the server again and repeat the "
                        "command with resume=auto, which continues from the last checkpoint, or raise features.patience"
                    ) from error
            else:
                self._succeeded(server, answer, request)
                return answer
            finally:
                self._release(server)

    def check(self) -> None:
        """Compare every server's states with the trainer's own. Servers that are away are compared when they answer.

        Raises UserError for a wrong server, and where none answers.
        """
        self.states(self.reference.ids)
        for server in self.servers:
            try:
                self._verify(server)
            except (AbsentError, WrongError) as error:
                self._failed(server, error)

    def stop(self) -> None:
        """End the waits: no request begins anew."""
        self.closed.set()

    def close(self) -> None:
        """End the waits, and remove the states of requests that nothing waits for. No request may be running."""
        self.closed.set()
        for probe in [server.probe for server in self.servers]:
            if probe is not None:
                probe.join()
        self.source.sweep(late=bool(self._lost))
        self.source.close()
        for server in self.servers:
            server.client.close()

    def _chosen(self) -> _Server:
        """The server with the fewest requests, of those that have answered last; else the one that is tried again first."""
        with self._lock:
            now = monotonic()
            available = [candidate for candidate in self.servers if not candidate.failures]
            for candidate in self.servers if available else ():
                if candidate.failures and candidate.resumes_at <= now and candidate.probe is None:
                    candidate.probe = Thread(target=self._probed, args=(candidate,), daemon=True)
                    candidate.probe.start()

            def order(candidate: _Server) -> tuple[bool, float, int]:
                return candidate.checking.locked(), max(0.0, candidate.resumes_at - now), candidate.running

            server = min(available or self.servers, key=order)
            server.running += 1
            return server

    def _probed(self, server: _Server) -> None:
        """Compare a server that has failed. A hanging one keeps this thread until `timeout`, and no conversation."""
        try:
            self._verify(server)
        except (AbsentError, WrongError) as error:
            self._failed(server, error)
        except UserError as error:
            self._refusal = str(error)
        except ClosedError:
            pass
        else:
            with self._lock:
                recovered, server.failures = server.failures >= TOLD, 0
            if recovered:
                self.say(f"features: {server.url} gives states again")
        finally:
            server.probe = None

    def _release(self, server: _Server) -> None:
        with self._lock:
            server.running -= 1

    def _failed(self, server: _Server, error: Exception) -> None:
        with self._lock:
            server.heard_at = -IDLE
            if server.resumes_at > monotonic():  # another request has found the same failure
                return
            server.failures += 1
            delay = min(FIRST_WAIT * 2 ** (server.failures - 1), LONGEST_WAIT) * random.uniform(0.5, 1.0)
            server.resumes_at = monotonic() + delay
            announce = server.failures == TOLD
        if announce and not self.closed.is_set():
            self.say(f"features: {server.url}: {error}; trying again for up to {self.settings.patience:g} s")

    def _succeeded(self, server: _Server, answer: Answer, request: AnswerRequest | None) -> None:
        with self._lock:
            self.counts.requests, self.counts.tokens = self.counts.requests + 1, self.counts.tokens + len(answer.hidden_TKH)
            if request is not None:
                self.counts.answers, answer_tokens = self.counts.answers + 1, len(answer.token_ids)
                self.counts.answer_tokens += answer_tokens
                self.counts.answers_cut += answer.cut(request.writing)
            server.heard_at = monotonic()
            recovered, server.failures = server.failures >= TOLD, 0
            now = monotonic()
            expired = [name for name, times in self._lost.items() if times[0] <= now]
            for name in expired:
                if times := [time for time in self._lost.pop(name) if time > now]:
                    self._lost[name] = times
        if recovered:
            self.say(f"features: {server.url} gives states again")
        if expired:
            self.source.remove(expired)

    def _from(self, server: _Server, ids: Sequence[int], request: AnswerRequest | None) -> Answer:
        if monotonic() - server.heard_at > IDLE:
            self._verify(server)
        return self._requested(server, ids, request)

    def _verify(self, server: _Server) -> None:
        """Ask a server what it is, and compare its states. Raises UserError where they are another target's.

        Threads that wait for another one's comparison share its result, also a bad one: a server that hangs costs all of
        them one `timeout` together.
        """
        faults = server.faults
        with server.checking:
            if self.closed.is_set():
                raise ClosedError
            if monotonic() - server.heard_at <= IDLE:  # another thread has
                return
            if server.faults != faults:
                raise _SharedError(server.fault)
            try:
                self._compare(server)
            except (AbsentError, WrongError) as error:
                server.fault, server.faults = str(error), server.faults + 1
                raise

    def _compare(self, server: _Server) -> None:
        server.description = description = self.source.describe(server.url, partial(self._json, server))
        self.versions[description.engine] = description.version
        server.dtype = None
        answer = self._requested(server, self.reference.ids, None)
        if fault := self.reference.fault(answer.hidden_TKH, self.source.label):
            raise UserError(f"{server.url}: {fault}; {self.source.way_out}")
        server.dtype, server.heard_at = answer.hidden_TKH.dtype, monotonic()

    def _nonfinite(
        self, server: _Server, ids: Sequence[int], request: AnswerRequest | None, error: NonFiniteError
    ) -> Answer | None:
        """States of NaN, where the conversation's own are not finite: the server gives the trainer's for another one."""
        token_ids = error.written if request is not None else []
        if token_ids is None:
            return None
        try:
            with server.checking:
                self._compare(server)
        except (AbsentError, WrongError):
            return None
        size = len(ids) + max(0, len(token_ids) - 1)
        return Answer(list(token_ids), torch.full((size, len(self.source.keys), self.reference.hidden_size), torch.nan))

    def _requested(self, server: _Server, ids: Sequence[int], request: AnswerRequest | None) -> Answer:
        """One request's states and, if it is for one, the target's answer."""
        assert server.description is not None, "a server is described before it is used"
        deadline, name = monotonic() + self.settings.timeout, self.source.names.next()
        states_request = StatesRequest(name, ids, deadline, self.closed, request)
        try:
            received = self.source.states(server.url, server.description, partial(self._json, server), states_request)
        except (AbsentError, WrongError):
            with self._lock:
                self._lost[name] = [monotonic() + seconds for seconds in LATE]
            raise
        self._check(server, received, [*ids, *received.written[:-1]])
        return Answer(received.written, received.hidden_TKH)

    def _check(self, server: _Server, received: Received, ids: Sequence[int]) -> None:
        hidden_TKH, keys = received.hidden_TKH, self.source.keys
        if received.ids is not None and received.ids != list(ids):
            raise WrongError(f"states of {len(received.ids)} token ids that are not the {len(ids)} of the request")
        if hidden_TKH.ndim != 3 or hidden_TKH.shape[:2] != (len(ids), len(keys)):
            raise UserError(
                f"{server.url} gives states of shape {list(hidden_TKH.shape)} for {len(ids)} tokens and "
                f"{', '.join(map(self.source.label, keys))}; {self.source.way_out}"
            )
        if server.dtype is not None and hidden_TKH.dtype != server.dtype:
            raise WrongError(f"states in {hidden_TKH.dtype} after others in {server.dtype}")
        if not bool(hidden_TKH.isfinite().all()):
            raise NonFiniteError("states that are not finite", received.written)

    def _json(self, server: _Server, method: str, path: str, body: Any = None) -> Any:
        """The answer to a request. Raises UserError for a refusal, which every repetition would get too."""
        import httpx

        try:
            response = server.client.request(method, path, json=body)
        except httpx.TimeoutException as error:
            raise AbsentError(f"no answer in features.timeout={self.settings.timeout:g} s") from error
        except httpx.RequestError as error:
            raise AbsentError(f"no answer ({type(error).__name__})") from error
        except RuntimeError as error:  # the client was closed
            raise ClosedError from error
        if response.status_code >= 500 or response.status_code in BUSY:
            raise AbsentError(f"status {response.status_code}")
        if response.status_code >= 400:
            text = " ".join(response.text.split())[:200] or "nothing"
            raise UserError(
                f"{server.url} refuses {path} with status {response.status_code}: {text}; check features.servers and the key "
                "in features.key_env"
            )
        try:
            return response.json()
        except ValueError as error:
            raise AbsentError("an answer that is no JSON") from error
