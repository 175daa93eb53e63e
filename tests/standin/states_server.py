"""A stand-in for `vllm serve` with hidden states: the protocol of vLLM 0.32, transformers' forward, and faults on demand.

`python -m tests.standin.states_server TARGET FOLDER LAYERS PORT [FAULTS]` serves as a process: LAYERS as `2,3,4`. It
says `ready PORT`; PORT 0 is a free one. As vLLM does, it takes an exclusive lock on `<file>.lock` before it answers, and writes
the file after its answer.

A request with `kv_transfer_params={"include_output_tokens": true}` is answered by `write`, and its file has the prompt and the
answer without the last token (`request_finished` of vLLM's example_hidden_states_connector). The process samples from the
target with the request's seed and temperature, so that the same request has the same answer.

FAULTS is a JSON object: the number of a request (from 0, over all requests for states) to one of

    status      answers with 500
    drop        closes the connection without an answer
    half        half of the file, then the lock is released, as of a server that is killed while it writes
    missing     answers and writes no file
    late        never releases the lock
    nan         one value is not a number
    ids         the states of other token ids
    another     names the file of another request
    aborted     an answer without its last token, as of a request that the server gave up; a request for states alone leaves
                it to the next one for an answer
    die         the process ends at once

Shapes: T tokens, L layer ids, H hidden.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

STANDIN_HOST = "STANDIN_HOST"  # environment variable: the address at which it serves, 127.0.0.1 unless it is set


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for, and what is said in return."""

    read: list[int]  # tokens that the target reads
    ids: list[int]  # those whose states are given
    choice: dict[str, Any]
    usage: dict[str, int]


def answers(body: dict[str, Any]) -> bool:
    """Whether a request is for an answer, with its states."""
    return bool((body.get("kv_transfer_params") or {}).get("include_output_tokens"))


class StandIn:
    """A server.

    compute: token ids [T] to the states [T, L, H]. write: a prompt and the request's body to the token ids of an answer.
    """

    def __init__(
        self,
        compute: Any,
        folder: Path,
        faults: dict[int, str] | None = None,
        longest: int = 2**20,
        write: Callable[[list[int], dict[str, Any]], list[int]] | None = None,
    ) -> None:
        self.compute, self.folder, self.faults, self.longest = compute, folder, faults or {}, longest
        self.write = write
        self.requests: list[dict[str, Any]] = []
        self.most_at_once = self._at_once = self._aborts = 0
        self.writing = threading.Lock()
        self._held: list[int] = []  # locks that are never released

    def complete(self, handler: Handler, body: dict[str, Any]) -> None:
        """Answer a request for states, then write its file."""
        with self.writing:
            number = len(self.requests)
            self.requests.append(body)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            fault = self.faults.get(number, "")
            if fault == "aborted" and not answers(body):
                fault, self._aborts = "", self._aborts + 1
            elif not fault and self._aborts and answers(body):
                fault, self._aborts = "aborted", self._aborts - 1
        try:
            self._complete(handler, body, fault)
        finally:
            with self.writing:
                self._at_once -= 1

    def _complete(self, handler: Handler, body: dict[str, Any], fault: str) -> None:
        if fault == "die":
            os._exit(9)
        if fault == "status":
            return handler.answer(500, {"error": {"message": "EngineCore encountered an issue"}})
        if fault == "drop":
            handler.close_connection = True
            handler.connection.close()
            return None
        return self.give(handler, self._asked(body, fault), f"cmpl-{body['request_id']}-0-{os.urandom(4).hex()}", fault)

    def _asked(self, body: dict[str, Any], fault: str) -> Asked:
        """What a request asks for. An answer is written at once."""
        ids = body["prompt"]
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "length"}
        if not answers(body):
            return Asked(ids, ids, choice, {"prompt_tokens": len(ids), "completion_tokens": 1})
        assert self.write is not None and body["return_token_ids"], "a test of answers gives `write`"
        written = self.write(ids, body)
        stopped = written[-1] in body["stop_token_ids"]
        written = written[:-1] if fault == "aborted" else written
        finish = "abort" if fault == "aborted" else "stop" if stopped else "length"
        choice |= {"finish_reason": finish, "token_ids": written, "prompt_token_ids": ids}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(written)}
        return Asked([*ids, *written], [*ids, *written][:-1], choice, usage)

    def give(self, handler: Handler, asked: Asked, name: str, fault: str) -> None:
        """Answer, and write the file."""
        file = self.folder / f"{name}.safetensors"
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(f"{file}.lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX)
        given = file.with_name(f"cmpl-other-{file.name[-12:]}") if fault == "another" else file
        handler.completion(name, asked, {"hidden_states_path": str(given)})
        if fault == "late":
            self._held.append(lock)
            return None
        with torch.no_grad():
            # of all tokens, so that the sums are those of training on the same text; the last state is not given
            hidden_TLH = self.compute(asked.read)[: len(asked.ids)]
        if fault == "nan":
            hidden_TLH[-1, 0, 0] = torch.nan
        ids = asked.ids
        token_T = torch.tensor([i + 1 for i in ids] if fault == "ids" else ids)
        content = save({"hidden_states": hidden_TLH.contiguous(), "token_ids": token_T})
        if fault != "missing":
            file.write_bytes(content[: len(content) // 2] if fault == "half" else content)
        os.close(lock)
        return None


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    standin: Any

    def do_GET(self) -> None:
        pages: dict[str, Any] = {
            "/v1/models": {"data": [{"id": "target", "owned_by": "vllm", "max_model_len": self.standin.longest}]},
            "/version": {"version": "0.32.0"},
            "/health": {},
        }
        self.answer(200 if self.path in pages else 404, pages.get(self.path, {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.standin.complete(self, body)

    def answer(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def completion(self, name: str, asked: Asked, params: dict[str, Any]) -> None:
        """The answer to a request for states."""
        answer = {"id": name, "object": "text_completion", "choices": [asked.choice]}
        self.answer(200, answer | {"usage": asked.usage, "kv_transfer_params": params})
        self.wfile.flush()

    def log_message(self, *args: Any) -> None:
        pass


class _Listening(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no news."""


@contextmanager
def serving(standin: Any, port: int = 0, host: str | None = None, kind: type[Handler] | None = None) -> Any:
    """Serve in threads of this process; yields the URL. host: the address at which it listens. kind: an engine's handler."""
    host = host or os.environ.get(STANDIN_HOST, "127.0.0.1")
    handler = type("Own", (kind or Handler,), {"standin": standin})
    server = _Listening((host, port), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def states_of(model: Any, layers: Sequence[int]) -> Any:
    """What vLLM computes, by transformers' hooks: layer id i is the output of block i - 1, before any norm."""
    blocks = model.get_decoder().layers

    def compute(ids: list[int]) -> Tensor:
        found: dict[int, Tensor] = {}

        def kept(i: int) -> Any:
            def hook(module: Any, given: Any, out: Any) -> None:
                found[i] = (out[0] if isinstance(out, tuple) else out)[0]

            return hook

        hooks = [blocks[i - 1].register_forward_hook(kept(i)) for i in layers]
        try:
            model.get_decoder()(torch.tensor([ids]), use_cache=False)
        finally:
            for one in hooks:
                one.remove()
        return torch.stack([found[i] for i in layers], 1)

    lock = threading.Lock()

    def locked(ids: list[int]) -> Tensor:
        with lock:  # hooks are of one request
            return compute(ids)

    return locked


def sampled_by(model: Any) -> Callable[[list[int], dict[str, Any]], list[int]]:
    """Answers that a target samples token by token; they follow from the prompt and the request's seed alone."""

    def write(ids: list[int], body: dict[str, Any]) -> list[int]:
        generator, written = torch.Generator().manual_seed(body["seed"]), list[int]()
        while len(written) < body["max_tokens"] and written[-1:] not in [[i] for i in body["stop_token_ids"]]:
            with torch.no_grad():
                logits_V = model(torch.tensor([[*ids, *written]]), use_cache=False).logits[0, -1].double()
            if body["temperature"] == 0:
                written.append(int(logits_V.argmax()))
            else:
                p_V = (logits_V / body["temperature"]).softmax(0)
                written.append(int(torch.multinomial(p_V, 1, generator=generator)))
        return written

    return write


def main() -> None:
    serve(StandIn, Path(sys.argv[2]))


def serve(kind: Any, where: Any) -> None:
    """Serve as a process. where: the second argument of the stand-in."""
    target, _, layers, port, *faults = sys.argv[1:]
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    wanted = {int(number): fault for number, fault in json.loads(faults[0] if faults else "{}").items()}
    write = sampled_by(deepcopy(model))  # a copy: the hooks of `states_of` see every pass of theirs
    standin = kind(states_of(model, [int(i) for i in layers.split(",")]), where, wanted, write=write)
    with serving(standin, int(port)) as url:
        print("ready", url.rpartition(":")[2], flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
