"""The server path against a real HTTP server that fails, limits, delays and drops: nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import repeat
from pathlib import Path
from typing import Any

import httpx
import pytest

from drafttrain.core.errors import UserError
from drafttrain.data import DataOptions
from drafttrain.data import server as server_file
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import EMBEDDED, load_tokenizer
from tests.helpers import certificates, read_conversations
from tests.tokenizers import tokenizer_of

Command = Callable[..., int]
KEY = "sk-very-secret"
HANG = 300.0  # seconds: whoever waits for so long waits in vain


def said(body: dict[str, Any]) -> str:
    """A reply that depends on everything that must reach the server."""
    kept = [body["messages"], body["temperature"], body["seed"], body["max_tokens"], body["top_p"]]
    return "reply " + hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:12]


class Fake:
    """A chat server. faults: what becomes of the n-th request (from 0) for chat; all others are answered."""

    def __init__(self, faults: dict[int, str] | Callable[[int, dict[str, Any]], str | None]) -> None:
        self.fault = faults if callable(faults) else lambda number, body: faults.get(number)
        self.requests: list[dict[str, Any]] = []
        self.answered: Counter[str] = Counter()
        self.keys: set[str | None] = set()
        self.at_once = self.most_at_once = 0
        self.engine: str | None = None  # of which it is a server
        self.ids: Callable[[str], list[int]] = lambda text: []  # the tokens of a text
        self.calls: Callable[[dict[str, Any]], list[dict[str, Any]]] = lambda body: []  # that a reply makes
        self.plain = ""  # what follows every plain text
        self.lock = threading.Lock()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def handler(fake) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                pass

            def do_GET(self) -> None:
                fake.keys.add(self.headers.get("Authorization"))
                models = [{"id": "tiny-model"} | ({"owned_by": fake.engine} if fake.engine else {})]
                self.give(200, {"data": models} if self.path == "/v1/models" else {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake.lock:
                    number = len(fake.requests)
                    fake.requests.append(body)
                    fake.at_once += 1
                    fake.most_at_once = max(fake.most_at_once, fake.at_once)
                try:
                    self.act(fake.fault(number, body), body)
                finally:
                    with fake.lock:
                        fake.at_once -= 1

            def act(self, fault: str | None, body: dict[str, Any]) -> None:
                if self.path == "/v1/completions":
                    self.give(200, {"choices": [{"text": fake.plain, "finish_reason": "stop"}]})
                    return
                kind, _, value = (fault or "").partition(" ")
                answer = {
                    "choices": [{"message": {"content": said(body)}, "finish_reason": value if kind == "finish" else "stop"}]
                }
                if calls := fake.calls(body):
                    called = {"message": {"content": None, "tool_calls": calls}, "finish_reason": "tool_calls"}
                    answer["choices"][0] |= called
                answer["usage"] = {"completion_tokens": 5}  # type: ignore[assignment]
                prompt, reply = fake.ids(body["messages"][-1]["content"]), fake.ids(said(body))
                if body.get("return_token_ids"):  # vLLM
                    answer["prompt_token_ids"] = prompt  # type: ignore[assignment]
                    answer["choices"][0]["token_ids"] = reply
                if body.get("return_prompt_token_ids") and body.get("return_meta_info") and body.get("logprobs"):  # SGLang
                    told = {"output_token_logprobs": [[-0.5, token, "x"] for token in reply]}
                    answer["choices"][0] |= {"prompt_token_ids": prompt, "meta_info": told}
                if kind == "drop":
                    self.close_connection = True
                elif kind == "half":
                    self.send_response(200)
                    self.send_header("Content-Length", "500")
                    self.end_headers()
                    self.wfile.write(json.dumps(answer).encode()[:40])
                    self.close_connection = True
                elif kind == "status":
                    status, _, retry = value.partition(" ")
                    self.give(int(status), {"error": "so it is"}, retry)
                elif kind == "text":
                    self.give(200, value)
                elif kind == "null":
                    self.give(200, {"choices": [{"message": {"content": None}, "finish_reason": "stop"}]})
                else:
                    fake.answered[json.dumps([body["messages"], body["seed"]])] += 1
                    self.give(200, answer)

            def give(self, status: int, body: Any, retry: str = "") -> None:
                content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(status)
                if retry:
                    self.send_header("Retry-After", retry)
                self.send_header("Content-Length", str(len(content)))
                with suppress(ConnectionError):  # who asked may have given up
                    self.end_headers()
                    self.wfile.write(content)

        return Handler

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Fake]]:
    fakes: list[Fake] = []

    def start(faults: Any = ()) -> Fake:
        fakes.append(Fake(faults or {}))
        return fakes[-1]

    yield start
    for fake in fakes:
        fake.close()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_file, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(ssl, "create_default_context", certificates)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"first {i}", f"second {i}"]}) + "\n" for i in range(12)))
    return path


def prepare(command: Command, fake: Fake, prompts: Path, *more: str) -> int:
    return command("prepare", f"data.path={prompts}", "out=out", f"prepare.server={fake.url}", "prepare.concurrency=4", *more)


def records(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out" / "part-00000.jsonl").read_text().splitlines()]


def check_whole(tmp_path: Path, count: int = 12) -> None:
    """Every prompt, in order, each turn answered in the light of the one before."""
    found = records(tmp_path)
    assert [record["messages"][0]["content"] for record in found] == [f"first {i}" for i in range(count)]
    for record in found:
        for turn in (1, 3):
            asked = {"messages": record["messages"][:turn], "temperature": record["temperature"], "seed": record["seed"]}
            assert record["messages"][turn]["content"] == said(asked | {"max_tokens": 1024, "top_p": 1.0})


def test_prepare_server_requests_every_turn_with_bounded_concurrency(
    command: Command, serve: Any, prompts: Path, tmp_path: Path
) -> None:
    four = threading.Barrier(4)

    def wait_for_others(number: int, body: dict[str, Any]) -> None:
        if number < 4:
            four.wait(HANG)

    fake = serve(wait_for_others)
    assert prepare(command, fake, prompts) == 0
    check_whole(tmp_path)
    assert len(fake.requests) == 24 and fake.most_at_once == 4
    assert {request["model"] for request in fake.requests} == {"tiny-model"}
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["kept"], summary["replies"], summary["tokens"]) == (12, 24, 120)
    provenance = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert provenance["served_as"] == provenance["target"]["path"] == "tiny-model"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_prepare_server_token_ids_are_kept_where_engine_returns_them(
    command: Command, serve: Any, prompts: Path, tmp_path: Path, engine: str
) -> None:
    tokenizer = load_tokenizer(TargetOptions())
    fake, target = serve(), ("target=hf", f"target.path={EMBEDDED}")
    fake.engine, fake.ids = engine, lambda text: list(tokenizer(text)["input_ids"])
    assert prepare(command, fake, prompts, *target) == 0
    check_whole(tmp_path)
    for record in records(tmp_path):
        assert record["tokenizer"] == json.loads((tmp_path / "out" / "provenance.json").read_text())["tokenizer"]
        texts = [turn["content"] for turn in record["messages"]]
        wanted = [fake.ids(prompt) + fake.ids(reply) for prompt, reply in zip(texts[::2], texts[1::2], strict=True)]
        assert [document["input_ids"] for document in record["documents"]] == wanted
        assert [sum(document["loss_mask"]) for document in record["documents"]] == [len(fake.ids(t)) for t in texts[1::2]]


def test_prepare_server_token_ids_that_are_not_the_texts_are_dropped(
    command: Command, serve: Any, prompts: Path, tmp_path: Path
) -> None:
    """A server of another tokenizer, and one that is asked for no ids, since no target is named or its engine is unknown."""
    fake, target = serve(), ("target=hf", f"target.path={EMBEDDED}")
    fake.engine, fake.ids = "vllm", lambda text: [5, 6]
    for out, more in (("out=a", target), ("out=b", ())):
        assert prepare(command, fake, prompts, *more, out) == 0
        assert ("return_token_ids" in fake.requests[-1]) is bool(more)
    fake.engine = "other"
    assert prepare(command, fake, prompts, *target, "out=c") == 0
    assert "return_token_ids" not in fake.requests[-1]
    assert not any("documents" in path.read_text() for path in tmp_path.glob("?/part-*"))


def test_prepare_server_chat_template_kwargs_of_record_are_sent_and_kept(command: Command, serve: Any, tmp_path: Path) -> None:
    asked = [{"prompt": "a", "chat_template_kwargs": {"enable_thinking": False}}, {"prompt": "a"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in asked))
    fake = serve()
    for more in ("prepare.format=jsonl", "prepare.format=parquet"):
        assert prepare(command, fake, tmp_path / "prompts.jsonl", more) == 0
        found = read_conversations(DataOptions(path=str(tmp_path / "out")))
        assert [conversation.arguments for conversation in found] == [{"enable_thinking": False}, {}]
    assert sorted(str(request.get("chat_template_kwargs")) for request in fake.requests) == [
        "None",
        "{'enable_thinking': False}",
    ]


def test_prepare_server_adapter_of_record_is_model_that_answers(command: Command, serve: Any, tmp_path: Path) -> None:
    """As vLLM serves LoRA adapters. The same prompt is asked of each."""
    asked = [{"prompt": "a", "adapter": "sql"}, {"prompt": "a"}, {"prompt": "a", "adapter": "sql"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in asked))
    fake = serve()
    assert prepare(command, fake, tmp_path / "prompts.jsonl") == 0
    assert sorted(request["model"] for request in fake.requests) == ["sql", "tiny-model"]
    records = [json.loads(line) for line in (tmp_path / "out" / "part-00000.jsonl").read_text().splitlines()]
    assert [record.get("adapter") for record in records] == ["sql", None]


def function(name: str, identity: str, arguments: Any = "{}") -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_prepare_server_calls_get_recorded_results(
    command: Command, serve: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tools are sent with each request, calls and their arguments as servers write them."""
    tools = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
    turns = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "tool_calls": [function("now", "call_7", '{"zone": "UTC"}')]},
        {"role": "tool", "content": "noon", "tool_call_id": "call_7"},
        {"role": "assistant", "content": "It is noon."},
    ]
    without_ids = [turns[0] | {"content": "second"}, *turns[1:2], {"role": "tool", "content": "noon"}]
    others = [[turns[0] | {"content": name}, *turns[1:]] for name in ("other", "unreadable", "none")]
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"messages": messages, "tools": tools}) + "\n" for messages in (turns, without_ids, *others))
    )
    fake = serve()
    answers = {"other": [function("then", "w")], "unreadable": [function("now", "w", "{")], "none": []}
    now = [function("now", "w", '{"zone": "CET"}')]
    fake.calls = lambda body: answers.get(body["messages"][0]["content"], now) if len(body["messages"]) == 1 else []
    for form in ("jsonl", "parquet"):
        assert prepare(command, fake, tmp_path / "prompts.jsonl", f"prepare.format={form}") == 0
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert summary["ended"] == {"other calls": 1, "unreadable calls": 1, "no call for the results": 1}
        assert (summary["texts"], summary["kept"], summary["replies"]) == (5, 4, 6)
        assert "ended: 1 other calls, 1 unreadable calls, 1 no call for the results\n" in capfd.readouterr().out
        whole, adopted, other, none = read_conversations(DataOptions(path=str(tmp_path / "out")))
        assert [[m["role"] for m in c.messages] for c in (whole, other, none)] == [
            ["user", "assistant", "tool", "assistant"], ["user", "assistant"], ["user", "assistant"],
        ]  # fmt: skip
        assert whole.messages[1]["tool_calls"] == [function("now", "call_7", {"zone": "CET"})]
        assert adopted.messages[2]["tool_call_id"] == adopted.messages[1]["tool_calls"][0]["id"] == "w"
        assert whole.tools == adopted.tools == tuple(tools)
        assert other.messages[1]["tool_calls"][0]["function"]["name"] == "then"
    rejects = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    assert [reject["reason"] for reject in rejects] == ["unreadable calls"]
    assert all(request["tools"] == tools for request in fake.requests)
    continued = next(r["messages"] for r in fake.requests if len(r["messages"]) == 3 and r["messages"][0]["content"] == "first")
    assert continued[1]["tool_calls"] == [function("now", "call_7", '{"zone": "CET"}')]
    assert continued[2] == {"role": "tool", "content": "noon", "tool_call_id": "call_7"}


def test_prepare_server_of_base_model_continues_plain_text(command: Command, serve: Any, tmp_path: Path) -> None:
    tokenizer_of("llama").save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "base" / "model.safetensors").touch()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a boy"}\n')
    fake = serve()
    fake.plain = " named Tim"
    target = ("target=hf", f"target.path={tmp_path / 'base'}")
    assert prepare(command, fake, tmp_path / "prompts.jsonl", *target) == 0
    assert [request["prompt"] for request in fake.requests] == ["a boy"] and "messages" not in fake.requests[0]
    assert [turn["content"] for turn in records(tmp_path)[0]["messages"]] == ["a boy", " named Tim"]


def test_prepare_server_transient_faults_are_retried_without_loss(
    command: Command, serve: Any, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropped, torn and malformed answers, and every status that passes."""
    monkeypatch.setattr(server_file, "TRIES", 9)  # however many of them happen to meet one text
    faults = ["drop", "half", "status 500", "status 502", "status 503", "status 408", "text not json", "text []", "null"]
    fake = serve(dict(zip(range(0, 27, 3), faults, strict=True)))
    assert prepare(command, fake, prompts) == 0
    check_whole(tmp_path)
    assert len(fake.requests) == 24 + len(faults)
    assert set(fake.answered.values()) == {1}


def test_prepare_server_rate_limit_delays_all_requests(
    command: Command, serve: Any, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of four requests at once is refused, and the others are answered when the sender knows it."""
    known, headers = threading.Event(), list[str | None]()
    starts: list[tuple[float, float]] = []  # of each request: when it began, and until when all were held back
    once = server_file._Sender._once

    def seconds(header: str | None) -> float:
        headers.append(header)
        known.set()
        return 0.15

    async def recorded(sender: Any, *request: Any) -> Any:
        starts.append((time.monotonic(), sender.resume_at))
        return await once(sender, *request)

    def limit(number: int, body: dict[str, Any]) -> str | None:
        return "status 429 7" if number == 0 else known.wait(HANG) and None

    monkeypatch.setattr(server_file, "_seconds", seconds)
    monkeypatch.setattr(server_file._Sender, "_once", recorded)
    assert prepare(command, serve(limit), prompts) == 0
    check_whole(tmp_path)
    held = [(began, resume_at) for began, resume_at in starts if resume_at]
    assert headers == ["7"] and len(held) == 25 - 4
    assert all(began >= resume_at for began, resume_at in held)


def test_seconds_of_retry_after_are_number_date_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_file, "time", lambda: 1_000_000_000.0)
    soon, past = (formatdate(1_000_000_000 + more, usegmt=True) for more in (3, -3))
    found = [server_file._seconds(header) for header in ("2", " 12 ", soon, past, "later", None)]
    assert found == [2.0, 12.0, 3.0, 0.0, None, None]


def send(monkeypatch: pytest.MonkeyPatch, retries: Iterator[Exception]) -> tuple[str, float]:
    """What a sender with a patience of 10 s ends with when requests fail so, and the seconds that it takes: nobody waits."""
    now = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    async def once(sender: Any, *request: Any) -> str:
        for error in retries:
            raise error
        return "a reply"

    monkeypatch.setattr(server_file, "monotonic", lambda: now)
    monkeypatch.setattr(server_file.asyncio, "sleep", sleep)
    monkeypatch.setattr(server_file._Sender, "_once", once)
    sender = server_file._Sender(None, server_file.ServerOptions("http://x/v1", patience=10.0))  # type: ignore[arg-type]
    return asyncio.run(sender.send("POST", "chat/completions", {}, str)), now


def test_prepare_server_rate_limit_does_not_consume_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    reply, seconds = send(monkeypatch, iter([server_file._RetryError("busy", after=30.0)] * 3))
    assert reply == "a reply" and seconds >= 90
    with pytest.raises(UserError, match="busy, for 10 s; the answers so far are kept"):
        send(monkeypatch, repeat(server_file._RetryError("busy")))


def test_prepare_server_outage_keeps_replies_for_resume(
    command: Command, serve: Any, prompts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fake = serve(lambda number, body: "drop" if number >= 13 else None)
    assert prepare(command, fake, prompts, "prepare.patience=0.3") == 2
    err = capfd.readouterr().err
    assert "no answer (RemoteProtocolError), for 0.3 s; the answers so far are kept" in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()
    kept = {json.loads(line)["id"] for line in (tmp_path / "out.journal" / "rank-00000.jsonl").read_text().splitlines()}
    assert 2 <= len(kept) <= 6
    again = serve()
    assert prepare(command, again, prompts) == 0
    check_whole(tmp_path)
    assert len(again.requests) == 24 - 2 * len(kept)


def test_prepare_server_refused_prompts_are_listed_and_requested_again(
    command: Command,
    serve: Any,
    prompts: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def poison(number: int, body: dict[str, Any]) -> str | None:
        text = body["messages"][-1]["content"]
        return {"first 3": "status 400", "second 5": "status 500", "first 7": "null"}.get(text)

    request = httpx.AsyncClient.request

    async def too_late(client: httpx.AsyncClient, method: str, url: str, json: Any = None) -> httpx.Response:
        if json and json["messages"][-1]["content"] == "first 8":
            raise httpx.ReadTimeout("")
        return await request(client, method, url, json=json)

    fake = serve(poison)
    with monkeypatch.context() as patch:
        patch.setattr(httpx.AsyncClient, "request", too_late)
        assert prepare(command, fake, prompts, "prepare.timeout=77", "prepare.failures=4") == 0
        found = records(tmp_path)
        assert len(found) == 9
        assert len(next(r for r in found if r["messages"][0]["content"] == "first 5")["messages"]) == 2  # up to the fault
        rejects = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
        assert [reject["origin"].rpartition(":")[2] for reject in rejects] == ["4", "8", "9"]
        reasons = ['status 400: {"error": "so it is"}', "an answer without a reply, 3 times", "no answer within 77 s, 3 times"]
        assert [reject["reason"] for reject in rejects] == reasons
        capfd.readouterr()
        assert prepare(command, fake, prompts, "prepare.timeout=77", "prepare.failures=1") == 2
    assert "2 prompts have failed, the last one" in capfd.readouterr().err
    assert len(records(tmp_path)) == 9  # what was there before stays
    assert prepare(command, serve(), prompts) == 0
    assert len(records(tmp_path)) == 12


def test_server_reply_timeout_is_the_configured_one() -> None:
    assert server_file.client_of(server_file.ServerOptions("http://x/v1", timeout=0.2)).timeout.read == 0.2


@pytest.mark.parametrize(
    ("answer", "busy"),
    [
        (500, False),
        (503, True),
        (400, None),
        (499, None),
        (httpx.ReadTimeout("slow"), False),
        (httpx.ConnectError("down"), True),
    ],
    ids=str,
)
def test_server_failure_is_retried_as_busy_or_as_a_try_or_refused(answer: int | Exception, busy: bool | None) -> None:
    """busy: the request is sent again for as long as patience lasts; None: it is refused at once."""

    def handle(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer, text="why")

    async def once() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://x") as client:
            await server_file._Sender(client, server_file.ServerOptions("http://x/v1"))._once("GET", "models", None, str)

    with pytest.raises(server_file._RefusedError if busy is None else server_file._RetryError) as raised:
        asyncio.run(once())
    assert getattr(raised.value, "busy", None) is busy


def test_prepare_server_that_lists_no_models_asks_for_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*request: Any) -> None:
        raise server_file._RefusedError("status 418")

    monkeypatch.setattr(server_file._Sender, "_once", refused)
    with pytest.raises(UserError, match=r"does not list its models \(status 418\); set prepare.model$"):
        server_file.model_of(server_file.ServerOptions("http://x/v1"))


@pytest.mark.parametrize("status", [401, 404])
def test_prepare_server_unauthorized_or_not_found_ends_command(
    command: Command, serve: Any, prompts: Path, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    fake = serve(lambda number, body: f"status {status}")
    assert prepare(command, fake, prompts) == 2
    assert f"refuses chat/completions with status {status}" in capfd.readouterr().err
    assert len(fake.requests) <= 4


def test_prepare_server_key_is_sent_and_appears_nowhere_else(
    command: Command,
    serve: Any,
    prompts: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    fake = serve({0: "status 401"})
    assert prepare(command, fake, prompts, "prepare.key_env=MY_KEY") == 2
    assert prepare(command, fake, prompts, "prepare.key_env=MY_KEY") == 0
    assert fake.keys == {f"Bearer {KEY}"}
    out, err = capfd.readouterr()
    assert KEY not in out + err
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


def test_prepare_server_unreachable_ends_command_without_files(
    command: Command, prompts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as silent:  # it keeps its port, and does not listen
        silent.bind(("127.0.0.1", 0))
        server = f"prepare.server=http://127.0.0.1:{silent.getsockname()[1]}"
        assert command("prepare", server, "prepare.patience=0.1", "out=out", f"data.path={prompts}") == 2
    assert "no answer (ConnectError), for 0.1 s" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_prepare_server_truncated_replies_are_dropped_or_shortened(
    command: Command, serve: Any, prompts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fault(number: int, body: dict[str, Any]) -> str | None:
        return {"first 0": "finish length", "second 1": "finish length"}.get(body["messages"][-1]["content"])

    assert prepare(command, serve(fault), prompts) == 0
    found = records(tmp_path)
    assert [len(record["messages"]) for record in found] == [2] + [4] * 10
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["dropped"] == {"truncated": 1} and summary["shortened"] == 1 and summary["found"]["truncated"] == 2
    assert "within prepare.max_new_tokens are dropped; raise it to keep more" in " ".join(capfd.readouterr().out.split())
