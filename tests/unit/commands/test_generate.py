"""`drafttrain generate`: what it writes is what the decoder decodes, in pieces that are whole characters."""

from __future__ import annotations

import dataclasses
import io
import sys
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from drafttrain.commands import generate
from drafttrain.commands.generate import DRAFTED, ReplyWriter, Stream
from drafttrain.data.prompts import encode_prompt
from drafttrain.decoding.request import Chunk, Result
from drafttrain.drafters import families
from drafttrain.drafters.checkpoint import CheckpointMeta, TargetRecord, save_drafter
from drafttrain.measure import DecodeOptions
from drafttrain.measure.decoding import decoder_of
from drafttrain.runs import checkpoint_source
from drafttrain.runs.options import LauncherOptions
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import LoadedTarget
from tests.exports import embedded, loaded_before


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return embedded()


@pytest.fixture(scope="module")
def checkpoint(loaded: LoadedTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained drafter of the embedded target."""
    folder, shape = tmp_path_factory.mktemp("checkpoint") / "step-00001", loaded.target.shape
    folder.mkdir()
    family = families()["draft_model"]
    drafter = family.build(family.options(), loaded.target)
    fingerprint = loaded.target.fingerprint
    record = TargetRecord("embedded", None, None, "float32", shape.vocab_size, shape.hidden_size, shape.blocks, fingerprint)
    save_drafter(folder, drafter.state_dict(), CheckpointMeta("draft_model", {"family": "draft_model"}, {}, record, 1))
    return folder


def wanted(loaded: LoadedTarget, tokens: list[int], **decode: Any) -> str:
    decoded = decoder_of(loaded, DecodeOptions(**decode), None).run([tokens])
    return str(loaded.tokenizer.decode(decoded.results[0].tokens, skip_special_tokens=True))


def difference(loaded: LoadedTarget, said: list[int], expected: str, found: str) -> str:
    """Where another text begins, and by how much the target preferred its own: a near tie is a matter of rounding."""
    same = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(expected, found, strict=False)))
    ids = [*said, *loaded.tokenizer(same, add_special_tokens=False)["input_ids"]]
    with torch.no_grad():
        best = loaded.target.model(torch.tensor([ids])).logits[0, -1].topk(2)
    return f"another text after {same!r}: the likeliest tokens are {best.indices.tolist()} of {best.values.tolist()}"


@pytest.fixture
def loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (generate, checkpoint_source):
        monkeypatch.setattr(module, "load_target", loaded_before)


@pytest.mark.usefixtures("loaded_once")
def test_generate_with_drafter_prints_plain_decoding_output(
    command: Any, loaded: LoadedTarget, checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = "f(path='x') = ~1, $HOME ${a} {b: [1]}"
    ids = encode_prompt(loaded.tokenizer, [said])
    expected = wanted(loaded, ids, max_new_tokens=16)
    assert command("generate", f"checkpoint={checkpoint}", f"prompt={said}", "decode.max_new_tokens=16") == 0
    out, err = capfd.readouterr()
    assert out == expected + "\n", difference(loaded, ids, expected, out)
    assert "16 tokens" in err and "tau" in err and "tokens/s" in err
    assert command("generate", f"prompt={said}", "decode.max_new_tokens=16") == 0
    out, err = capfd.readouterr()
    assert out == expected + "\n", difference(loaded, ids, expected, out)
    assert "no checkpoint: plain decoding" in err and "tau" not in err


@pytest.mark.usefixtures("loaded_once")
def test_generate_stdin_without_chat_is_continued_verbatim(
    command: Any, loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "import os\n\ndef main("
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert command("generate", "chat=false", "decode.max_new_tokens=20", "decode.stop=[return]") == 0
    ids = list(loaded.tokenizer(text)["input_ids"])
    assert capfd.readouterr().out == wanted(loaded, ids, max_new_tokens=20, stop=["return"]) + "\n"


MISTAKES = [
    (["prompt=  "], "the prompt is empty; give prompt=TEXT"),
    (["prompt=hi", "decode.max_new_tokens=5000"], "exceed the target's 2048"),
    (["prompt=hi", "decode.policy=nucleus"], "decode.policy is 'nucleus'; choose one of"),
    (["prompt=hi", "decode.stop=['']"], "none of them empty"),
    (["prompt=hi", "decode.min_new_tokens=500"], "decode.min_new_tokens is 500"),
    (["prompt=hi", "decode.window=0"], "decode.window is 0"),
    (["prompt=hi", "checkpoint=nowhere"], "nowhere"),
]


@pytest.mark.usefixtures("loaded_once")
def test_generate_mistake_exits_with_code_2_and_message(
    command: Any, capfd: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for arguments, line in MISTAKES:
        with subtests.test(arguments=arguments):
            check_mistake(command, arguments, line, capfd)


@pytest.mark.slow
def test_generate_in_two_processes_is_refused_in_one_line(command: Any, capfd: pytest.CaptureFixture[str]) -> None:
    check_mistake(command, ["prompt=hi", "launcher.nproc=2"], "generate runs in one process", capfd)


def check_mistake(command: Any, arguments: list[str], line: str, capfd: pytest.CaptureFixture[str]) -> None:
    code = command("generate", *arguments)
    out, err = capfd.readouterr()
    assert (code, out) == (2, "") and line in err and err.strip().splitlines()[-1].startswith("drafttrain: ")


def test_generate_stream_colours_drafted_tokens_and_keeps_characters_whole(loaded: LoadedTarget) -> None:
    text = "naïve 漢字 ✓ done"
    ids = list(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])
    stream, result = Stream(loaded), Result(0, 1)
    pieces = [stream.styled(Chunk(result, [token], i % 2)) for i, token in enumerate(ids)]
    assert "".join(p.plain for p in pieces) == text == stream.text
    assert not any("\ufffd" in p.plain for p in pieces)
    styles = {bool(p.plain) and p.spans[0].style if p.spans else "" for p in pieces[1::2] if p.plain}
    assert styles == {DRAFTED}
    assert all(not p.spans for p in pieces[::2])


def test_generate_stream_long_text_keeps_leading_spaces() -> None:
    def decode(ids: list[int], **how: Any) -> str:
        return "".join(words[i] for i in ids).removeprefix(" ")

    words = ["\n", " indented", " and", " more"]
    tokens = [1, 2, 3, 0] * 40
    loaded = SimpleNamespace(tokenizer=SimpleNamespace(decode=decode), target=SimpleNamespace(stop_ids=frozenset()))
    stream = Stream(loaded)  # type: ignore[arg-type]
    text = "".join(stream.styled(Chunk(Result(0, 1), [token], 0)).plain for token in tokens)
    assert text == stream.text == decode(tokens)
    assert len(stream._tokens) < 72  # it was begun anew


def test_generate_chat_prompt_includes_earlier_turns(loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    writer = ReplyWriter(loaded, decoder_of(loaded, DecodeOptions(max_new_tokens=12), None), console, chat=True)
    said = iter(["what is json?", "  ", "and csv?"])
    monkeypatch.setattr(generate, "read_line", lambda console: next(said, None))
    monkeypatch.setattr(generate, "ReplyWriter", lambda *a, **k: writer)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    options = SimpleNamespace(
        launcher=LauncherOptions(),
        checkpoint=None,
        target=TargetOptions(),
        decode=DecodeOptions(),
        prompt=None,
        chat=True,
    )
    generate.generate(options, {})  # type: ignore[arg-type]
    first = wanted(loaded, encode_prompt(loaded.tokenizer, ["what is json?"]), max_new_tokens=12)
    second = wanted(loaded, encode_prompt(loaded.tokenizer, ["what is json?", "and csv?"], [first]), max_new_tokens=12)
    assert writer.replies == [first, second]
    assert all(line in console.file.getvalue() for line in (first.splitlines()[-1], "12 tokens"))  # type: ignore[attr-defined]


def test_generate_chat_beyond_context_leaves_out_oldest_turns(loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ReplyWriter(
        loaded, decoder_of(loaded, DecodeOptions(max_new_tokens=4), None), Console(file=io.StringIO()), chat=True
    )
    writer.status = Console(file=io.StringIO(), width=200)
    writer.turns, writer.replies = ["what is json?", "and csv?"], ["a form of text", "another"]
    room = len(encode_prompt(loaded.tokenizer, ["and csv?", "and xml?"], ["another"])) + 4
    shape = dataclasses.replace(loaded.target.shape, max_positions=room)
    monkeypatch.setattr(loaded.target, "shape", shape)
    writer.answer("and xml?")
    assert writer.turns == ["and csv?", "and xml?"] and len(writer.replies) == 2
    assert "the oldest 1 of 3 turns were left out" in writer.status.file.getvalue()  # type: ignore[attr-defined]
