"""`push_to_hub`, against a hub of our own on this machine."""

from __future__ import annotations

import base64
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from drafttrain.core.errors import UserError
from drafttrain.core.files import LISTED
from drafttrain.export import hub
from drafttrain.export.hub import Repository, is_repository, push
from drafttrain.model.lora import LoraSpec
from drafttrain.runs import checkpoint_source
from tests.exports import checkpoint, embedded, opened, written

TOKEN = "hf_" + "s" * 34
Command = Callable[..., int]


@dataclass
class Hub:
    """What arrived. refuses: the path at which it answers 403, repeating the token."""

    address: str = ""
    asked: list[str] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    tokens: set[str | None] = field(default_factory=set)
    refuses: str = "nowhere"


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            there = "create" not in hub.refuses
            self.answer({"id": "me/mine", "sha": "0" * 40, "siblings": []} if there else {}, 200 if there else 404)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.asked.append(self.path)
            hub.tokens.add(self.headers.get("Authorization"))
            if hub.refuses in self.path:
                self.answer({"error": f"{TOKEN} may not"}, 403)
            elif self.path.endswith("/repos/create"):
                hub.created.append(json.loads(body))
                self.answer({"url": f"{hub.address}/me/mine"})
            elif "/preupload/" in self.path:
                listed = [
                    {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in json.loads(body)["files"]
                ]
                self.answer({"files": listed})
            elif "/commit/" in self.path:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                self.answer({"commitUrl": f"{hub.address}/me/mine/commit/1", "commitOid": "1", "success": True})
            else:
                self.answer({"errors": [], "warnings": []})

        def answer(self, content: dict[str, Any], code: int = 200) -> None:
            body = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    found = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(found))
    found.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()  # how soon it hears of its end
    monkeypatch.setattr(constants, "ENDPOINT", found.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield found
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("run") / "checkpoints", "medusa", embedded())


@pytest.fixture(autouse=True)
def _loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_source, "load_target", lambda *_: embedded())


def export(command: Command, run: Path, *more: str) -> int:
    return command("export", f"checkpoint={run}", "format=vllm", "out=out", "push_to_hub=me/mine", *more)


def kept(out: Path = Path("out")) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def is_private(created: dict[str, Any]) -> bool:
    """By either of two fields, as versions of huggingface_hub send them."""
    said = created.get("private"), created.get("visibility")
    assert said in [(True, None), (None, "private"), (False, None), (None, "public")]
    return said in [(True, None), (None, "private")]


def test_push_to_hub_uploads_all_exported_files(
    served: Hub, command: Command, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(command, run, "push_private=false") == 0
    said = capsys.readouterr()
    assert f"uploaded: {served.address}/me/mine/commit/1" in said.out and TOKEN not in said.out + said.err
    assert served.created[0]["name"] == "mine" and served.created[0]["organization"] == "me"
    assert not is_private(served.created[0])
    assert served.files == kept() and served.tokens == {f"Bearer {TOKEN}"}
    assert not any(TOKEN.encode() in content for content in served.files.values())
    card = served.files["README.md"].decode()
    assert '"model": "me/mine"' in card and "base_model" not in card and str(Path.cwd()) not in card


def test_push_to_hub_failed_upload_keeps_local_export(
    served: Hub, command: Command, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.refuses = "/commit/"
    assert export(command, run) == 2
    error = capsys.readouterr().err
    assert "out is complete and stays, but its upload to me/mine failed (" in error
    assert error.rstrip().endswith("repeat it: hf upload me/mine out . --private")
    last = error.rstrip().splitlines()[-1]
    assert last.startswith("drafttrain: ") and TOKEN not in error
    assert sorted(kept()) == ["README.md", "config.json", LISTED, "drafttrain.json", "model.safetensors"] and not served.files
    assert is_private(served.created[0])


def test_push_refused_at_any_step_or_without_hub_says_how_to_repeat_it(
    served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    out, repository = tmp_path / "out", Repository("me/mine", private=True)
    written(*opened(tmp_path / "run", "medusa"), "vllm", out, repository=repository)
    before = kept(out)
    says = re.escape(f"{out} is complete and stays, but its upload to me/mine failed (")
    with socket.socket() as closed:  # nobody else can listen there
        closed.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
        for step, address in (("/repos/create", None), ("/preupload/", None), ("/commit/", None), ("nowhere", nowhere)):
            served.refuses = step
            monkeypatch.setattr(constants, "ENDPOINT", address or served.address)
            with subtests.test(step=step):
                with pytest.raises(UserError, match=says) as caught:
                    push(out, repository, "x")
                assert str(caught.value).endswith(f"repeat it: hf upload me/mine {out} . --private")
                assert TOKEN not in str(caught.value) and "\n" not in str(caught.value)
                assert kept(out) == before and not served.files


MISTAKES = [
    (["push_to_hub=mine", "format=vllm"], "push_to_hub is 'mine'; name a repository as OWNER/NAME"),
    (["push_to_hub=me/mi ne", "format=vllm"], "push_to_hub is 'me/mi ne'; name a repository as OWNER/NAME"),
    (["push_to_hub=me/mine/more", "format=vllm"], "push_to_hub is 'me/mine/more'; name a repository as OWNER/NAME"),
    (["push_to_hub=me/mine", "format=all"], "push_to_hub is given with format=all"),
]


def test_push_to_hub_mistake_is_refused_before_export(
    served: Hub, command: Command, run: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for arguments, says in MISTAKES:
        with subtests.test(says=says):
            assert command("export", f"checkpoint={run}", "out=out", *arguments) == 2
            error = capsys.readouterr().err
            assert says in error and error.count("\n") == 1
            assert not Path("out").exists() and not served.asked


def test_push_to_hub_without_login_is_refused_before_export(
    command: Command, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "get_token", lambda: None)
    assert export(command, run) == 2
    assert "push_to_hub needs a login to the hub; run hf auth login, or set HF_TOKEN" in capsys.readouterr().err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert export(command, run) == 2
    assert "HF_HUB_OFFLINE forbids it" in capsys.readouterr().err and not Path("out").exists()


def test_model_card_of_hub_repository_gives_download_command(served: Hub, tmp_path: Path) -> None:
    found, golden = opened(tmp_path / "one", "eagle3")
    written(found, golden, "llamacpp", tmp_path / "out", repository=Repository("me/mine", True))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Download them first: `hf download me/mine --local-dir mine`." in card and "-md mine/draft.gguf" in card
    assert "base_model: targets/tiny" in card
    found, golden = opened(tmp_path / "two", "medusa", spec=LoraSpec(rank=2))
    written(found, golden, "vllm", tmp_path / "adapted", repository=Repository("me/mine", True))
    card = (tmp_path / "adapted" / "README.md").read_text()
    assert "vllm serve mine/target " in card and '"model": "mine"' in card and str(tmp_path) not in card


def test_is_repository_distinguishes_hub_ids_from_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_repository("meta-llama/Llama-3.1-8B") and is_repository("gpt2")
    Path("models").mkdir()
    assert not any(map(is_repository, ("models", "/data/llama", "../llama", "a/b/c")))
    with pytest.raises(UserError, match="OWNER/NAME"):
        Repository("gpt2", True).check()
