"""The process of a server of states: how it starts, comes back and ends. A small HTTP server is in place of vLLM."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from http.client import RemoteDisconnected
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from drafttrain.core.errors import UserError
from drafttrain.engines import states_server as module
from drafttrain.engines.states_server import StatesServer, free_ports, running

HEALTHY = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            os._exit(3)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def python(folder: Path, code: str) -> Path:
    """A "Python" that runs this code, whatever script it is given."""
    (folder / "code.py").write_text(code)
    wrapper = folder / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} -S {folder / "code.py"} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


def server(folder: Path, code: str, said: list[str]) -> StatesServer:
    """A server that is not started yet."""
    return StatesServer(python(folder, code), ["serve", "x"], os.environ, folder / "log", said.append, *free_ports(1))


def die(server: StatesServer) -> None:
    with suppress(URLError, OSError, RemoteDisconnected):
        urlopen(f"{server.url}/die", timeout=5)


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not happened() and time.monotonic() < end:
        time.sleep(0.02)
    assert happened()


def healthy(url: str) -> bool:
    with suppress(URLError, OSError), urlopen(f"{url}/health", timeout=5) as answer:
        return answer.status == 200
    return False


def test_states_server_that_exits_is_restarted_and_ends_with_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK", 0.02)
    said: list[str] = []
    one = server(tmp_path, HEALTHY, said)
    with running([one]):
        assert healthy(one.url)
        die(one)
        until(lambda: bool(said) and healthy(one.url))
        assert said[0].startswith("features: vLLM ended with 3")
    assert not healthy(one.url)


def test_states_server_that_exits_too_often_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK", 0.02)
    monkeypatch.setattr(module, "STARTS", 1)
    said: list[str] = []
    one = server(tmp_path, HEALTHY, said)
    with running([one]):
        die(one)
        until(lambda: bool(said) and healthy(one.url))
        die(one)
        until(lambda: one.lost is not None)
    assert one.lost is not None and one.lost.startswith("vLLM ended with 3") and said[1] == f"features: {one.lost}"


def test_states_server_that_fails_to_start_reports_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK", 0.02)
    broken = server(tmp_path, "raise ValueError('no room for the cache')", [])
    fault = r"vLLM ended with 1 as it started: ValueError: no room for the cache"
    with pytest.raises(UserError, match=fault), running([broken]):
        pass


def test_states_server_health_check_bypasses_http_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters name one for downloads; it does not reach this machine's own servers."""
    monkeypatch.setattr(module, "LOOK", 0.02)
    monkeypatch.setattr(module, "START", 30.0)
    one = server(tmp_path, HEALTHY, [])
    with monkeypatch.context() as environment:
        environment.setenv("http_proxy", f"http://127.0.0.1:{free_ports(1)[0]}")
        environment.delenv("no_proxy", raising=False)
        environment.delenv("NO_PROXY", raising=False)
        environment.setattr("urllib.request._opener", None)  # `urlopen` keeps the proxies of its first call
        with running([one]):
            pass
