"""An OpenAI-compatible server as an engine: streamed requests, timed here, and the server's own counts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from drafttrain.core.errors import UserError
from drafttrain.data.server import base_of, error_text
from drafttrain.engines.answers import EngineInfo, TimedText, WaveOutputs
from drafttrain.engines.counters import ASK_DETAILS, counted, of_answers, read

if TYPE_CHECKING:
    import httpx

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
        body |= GREEDY if any(owner in self.about.versions for owner in MAKERS) else {}
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
