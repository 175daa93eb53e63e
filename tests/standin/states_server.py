"""A stand-in for `vllm serve` with hidden states: the protocol of vLLM 0.32, transformers' forward, and faults on demand.

`python -m tests.standin.states_server TARGET FOLDER LAYERS PORT [FAULTS]` serves as a process: LAYERS as `2,3,4`. As vLLM does,
it takes an exclusive lock on `<file>.lock` before it answers, and writes the file after its answer.

FAULTS is a JSON object: the number of a request (from 0, over all requests for states) to one of

    status      answers with 500
    drop        closes the connection without an answer
    half        half of the file, then the lock is released, as of a server that is killed while it writes
    missing     answers and writes no file
    late        never releases the lock
    nan         one value is not a number
    ids         the states of other token ids
    another     names the file of another request
    die         the process ends at once

Shapes: T tokens, L layer ids, H hidden.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

STANDIN_HOST = "STANDIN_HOST"  # environment variable: the address at which it serves, 127.0.0.1 unless it is set


class StandIn:
    """A server. compute: token ids [T] to the states [T, L, H]."""

    def __init__(self, compute: Any, folder: Path, faults: dict[int, str] | None = None, longest: int = 2**20) -> None:
        self.compute, self.folder, self.faults, self.longest = compute, folder, faults or {}, longest
        self.requests: list[dict[str, Any]] = []
        self.most_at_once = self._at_once = 0
        self.writing = threading.Lock()
        self._held: list[int] = []  # locks that are never released

    def complete(self, handler: Handler, body: dict[str, Any]) -> None:
        """Answer a request for states, then write its file."""
        with self.writing:
            number = len(self.requests)
            self.requests.append(body)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            self._complete(handler, body, self.faults.get(number, ""))
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
        return self.give(handler, body["prompt"], f"cmpl-{body['request_id']}-0-{os.urandom(4).hex()}", fault)

    def give(self, handler: Handler, ids: list[int], name: str, fault: str) -> None:
        """Answer, and write the file."""
        file = self.folder / f"{name}.safetensors"
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(f"{file}.lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX)
        given = file.with_name(f"cmpl-other-{file.name[-12:]}") if fault == "another" else file
        handler.completion(name, len(ids), {"hidden_states_path": str(given)})
        if fault == "late":
            self._held.append(lock)
            return None
        with torch.no_grad():
            hidden_TLH = self.compute(ids)
        if fault == "nan":
            hidden_TLH[-1, 0, 0] = torch.nan
        token_T = torch.tensor([i + 1 for i in ids] if fault == "ids" else ids)
        content = save({"hidden_states": hidden_TLH.contiguous(), "token_ids": token_T})
        if fault != "missing":
            file.write_bytes(content[: len(content) // 2] if fault == "half" else content)
        os.close(lock)
        return None


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    standin: StandIn

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

    def completion(self, name: str, tokens: int, params: dict[str, Any]) -> None:
        """The answer to a request for states."""
        answer = {"id": name, "object": "text_completion", "choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
        usage = {"prompt_tokens": tokens, "completion_tokens": 1}
        self.answer(200, answer | {"usage": usage, "kv_transfer_params": params})
        self.wfile.flush()

    def log_message(self, *args: Any) -> None:
        pass


class _Listening(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no news."""


@contextmanager
def serving(standin: StandIn, port: int = 0) -> Any:
    """Serve in threads of this process; yields the URL."""
    handler = type("Own", (Handler,), {"standin": standin})
    host = os.environ.get(STANDIN_HOST, "127.0.0.1")
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


def main() -> None:
    serve(StandIn, Path(sys.argv[2]))


def serve(kind: Any, where: Any) -> None:
    """Serve as a process. where: the second argument of the stand-in."""
    target, _, layers, port, *faults = sys.argv[1:]
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    wanted = {int(number): fault for number, fault in json.loads(faults[0] if faults else "{}").items()}
    standin = kind(states_of(model, [int(i) for i in layers.split(",")]), where, wanted)
    with serving(standin, int(port)):
        print("ready", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
