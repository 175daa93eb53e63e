"""An OpenAI-compatible server as an engine: streamed requests, timed here, and the server's own counters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

from drafttrain.core.errors import UserError
from drafttrain.data.server import base_of, error_text
from drafttrain.engines.answers import Answer, EngineInfo, TimedText

if TYPE_CHECKING:
    import httpx

TOKENS, CHAT = "tokens", "chat"
TIMEOUT, CONNECT = 600.0, 30.0  # seconds for an answer, and for a connection
LOOKS, PAUSE = 20, 0.05  # reads of the counters until they include a wave, and the seconds between two reads

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Counters:
    """Names of a server's Prometheus counters, without `_total`."""

    generated: str
    verifications: str
    drafted: str | None = None
    accepted: str | None = None


SPEC = "vllm:spec_decode_num_"
KNOWN = (
    Counters("vllm:generation_tokens", f"{SPEC}drafts", f"{SPEC}draft_tokens", f"{SPEC}accepted_tokens"),
    Counters("sglang:generation_tokens", "sglang:spec_verify_calls"),
)


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
    counted: dict[str, float] | None  # the server's counters after the last wave; None where they are not known

    def answer(self, wave: Sequence[int]) -> Answer:
        """Send a wave of requests together. The server's counts are left out where other clients were served too."""
        began = perf_counter()
        texts = list(self.asking.map(lambda i: self._streamed(i, began), wave))
        if self.counted is None:
            return Answer(texts)
        before, tokens = self.counted, sum(text.count for text in texts)
        self.counted = self._counted(before, tokens)
        spent = {name: int(self.counted[name] - before[name]) for name in before}
        if spent.pop("generated") != tokens:
            return Answer(texts)  # another client was served too, or the server counts differently
        return Answer(texts, **spent)

    def _counted(self, before: dict[str, float], tokens: int) -> dict[str, float]:
        """The counters, which change a little after the last token was sent."""
        for _ in range(LOOKS):
            now = counters(self.client) or before
            if now["generated"] - before["generated"] >= tokens:
                break
            sleep(PAUSE)
        return now

    def _streamed(self, i: int, began: float) -> TimedText:
        """Stream one answer. Raises UserError for a refusal, and for an answer without its number of tokens."""
        content = {"prompt": self.prompts[i]} if self.where.api == TOKENS else {"messages": self.prompts[i]}
        body = {"model": self.model, "max_tokens": self.max_new_tokens, "temperature": 0, "stream": True}
        body |= content | {"stream_options": {"include_usage": True}}
        path = "completions" if self.where.api == TOKENS else "chat/completions"
        first, text, count = None, "", None
        with _explained(self.where), self.client.stream("POST", path, json=body) as response:
            _check(response, self.where, path)
            for part in _events(response, self.where):
                piece = _piece(part)
                if piece and first is None:
                    first = perf_counter() - began
                text += piece
                count = (part.get("usage") or {}).get("completion_tokens") or count
            ended = perf_counter() - began
        if count is None:
            raise UserError(f"{self.where.url} does not say how many tokens an answer has (stream_options.include_usage)")
        return TimedText(count, text, ended if first is None else first, ended)


@contextmanager
def endpoint(
    where: EndpointOptions, prompts: Sequence[list[int]] | Sequence[Messages], max_new_tokens: int, batch: int
) -> Iterator[Endpoint]:
    """A connected server. batch: upper bound of parallel requests. Raises UserError for a missing server or model."""
    base = base_of(where.url, where.name, "engine_key_env")
    import httpx

    headers = {"Authorization": f"Bearer {where.key}"} if where.key else {}
    patience = httpx.Timeout(TIMEOUT, connect=CONNECT)
    limits = httpx.Limits(max_connections=batch, max_keepalive_connections=batch)
    with (
        httpx.Client(base_url=base, headers=headers, timeout=patience, limits=limits) as client,
        ThreadPoolExecutor(batch) as pool,
    ):
        model, about = _known(client, where)
        yield Endpoint(where, client, pool, prompts, max_new_tokens, model, about, counters(client))


def counters(client: httpx.Client) -> dict[str, float] | None:
    """The server's counters since its start: `generated`, `verifications`, and `drafted`, `accepted` where it has them."""
    text = _looked_up(client, "metrics")
    if text is None:
        return None
    found = prometheus(text)
    for known in KNOWN:
        names = {key: getattr(known, key) for key in ("generated", "verifications", "drafted", "accepted")}
        values = {key: found.get(name) for key, name in names.items() if name is not None}
        if all(value is not None for value in values.values()):
            return {key: value for key, value in values.items() if value is not None}
    return None


def prometheus(text: str) -> dict[str, float]:
    """The values by name, without `_total`, summed over labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.partition("#")[0].strip().rpartition(" ")
        bare = name.partition("{")[0].removesuffix("_total")
        try:
            found[bare] = found.get(bare, 0.0) + float(value)
        except ValueError:
            continue
    return found


def _known(client: httpx.Client, where: EndpointOptions) -> tuple[str, EngineInfo]:
    """The model that answers, and the server's description."""
    with _explained(where):
        response = client.get("models")
        _check(response, where, "models")
        try:
            listed = {str(one["id"]): one for one in response.json()["data"]}
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{where.url} does not list its models; is {where.name} an OpenAI-compatible server?") from error
    if where.model is None and len(listed) != 1:
        raise UserError(f"{where.url} has the models {', '.join(listed) or 'none'}; set engine_model")
    model = where.model or next(iter(listed))
    maker = listed.get(model, {}).get("owned_by")
    versions = {} if not maker else {str(maker): _version(client)}
    return model, EngineInfo(versions, ids=False)


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
def _explained(where: EndpointOptions) -> Iterator[None]:
    import httpx

    try:
        yield
    except httpx.HTTPError as error:
        raise UserError(f"{where.url}: no answer ({type(error).__name__}); start the server, and check {where.name}") from error


def _check(response: httpx.Response, where: EndpointOptions, path: str) -> None:
    if response.status_code == 200:
        return
    response.read()
    hint = "" if where.api == CHAT or path == "models" else ", or engine_api=chat where it takes no token ids"
    raise UserError(
        f"{where.url} refuses {path} with status {response.status_code}: {error_text(response)}; check {where.name}, "
        "engine_model "
        f"and the key in engine_key_env{hint}"
    )


def _events(response: httpx.Response, where: EndpointOptions) -> Iterator[dict[str, Any]]:
    """The parts of a streamed answer."""
    for line in response.iter_lines():
        content = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if not content or content == "[DONE]":
            continue
        try:
            part = json.loads(content)
        except ValueError as error:
            raise UserError(f"{where.url} streams no JSON, {content[:80]!r}; name an OpenAI-compatible server") from error
        if not isinstance(part, dict) or "error" in part:
            raise UserError(f"{where.url} breaks off: {content[:200]}")
        yield part


def _piece(part: dict[str, Any]) -> str:
    choices = part.get("choices") or [{}]
    piece = choices[0].get("text") or (choices[0].get("delta") or {}).get("content")
    return str(piece or "")
