"""An OpenAI-compatible server as an engine: streamed requests, timed here, and the server's own counts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

from drafttrain.core.errors import UserError
from drafttrain.data.server import base_of, error_text
from drafttrain.engines.answers import EngineInfo, TimedText, WaveOutputs

if TYPE_CHECKING:
    import httpx


LOOKS, PAUSE = 20, 0.05  # reads of the counters until they include a wave, and the seconds between two reads
ASK_DETAILS = {"return_spec_tokens_details": True}  # what makes SGLang send its counts with an answer
DOES_NOT_ADD_UP = "no acceptance by position: the server's counts by position are not its number of accepted drafts"
POSITION = re.compile(r'\bposition="(\d+)"')


@dataclass(frozen=True, slots=True)
class Counters:
    """Names of a server's Prometheus counters, without `_total`.

    vLLM's are in vllm/v1/spec_decode/metrics.py (0.32), SGLang's (0.5.23) in sglang/srt/observability/metrics_collector.py.
    """

    generated: str
    verifications: str
    drafted: str | None = None
    accepted: str | None = None
    by_position: str | None = None  # accepted drafts, with a label `position` from 0


STARTED = "process_start_time_seconds"  # of prometheus_client, where one process counts
SPEC = "vllm:spec_decode_num_"
KNOWN = (
    Counters(
        "vllm:generation_tokens", f"{SPEC}drafts", f"{SPEC}draft_tokens", f"{SPEC}accepted_tokens",
        f"{SPEC}accepted_tokens_per_pos",
    ),
    Counters("sglang:generation_tokens", "sglang:spec_verify_calls"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Counted:
    """A wave's counts, as `WaveOutputs` have them; None where they are not known. notes: the reasons."""

    verifications: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    accepted_by_position: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CounterReading:
    """Counters since the server's start: `generated`, `verifications`, and `drafted`, `accepted` where it has them."""

    sums: dict[str, float]
    by_position: dict[int, float] = field(default_factory=dict)  # empty where it does not count positions
    started: float | None = None  # when the server's process started, where it says so

    def since(self, before: CounterReading) -> CounterReading:
        """What was counted after another reading."""
        sums = {name: value - before.sums.get(name, 0.0) for name, value in self.sums.items()}
        return CounterReading(
            sums, {position: value - before.by_position.get(position, 0.0) for position, value in self.by_position.items()}
        )

    def restarted_since(self, before: CounterReading) -> bool:
        """Whether it is another process that counts, or a counter went down."""
        delta = self.since(before)
        return self.started != before.started or min(*delta.sums.values(), *delta.by_position.values()) < 0


def read(text: str | None) -> CounterReading | str:
    """The counters in the text of /metrics (None: there is no such page), or why there are none."""
    if text is None:
        return "the server has no /metrics (SGLang: --enable-metrics)"
    metrics = prometheus(text)
    for counter_names in KNOWN:
        names = {key: getattr(counter_names, key) for key in ("generated", "verifications", "drafted", "accepted")}
        values = {key: metrics.get(name) for key, name in names.items() if name is not None}
        if all(value is not None for value in values.values()):
            sums = {key: value for key, value in values.items() if value is not None}
            return CounterReading(sums, prometheus_by_position(text, counter_names.by_position), metrics.get(STARTED))
    return "the server's /metrics does not count verifications as vLLM or SGLang do; was it started with speculation?"


def counted(before: CounterReading | str, look: Callable[[], str | None], tokens: int) -> Counted:
    """The counts of a wave that generated `tokens`: differences of the server's counters in /metrics.

    They change a little after its last token was sent, so look again. before: the reading before the wave. None are known
    where other clients were served too, or the server was restarted.
    """
    if isinstance(before, str):
        return _unknown(before)
    for looks_left in reversed(range(LOOKS)):
        reading = read(look())
        if isinstance(reading, str):
            return _unknown(reading)
        if reading.restarted_since(before):
            return _unknown("the server was restarted meanwhile, so its counters began anew")
        delta = reading.since(before)
        generated = int(delta.sums.pop("generated"))
        if generated >= tokens:
            break
        if looks_left:
            sleep(PAUSE)
    if generated > tokens:
        return _unknown(f"the server generated {generated - tokens} tokens for other clients meanwhile")
    if generated < tokens:
        return _unknown(f"the server counts {generated} of the {tokens} tokens that it sent")
    return _of_sums(delta)


def of_answers(details: Sequence[dict[str, Any] | None], lengths: Sequence[int]) -> Counted | None:
    """The counts that a server sent with each answer, which other clients do not change; None where it sent none.

    They are named as in `SpecTokensDetails` of sglang/srt/entrypoints/openai/protocol.py (SGLang 0.5.23).
    An answer of one token, which the prefill yields, has no counts.
    """
    if any(row is None and length > 1 for row, length in zip(details, lengths, strict=True)) or not any(details):
        return None
    sent = [row for row in details if row is not None]
    histograms = [row.get("spec_correct_drafts_histogram") or [] for row in sent]  # [n]: decode steps that accepted n drafts
    names = ("spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts")
    steps, drafted, accepted = (sum(int(row.get(name) or 0) for row in sent) for name in names)
    positions = range(max(0, *(len(histogram) - 1 for histogram in histograms), -(-drafted // steps) if steps else 0))
    by_position = tuple(sum(sum(histogram[i + 1 :]) for histogram in histograms) for i in positions)
    if sum(by_position) != accepted:
        return Counted(steps, drafted, accepted, None, (DOES_NOT_ADD_UP,))
    return Counted(steps, drafted, accepted, by_position)


def prometheus(text: str) -> dict[str, float]:
    """The values by name, without `_total`, summed over labels."""
    values: dict[str, float] = {}
    for name, _, value in _samples(text):
        values[name] = values.get(name, 0.0) + value
    return values


def prometheus_by_position(text: str, wanted: str | None) -> dict[int, float]:
    """The values of one counter by its label `position`, summed over the other labels."""
    values: dict[int, float] = {}
    for name, labels, value in _samples(text):
        if name == wanted and (position := POSITION.search(labels)):
            values[int(position[1])] = values.get(int(position[1]), 0.0) + value
    return values


def _unknown(reason: str) -> Counted:
    return Counted(notes=(f"no tau and no acceptance: {reason}",))


def _of_sums(delta: CounterReading) -> Counted:
    steps, drafted, accepted = (delta.sums.get(name) for name in ("verifications", "drafted", "accepted"))
    counts = Counted(_whole(steps), _whole(drafted), _whole(accepted))
    if not delta.by_position:
        return replace(counts, notes=("no acceptance by position: the server counts only sums",))
    by_position = tuple(int(delta.by_position.get(i, 0.0)) for i in range(max(delta.by_position) + 1))
    if sum(by_position) != counts.accepted:
        return replace(counts, notes=(DOES_NOT_ADD_UP,))
    return replace(counts, accepted_by_position=by_position)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _samples(text: str) -> list[tuple[str, str, float]]:
    """(name without `_total`, labels, value) of each line that has them."""
    samples = []
    for line in text.splitlines():
        name, _, value = line.partition("#")[0].strip().rpartition(" ")
        metric, _, labels = name.partition("{")
        try:
            samples.append((metric.removesuffix("_total"), labels, float(value)))
        except ValueError:
            continue
    return samples


TOKENS, CHAT = "tokens", "chat"
TIMEOUT, CONNECT = 600.0, 30.0  # seconds for an answer, and for a connection
SGLANG = "sglang"  # the maker that its list of models names
# What a request leaves out, these makers' servers take from the model's generation_config.json. Others may refuse the fields.
GREEDY = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
MAKERS = ("vllm", SGLANG)

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """The address of a server, and how to use it."""

    url: str
    name: str  # the setting that holds the URL, for messages
    model: str | None = None  # None: the server's only one
    key: str | None = field(default=None, repr=False)  # sent as a bearer token; it appears in no message and no file
    api: str = TOKENS  # `tokens` (completions of token ids) or `chat` (with the server's own template)
    penalties: Mapping[str, Any] = field(default_factory=dict)  # further fields of a request


@dataclass
class Endpoint:
    """A server that answers."""

    where: EndpointOptions
    client: httpx.Client
    asking: ThreadPoolExecutor  # sends requests in parallel
    prompts: Sequence[list[int]] | Sequence[Messages]  # token ids, or messages
    max_new_tokens: int
    model: str
    about: EngineInfo

    def answer(self, wave: Sequence[int]) -> WaveOutputs:
        """Send a wave of requests together. Counts come with the answers of a server that sends them, else from /metrics."""
        counters_before, start_time = read(_looked_up(self.client, "metrics")), perf_counter()
        answers = list(self.asking.map(lambda i: self._streamed(i, start_time), wave))
        texts, lengths = [text for text, _ in answers], [text.count for text, _ in answers]
        counts = of_answers([details for _, details in answers], lengths)
        counts = counts or counted(counters_before, lambda: _looked_up(self.client, "metrics"), sum(lengths))
        return WaveOutputs(texts, **asdict(counts))

    def _streamed(self, i: int, start_time: float) -> tuple[TimedText, dict[str, Any] | None]:
        """Stream one answer, and the server's counts of it. Raises UserError for a refusal, and for an answer without its
        number of tokens.
        """
        content: dict[str, Any] = {"prompt": self.prompts[i]} if self.where.api == TOKENS else {"messages": self.prompts[i]}
        body = {"model": self.model, "max_tokens": self.max_new_tokens, "temperature": 0, "stream": True}
        body |= content | {"stream_options": {"include_usage": True}} | (ASK_DETAILS if SGLANG in self.about.versions else {})
        body |= (GREEDY if any(owner in self.about.versions for owner in MAKERS) else {}) | {**self.where.penalties}
        path = "completions" if self.where.api == TOKENS else "chat/completions"
        first_time, text, count, details = None, "", None, None
        with _explained(self.where), self.client.stream("POST", path, json=body) as response:
            _check(response, self.where, path)
            for event in _events(response, self.where):
                delta = _piece(event)
                if delta and first_time is None:
                    first_time = perf_counter() - start_time
                text += delta
                count = (event.get("usage") or {}).get("completion_tokens") or count
                details = (event.get("sglext") or {}).get("spec_tokens_details") or details
            end_time = perf_counter() - start_time
        if count is None:
            raise UserError(f"{self.where.url} does not say how many tokens an answer has (stream_options.include_usage)")
        return TimedText(count, text, end_time if first_time is None else first_time, end_time), details


@contextmanager
def endpoint(
    where: EndpointOptions, prompts: Sequence[list[int]] | Sequence[Messages], max_new_tokens: int, batch: int
) -> Iterator[Endpoint]:
    """A connected server. batch: upper bound of parallel requests. Raises UserError for a missing server or model."""
    with _client(where, batch) as client, ThreadPoolExecutor(batch) as pool:
        model, model_info = _model(client, where)
        owner = model_info.get("owned_by")
        info = EngineInfo({} if not owner else {str(owner): _version(client)}, ids=False)
        yield Endpoint(where, client, pool, prompts, max_new_tokens, model, info)


def context_of(where: EndpointOptions) -> int | None:
    """Tokens of the server's context, where it tells them, as vLLM and SGLang do. Raises UserError as `endpoint` does."""
    with _client(where, 1) as client:
        length = _model(client, where)[1].get("max_model_len")
    return length if isinstance(length, int) and length > 0 else None


def _client(options: EndpointOptions, batch: int) -> httpx.Client:
    base = base_of(options.url, options.name, "engine_key_env")
    import httpx

    headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
    patience = httpx.Timeout(TIMEOUT, connect=CONNECT)
    limits = httpx.Limits(max_connections=batch, max_keepalive_connections=batch)
    return httpx.Client(base_url=base, headers=headers, timeout=patience, limits=limits)


def _model(client: httpx.Client, options: EndpointOptions) -> tuple[str, dict[str, Any]]:
    """The model that answers, and what the server lists about it."""
    with _explained(options):
        response = client.get("models")
        _check(response, options, "models")
        try:
            models = {str(entry["id"]): entry for entry in response.json()["data"]}
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{options.url} does not list its models; is {options.name} an OpenAI-compatible server?"
            ) from error
    if options.model is None and len(models) != 1:
        raise UserError(f"{options.url} has the models {', '.join(models) or 'none'}; set engine_model")
    model = options.model or next(iter(models))
    return model, dict(models.get(model, {}))


def _version(client: httpx.Client) -> str:
    """The version, as vLLM reports it."""
    try:
        return str(json.loads(_looked_up(client, "version") or "")["version"])
    except (ValueError, KeyError, TypeError):
        return "of unknown version"


def _looked_up(client: httpx.Client, path: str) -> str | None:
    """A page of the server outside its API; None where it has none."""
    import httpx

    root = str(client.base_url).rstrip("/").removesuffix("/v1")
    try:
        response = client.get(f"{root}/{path}")
    except httpx.HTTPError:
        return None
    return response.text if response.status_code == 200 else None


@contextmanager
def _explained(options: EndpointOptions) -> Iterator[None]:
    import httpx

    try:
        yield
    except httpx.HTTPError as error:
        raise UserError(
            f"{options.url}: no answer ({type(error).__name__}); start the server, and check {options.name}"
        ) from error


def _check(response: httpx.Response, options: EndpointOptions, path: str) -> None:
    if response.status_code == 200:
        return
    response.read()
    if path == "models" and response.status_code == 404 and not options.url.rstrip("/").endswith("/v1"):
        raise UserError(f"{options.url} lists no models; an OpenAI-compatible API mostly is at {options.url.rstrip('/')}/v1")
    hint = "" if options.api == CHAT or path == "models" else ", or engine_api=chat where it takes no token ids"
    raise UserError(
        f"{options.url} refuses {path} with status {response.status_code}: {error_text(response)}; check {options.name}, "
        "engine_model "
        f"and the key in engine_key_env{hint}"
    )


def _events(response: httpx.Response, options: EndpointOptions) -> Iterator[dict[str, Any]]:
    """The parts of a streamed answer."""
    for line in response.iter_lines():
        content = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if not content or content == "[DONE]":
            continue
        try:
            event = json.loads(content)
        except ValueError as error:
            raise UserError(f"{options.url} streams no JSON, {content[:80]!r}; name an OpenAI-compatible server") from error
        if not isinstance(event, dict) or "error" in event:
            raise UserError(f"{options.url} breaks off: {content[:200]}")
        yield event


def _piece(event: dict[str, Any]) -> str:
    choices = event.get("choices") or [{}]
    text = choices[0].get("text") or (choices[0].get("delta") or {}).get("content")
    return str(text or "")
