"""An OpenAI-compatible server (vLLM, SGLang, ...) answers prompts: concurrent requests, retried while it is down or busy.

The response decides how a request continues:
- no connection, a dropped one, 408, 425, 429, 502 to 504: retried with growing waits for `patience` seconds; then the command
  ends, and the same command resumes. `Retry-After` holds all requests back for that time;
- no response within `timeout` seconds, 500, or a malformed one: retried twice, then the text counts as failed;
- 401, 403, 404, 405: the command ends, since all requests would fail in the same way;
- any other refusal: the text counts as failed.
"""

from __future__ import annotations

import asyncio
import base64
import json
import mimetypes
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from drafttrain.core.errors import UserError
from drafttrain.data.forms import ARGUMENTS, TOOLS
from drafttrain.data.generation_jobs import Dialogue, Finished, GenerationJob, Message, Tick, TokenTurn
from drafttrain.data.pictures import INLINE
from drafttrain.data.reply_text import Reply
from drafttrain.data.tool_calls import Call, parsed_calls
from drafttrain.targets.images import content_of

if TYPE_CHECKING:
    import httpx
    from transformers import PreTrainedTokenizerBase

BUSY = (408, 425, 429, 502, 503, 504)
FATAL = (401, 403, 404, 405)
IDS: dict[str, dict[str, Any]] = {  # fields of a request that ask an engine for the token ids of prompt and reply
    "vllm": {"return_token_ids": True},
    "sglang": {"return_prompt_token_ids": True, "return_meta_info": True, "logprobs": True},
}
CALLED = ("tool_calls", "function_call")  # finish reasons of a reply that ends with calls
TRIES = 3  # attempts for a request that the server accepts and does not answer
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds; doubled after every attempt


class _RefusedError(Exception):
    """This text failed. Others may succeed."""


class _FatalError(UserError):
    """All requests of this kind would fail in the same way."""


class _RetryError(Exception):
    """The request is to be sent again. after: requested wait in seconds. busy: the server is down, busy or limits its rate."""

    def __init__(self, reason: str, after: float | None = None, busy: bool = True) -> None:
        super().__init__(reason)
        self.after, self.busy = after, busy


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The server's address, and how requests are sent."""

    url: str
    model: str | None = None
    key: str | None = field(default=None, repr=False)  # sent as a bearer token; it appears in no message and no file
    concurrency: int = 64  # concurrent requests
    timeout: float = 600.0  # seconds for one reply
    patience: float = 600.0  # seconds to retry while the server is down, busy or limits its rate
    max_new_tokens: int = 1024
    top_p: float = 1.0
    top_k: int = 0


def base_of(url: str, key: str, secret: str) -> httpx.URL:
    """The base URL of requests. key, secret: names of the settings for the URL and the key, for messages.

    Raises UserError for an invalid URL, and if httpx is missing.
    """
    try:
        import httpx
    except ImportError as error:
        raise UserError(f"{key} needs httpx; pip install 'drafttrain[server]'") from error
    full_url = url if url.rstrip("/").endswith("/v1") else url.rstrip("/") + "/v1"
    try:
        base = httpx.URL(full_url)
    except httpx.InvalidURL as error:
        raise UserError(f"{key} is {url!r}, which is no URL ({error}); set http://HOST:PORT/v1") from error
    if base.scheme not in ("http", "https") or not base.host or base.userinfo or base.query:
        raise UserError(f"{key} must be http://HOST:PORT/v1, without a user or a query in it; a key goes into {secret}")
    return base


def client_of(options: ServerOptions) -> httpx.AsyncClient:
    """An HTTP client for the server. Raises UserError for an invalid URL, and if httpx is missing."""
    base = base_of(options.url, "prepare.server", "prepare.key_env")
    import httpx

    headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
    limits = httpx.Limits(max_connections=options.concurrency, max_keepalive_connections=options.concurrency)
    return httpx.AsyncClient(base_url=base, headers=headers, limits=limits, timeout=httpx.Timeout(options.timeout, connect=30))


def model_of(options: ServerOptions) -> tuple[str, str | None]:
    """(the name of the model that answers, the engine that runs it if the server says so).

    Raises UserError if the server has several models and none was chosen.
    """

    async def listed() -> dict[str, str | None]:
        async with client_of(options) as client:
            return await _Sender(client, options).send("GET", "models", None, _read_models)

    try:
        models = asyncio.run(listed())
    except (_RefusedError, _FatalError) as error:
        if options.model is not None:
            return options.model, None
        if isinstance(error, _FatalError):
            raise
        raise UserError(f"{options.url} does not list its models ({error}); set prepare.model") from error
    if options.model is None and len(models) != 1:
        raise UserError(f"{options.url} has the models {', '.join(models) or 'none'}; set prepare.model")
    name = options.model or next(iter(models))
    return name, models.get(name)


def _read_models(body: Any) -> dict[str, str | None]:
    return {str(model["id"]): model.get("owned_by") for model in body["data"]}


@dataclass(frozen=True)
class Server:
    """Generates texts by an OpenAI-compatible server. options.model must be set (`model_of`)."""

    options: ServerOptions
    engine: str | None = None  # a name of `IDS`
    tokenizer: PreTrainedTokenizerBase | None = None  # the target's; None: not known, so no token ids are kept
    plain: bool = False  # the target has no chat template: each conversation is one turn, which it continues

    def answer(self, jobs: Sequence[GenerationJob], finished: Finished, tick: Tick) -> None:
        """Generate every job's text. Raises UserError if the server is away for `patience` seconds or refuses every request."""
        if not jobs:
            return
        try:
            asyncio.run(self._answer(iter(jobs), finished, tick))
        except BaseExceptionGroup as group:
            raise next((e for e in group.exceptions if not isinstance(e, Exception)), group.exceptions[0]) from group

    async def _answer(self, jobs: Iterator[GenerationJob], finished: Finished, tick: Tick) -> None:
        async with client_of(self.options) as client, asyncio.TaskGroup() as group:
            sender = _Sender(client, self.options)
            for _ in range(self.options.concurrency):
                group.create_task(self._work(sender, jobs, finished, tick))

    async def _work(self, sender: _Sender, jobs: Iterator[GenerationJob], finished: Finished, tick: Tick) -> None:
        for job in jobs:  # all workers share this iterator
            dialogue = Dialogue(job)
            try:
                while (messages := dialogue.next_prompt()) is not None:
                    path = "completions" if self.plain else "chat/completions"
                    answer = await sender.send("POST", path, self._body(job, messages), _read_reply)
                    dialogue.add_reply(answer.reply, answer.tokens, self._turn(answer))
                    tick(answer.tokens)
            except _RefusedError as error:
                dialogue.fail(str(error))
            finished(dialogue)

    def _body(self, job: GenerationJob, messages: list[Message]) -> dict[str, Any]:
        options = self.options
        prompt_fields = {"prompt": messages[0]["content"]} if self.plain else {"messages": [_served(m) for m in messages]}
        prompt_fields |= {ARGUMENTS: job.script.arguments} if job.script.arguments and not self.plain else {}
        prompt_fields |= {TOOLS: list(job.script.tools)} if job.script.tools else {}
        model = job.script.adapter or options.model  # vLLM serves an adapter as a model of its name
        body: dict[str, Any] = {"model": model, **prompt_fields, "max_tokens": options.max_new_tokens}
        body |= {"temperature": job.temperature, "top_p": options.top_p, "seed": job.seed}
        body |= IDS.get(self.engine or "", {}) if self.tokenizer is not None else {}
        return body | ({"top_k": options.top_k} if options.top_k else {})  # vLLM and SGLang support it, OpenAI does not

    def _turn(self, answer: _Answer) -> TokenTurn | None:
        """The tokens of prompt and reply, if the target's tokenizer reads the reply in them.

        A parser of the server may have taken thoughts and calls out of the text, not out of the tokens.
        """
        if self.tokenizer is None or answer.turn is None or not answer.turn.reply:
            return None
        decoded = self.tokenizer.decode(answer.turn.reply, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        written = [answer.reply.text.strip(), *(call["function"]["name"] for call in answer.reply.calls or ())]
        return answer.turn if all(text in str(decoded) for text in written) else None


def _served(message: Message) -> Message:
    """The message as servers take it: images as base64, arguments of calls as JSON strings."""
    if calls := message.get("tool_calls"):
        functions = [call["function"] | {"arguments": json.dumps(call["function"]["arguments"])} for call in calls]
        calls = [call | {"function": function} for call, function in zip(calls, functions, strict=True)]
        return message | {"tool_calls": calls}
    if isinstance(message["content"], str):
        return message
    parts = []
    for part in message["content"]:
        if part["type"] != "image":
            parts.append(part)
            continue
        url = part["image"]
        if not url.startswith(INLINE):
            mime_type = mimetypes.guess_type(url)[0] or "image/png"
            url = f"data:{mime_type};base64,{base64.b64encode(content_of(url, 'image')).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return message | {"content": parts}


@dataclass(frozen=True, slots=True)
class _Answer:
    """A response's content."""

    reply: Reply
    tokens: int  # of the reply
    turn: TokenTurn | None  # the token ids, if they are in the response


def _read_reply(body: Any) -> _Answer:
    """Raises KeyError, TypeError, IndexError or ValueError for a malformed response."""
    choice = body["choices"][0]
    text, finish = choice["message"]["content"] if "message" in choice else choice["text"], choice["finish_reason"]
    calls: tuple[Call, ...] | None = ()
    if written := choice.get("message", {}).get("tool_calls"):
        text, finish, calls = text or "", "stop" if finish in CALLED else finish, parsed_calls(written)
    if not isinstance(text, str) or not isinstance(finish, str):
        raise ValueError("no text in it")
    text.encode()  # an unpaired surrogate could not be written to the journal
    tokens = int((body.get("usage") or {}).get("completion_tokens") or 0)
    return _Answer(Reply(text, finish, calls), tokens, _read_turn(body, choice))


def _read_turn(body: dict[str, Any], choice: dict[str, Any]) -> TokenTurn | None:
    """The token ids of prompt and reply, as vLLM or SGLang write them; None if they are not all there."""
    prompt = body.get("prompt_token_ids") or choice.get("prompt_token_ids")
    reply = choice.get("token_ids")
    if reply is None:  # SGLang: (log-probability, id, text) of each token
        reply = [entry[1] for entry in (choice.get("meta_info") or {}).get("output_token_logprobs") or ()]
    all_ids = [*(prompt or ()), *reply]
    return TokenTurn(list(prompt), list(reply)) if prompt and reply and all(isinstance(i, int) for i in all_ids) else None


class _Sender:
    """Sends a request until it is answered or given up. A rate limit of one request holds all of them back."""

    def __init__(self, client: httpx.AsyncClient, options: ServerOptions) -> None:
        self.client, self.options, self.resume_at = client, options, 0.0

    async def send(self, method: str, path: str, body: Any, read: Any) -> Any:
        """Returns `read` of the response's JSON. Raises _RefusedError, and UserError when no further request makes sense."""
        deadline, attempts, delay = None, 0, FIRST_WAIT
        while True:
            await self._wait_for_rate_limit()
            try:
                return await self._once(method, path, body, read)
            except _RetryError as retry:
                attempts += not retry.busy
                if attempts >= TRIES:
                    raise _RefusedError(f"{retry}, {TRIES} times") from retry
                deadline = deadline or monotonic() + self.options.patience
                if monotonic() >= deadline:
                    raise UserError(
                        f"{self.options.url}: {retry}, for {self.options.patience:g} s; the answers so far are kept: start the "
                        "server and repeat the command, or raise prepare.patience"
                    ) from retry
                if retry.after:
                    self.resume_at = max(self.resume_at, monotonic() + retry.after)
                    deadline += retry.after  # a requested wait does not count as absence
                else:
                    await asyncio.sleep(min(delay * random.uniform(0.5, 1.0), deadline - monotonic()))
                    delay = min(2 * delay, LONGEST_WAIT)

    async def _wait_for_rate_limit(self) -> None:
        """Wait until no rate limit holds, plus a random time, so that requests do not resume at the same moment."""
        while (remaining := self.resume_at - monotonic()) > 0:
            await asyncio.sleep(remaining + random.uniform(0.0, min(1.0, 0.1 * remaining)))

    async def _once(self, method: str, path: str, body: Any, parse: Any) -> Any:
        import httpx

        try:
            response = await self.client.request(method, path, json=body)
        except httpx.ReadTimeout as error:
            raise _RetryError(f"no answer within {self.options.timeout:g} s", busy=False) from error
        except httpx.RequestError as error:
            raise _RetryError(f"no answer ({type(error).__name__})") from error
        status = response.status_code
        if status in BUSY:
            raise _RetryError(f"it is busy (status {status})", _seconds(response.headers.get("Retry-After")))
        if status in FATAL:
            raise _FatalError(
                f"{self.options.url} refuses {path} with status {status}: {error_text(response)}; check prepare.server, "
                "prepare.model and the key in prepare.key_env"
            )
        if status >= 500:
            raise _RetryError(f"it fails with status {status}", busy=False)
        if status >= 400:
            raise _RefusedError(f"status {status}: {error_text(response)}")
        try:
            return parse(response.json())
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise _RetryError("an answer without a reply", busy=False) from error


def _seconds(retry_after: str | None) -> float | None:
    """Seconds of a Retry-After header, which holds a number or a date; None if it is missing or neither."""
    if retry_after is None:
        return None
    if retry_after.strip().isdigit():
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time())
    except ValueError:
        return None


def error_text(response: httpx.Response) -> str:
    """The beginning of an error response's body."""
    return " ".join(response.text.split())[:200] or "nothing"
