"""Regeneration: what is asked, what is written, and that neither batch, process nor restart changes a text."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drafttrain.cli import main as cli
from drafttrain.core.errors import UserError
from drafttrain.core.files import HOST
from drafttrain.core.sampling import Sampling
from drafttrain.data import DataOptions, PrepareOptions
from drafttrain.data import journal as journal_module
from drafttrain.data.dataset import load_dataset
from drafttrain.data.generation_jobs import (
    TOO_LONG,
    Dialogue,
    GenerationJob,
    LocalGenerator,
    PromptScripts,
    documents_of,
    jobs_of,
    read_scripts,
)
from drafttrain.data.journal import Journal, check_settings, read, scan
from drafttrain.data.sources import Conversation
from drafttrain.decoding.scheduler import Decoder
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.load import LoadedTarget
from tests.composing import compose_quickly
from tests.helpers import read_conversations, tiny_model, tiny_target
from tests.tokenizers import tokenizer_of
from tests.unit.data.conftest import load_once

STOP = 7
NEW, LONGEST = 12, 90


class Numbers:
    """A tokenizer whose text is its token ids, so that equal texts are equal tokens."""

    chat_template = "numbers"

    def apply_chat_template(self, messages: list[dict[str, str]], **how: Any) -> str:
        said = (f"{m['content']} {STOP}" if m["role"] == "assistant" else m["content"] for m in messages)
        return " ".join([*how.get("before", ()), *said])

    def __call__(self, text: str, **how: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: Sequence[int], **how: Any) -> str:
        return " ".join(map(str, ids))


def conversation(*turns: str, origin: str = "x:1") -> Conversation:
    return Conversation(origin, tuple({"role": "user", "content": turn} for turn in turns))


def asks(count: int, turns: int = 2) -> PromptScripts:
    draw = random.Random(3)

    def turn() -> str:
        return " ".join(str(draw.randrange(64)) for _ in range(draw.randrange(1, 9)))

    return read_scripts(conversation(*(turn() for _ in range(turns))) for _ in range(count))


@cache
def target() -> HFTarget:
    """In double precision: products of other shapes round elsewhere, which must not turn a token into another."""
    return tiny_target(stop=frozenset({STOP})).double()


def engine(batch_size: int, longest: int = LONGEST, tokenizer: Any = None) -> LocalGenerator:
    def decoder(adapter: str | None, temperature: float) -> Decoder:
        sampling = Sampling(temperature, top_p=0.9, seed=5)
        return Decoder(target(), None, "coupled" if temperature else "greedy", sampling, target().stop_ids, NEW)

    return LocalGenerator(decoder, tokenizer or Numbers(), longest, batch_size)


def written(jobs: list[GenerationJob], batch_size: int, **how: Any) -> dict[str, dict[str, Any]]:
    done: list[Dialogue] = []
    counted = 0

    def tick(tokens: int) -> None:
        nonlocal counted
        counted += tokens

    engine(batch_size, **how).answer(jobs, done.append, tick)
    assert counted == sum(sum(dialogue.tokens) for dialogue in done)
    assert sorted(d.job.id for d in done) == sorted(job.id for job in jobs)
    return {dialogue.job.id: dialogue.record() for dialogue in done}


def generated(model: Any, prompt: list[int]) -> list[int]:
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=STOP, pad_token_id=STOP)
    with torch.inference_mode():
        text = model.generate(torch.tensor([prompt]), generation_config=settings)
    return text[0, len(prompt) :].tolist()


def test_local_generator_greedy_replies_equal_transformers_generate() -> None:
    """Every turn, asked with the regenerated replies before it."""
    model = tiny_model().double()
    found, stopped = written(list(jobs_of(asks(7).scripts, PrepareOptions())), 4), 0
    for record in found.values():
        context: list[dict[str, str]] = []
        for message in record["messages"]:
            if message["role"] == "assistant":
                prompt = Numbers()(Numbers().apply_chat_template(context))["input_ids"]
                expected = generated(model, prompt)
                ends = expected[-1] == STOP
                assert message["content"] == Numbers().decode(expected[:-1] if ends else expected)
                stopped += ends
            context.append(message)
        turns = len(record["finish"])
        assert len(record["messages"]) == 2 * turns
        assert record["finish"] == ["stop"] * (turns - 1) + [record["finish"][-1]]
        assert turns == 2 or record["finish"] == ["length"]  # nothing is asked behind half a reply
    assert stopped and any(record["finish"][-1] == "length" for record in found.values())


def test_local_generator_samples_are_independent_of_batch_size_and_order() -> None:
    options = PrepareOptions(samples=3, temperatures=[0.0, 0.7, 1.3])
    jobs = list(jobs_of(asks(4).scripts, options))
    alone = written(jobs, 1)
    assert alone == written(jobs[::-1], 4) == written(jobs, 32)
    shares = [written(jobs[rank::3], 2) for rank in range(3)]
    assert alone == shares[0] | shares[1] | shares[2]
    texts = [json.dumps(record["messages"]) for record in alone.values()]
    assert len(set(texts)) > 0.9 * len(texts)
    assert {record["temperature"] for record in alone.values()} == {0.0, 0.7, 1.3}
    others = written(list(jobs_of(asks(2).scripts, replace(options, seed=1))), 4)
    assert others != {job: alone.get(job) for job in others}


def test_local_generator_keeps_tokens_that_target_read_and_wrote() -> None:
    """Each prompt as it was given, and each reply as it was decoded. Without a template the prompt is plain text."""
    model = tiny_model().double()
    for record in written(list(jobs_of(asks(5).scripts, PrepareOptions())), 4).values():
        texts = documents_of(record["turns"])
        for number in range(len(record["finish"])):
            prompt = Numbers()(Numbers().apply_chat_template(record["messages"][: 2 * number + 1]))["input_ids"]
            reply = generated(model, prompt)
            assert any(prompt + reply == text["input_ids"][: len(prompt) + len(reply)] for text in texts)
        assert sum(sum(text["loss_mask"]) for text in texts) == sum(record["tokens"])


def test_local_generator_chat_template_kwargs_of_record_reach_the_template() -> None:
    talks = [replace(conversation("1 2", "3"), arguments=arguments) for arguments in ({}, {"before": ["9"]})]
    plain, other = read_scripts(talks).scripts
    found = written(list(jobs_of([plain, other], PrepareOptions())), 2)
    firsts = [documents_of(found[f"{script.id}-0"]["turns"])[0]["input_ids"][:3] for script in (plain, other)]
    assert firsts[0][:2] == [1, 2] and firsts[1] == [9, 1, 2]
    assert found[f"{other.id}-0"]["chat_template_kwargs"] == {"before": ["9"]}


def test_local_generator_reply_after_word_mark_keeps_its_space(subtests: pytest.Subtests) -> None:
    """The prompt is plain text, since there is no template."""
    pieces = ["\u2581", *(f"\u2581{c}" for c in "abcdefghijklmnopqrstuvwxyz"), *"abcdefghijklmnopqrstuvwxyz0123456789"]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    own, done = PreTrainedTokenizerFast(tokenizer_object=tokenizer), list[Dialogue]()
    prompts = read_scripts(conversation(text) for text in ("hello", "a boy", "it is", "so"))
    engine(4, tokenizer=own).answer(list(jobs_of(prompts.scripts, PrepareOptions())), done.append, lambda tokens: None)
    replies = [dialogue.messages[-1]["content"] for dialogue in done]
    assert any(reply.startswith(" ") for reply in replies)
    for dialogue, reply in zip(done, replies, strict=True):
        with subtests.test(reply=reply):
            (turn,) = dialogue.turns
            assert turn is not None and own(dialogue.messages[0]["content"])["input_ids"] == turn.prompt
            ids = [i for i in turn.reply if i != STOP]
            assert dialogue.messages[0]["content"] + reply == own.decode(turn.prompt + ids)


def test_jobs_of_temperatures_follow_weights_without_greedy_repeats() -> None:
    options = PrepareOptions(samples=1, temperatures=[0.0, 0.8], weights=[4, 1])
    many = asks(800, turns=1).scripts
    drawn = [job.temperature for job in jobs_of(many, options)]
    assert len(drawn) == len(many)
    assert 0.16 < drawn.count(0.8) / len(many) < 0.24
    assert len(list(jobs_of(asks(5).scripts, PrepareOptions(samples=4)))) == 5
    jobs = list(jobs_of(asks(50).scripts, PrepareOptions(samples=4, temperatures=[0.0, 0.8])))
    greedy = [job.script.id for job in jobs if job.temperature == 0]
    assert 25 < len(greedy) == len(set(greedy))
    assert len({job.seed for job in jobs}) == len(jobs) == len({job.id for job in jobs})


def test_local_generator_turn_without_room_ends_conversation_before_it() -> None:
    long = " ".join(["9"] * 70)
    short, none = read_scripts([conversation("1 2", long), conversation(long + " 1 1 1 1 1 1 1 1 1")]).scripts
    found = written(list(jobs_of([short, none], PrepareOptions())), 2, longest=60)
    first, second = found[f"{short.id}-0"], found[f"{none.id}-0"]
    assert [m["role"] for m in first["messages"]] == ["user", "assistant"]
    assert first.get("failed") == (TOO_LONG if first["finish"] == ["stop"] else None)
    assert second["failed"] == TOO_LONG and "messages" not in second


def test_read_scripts_drops_replies_and_duplicate_prompts() -> None:
    system = {"role": "system", "content": "be short"}
    user, reply = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "old"}
    found = read_scripts(
        [
            Conversation("a", (system, user, reply, user)),
            Conversation("b", (user, reply)),
            Conversation("c", ({"role": "user", "content": " hi\n"},)),
            Conversation("d", (user, reply, {"role": "critic", "content": "no"}, reply)),
            Conversation("e", text="plain"),
            Conversation("f", (system,)),
        ]
    )
    assert [script.messages for script in found.scripts] == [(system, user, user), (user,)]
    assert found.skipped == {"duplicate": 1, "of other roles": 1, "plain text": 1, "without a user turn": 1}
    with pytest.raises(UserError, match="no prompt to ask"):
        read_scripts([Conversation("e", text="plain")])


ASKED: list[tuple[dict[str, Any], list[str]]] = [
    ({"turns": ["a", "b"], "question_id": 1}, ["a", "b"]),
    ({"prompt": "a"}, ["a"]),
    ({"question": "a", "answer": "1"}, ["a"]),
    ({"prompt": "a", "response": "b"}, ["a"]),
    ({"messages": [{"role": "user", "content": "a"}]}, ["a"]),
    ({"conversations": [{"from": "human", "value": "a"}]}, ["a"]),
]


def test_read_scripts_reads_prompts_of_every_form(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for record, turns in ASKED:
        path = tmp_path / "prompts.jsonl"
        path.write_text(json.dumps(record) + "\n")
        with subtests.test(record=record):
            (script,) = read_scripts(read_conversations(DataOptions(path=str(path)), replies=False)).scripts
            assert [message["content"] for message in script.messages] == turns


Command = Callable[..., int]
COUNT = 5  # prompts
SHORT = ["prepare.max_new_tokens=10", "prepare.temperatures=[0,0.9]", "prepare.drop=[empty]", "prepare.batch_size=4"]


@pytest.fixture(scope="module")
def prepared(loaded: LoadedTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts, what `prepare` makes of them (`whole`), and its journal. Not to be changed."""
    folder = tmp_path_factory.mktemp("prepared")
    lines = [json.dumps({"turns": [f"Complete this code.\n\ndef f{i}("]}) + "\n" for i in range(COUNT)]
    (folder / "prompts.jsonl").write_text("".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["drafttrain"])
        compose_quickly(patch)
        load_once(patch, loaded)
        assert cli.run(["prepare", f"data.path={folder / 'prompts.jsonl'}", f"out={folder / 'whole'}", *SHORT]) == 0
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.usefixtures("loaded_once")
def test_prepare_resumed_from_torn_journal_writes_identical_files(
    command: Command, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, path = files(prepared / "whole"), f"data.path={prepared / 'prompts.jsonl'}"
    assert json.loads(whole["summary.json"])["kept"] == COUNT
    journal = (prepared / "whole.journal" / "rank-00000.jsonl").read_bytes()
    for left in (len(journal) // 2, len(journal) - 1):  # as kills leave it
        torn = tmp_path / "torn.journal" / "rank-00000.jsonl"
        torn.parent.mkdir(exist_ok=True)
        torn.write_bytes(journal[:left])
        (tmp_path / f"torn.tmp-{left}").mkdir()
        assert command("prepare", path, "out=torn", *SHORT) == 0
        assert files(tmp_path / "torn") == whole
        ids = [json.loads(line)["id"] for line in torn.read_text().splitlines()]
        assert len(ids) == len(set(ids)) == COUNT
        assert not list(tmp_path.glob("torn.tmp-*"))
    capsys.readouterr()
    # other rules, and another shape of files, need no text again; more samples need only those
    assert command("prepare", path, "out=torn", *SHORT[:2], "prepare.drop=[truncated]") == 2
    assert f"none of {COUNT} texts is kept ({COUNT} truncated)" in capsys.readouterr().err
    assert files(tmp_path / "torn") == whole
    more = ["prepare.format=parquet", "prepare.shard=3", "prepare.samples=2"]
    assert command("prepare", path, "out=torn", *SHORT, *more) == 0
    assert f"{COUNT} of them answered before" in capsys.readouterr().out
    assert len(list((tmp_path / "torn").glob("part-*.parquet"))) > 2
    again = read_conversations(DataOptions(path=str(tmp_path / "torn")))
    before = read_conversations(DataOptions(path=str(prepared / "whole")))
    assert {c.messages for c in map(frozen, before)} <= {c.messages for c in map(frozen, again)}


def base_model(folder: Path) -> PreTrainedTokenizerFast:
    """A model with a context of 64, and without a chat template."""
    own = tokenizer_of("llama")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64, "vocab_size": len(own)}
    torch.manual_seed(1)
    config = LlamaConfig(hidden_size=16, intermediate_size=32, eos_token_id=own.eos_token_id, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    own.save_pretrained(folder)
    return own


def test_prepare_of_base_model_continues_prompts_as_plain_text(
    command: Command, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a chat template, and with a limit of new tokens that fits into a short context."""
    own, path = base_model(tmp_path / "base"), tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a boy"}\n{"prompt": "hi"}\n')
    target = ("target=hf", f"target.path={tmp_path / 'base'}", f"data.path={path}", "prepare.drop=[]")
    assert command("prepare", *target, "out=out") == 0
    assert json.loads((tmp_path / "out" / "provenance.json").read_text())["sampling"]["max_new_tokens"] == 32
    data = load_dataset(DataOptions(path=str(tmp_path / "out"), held_out=0), own, progress=False)
    for prompt, row in zip(("a boy", "hi"), sorted(data.train, key=lambda row: -len(row.token_ids)), strict=True):
        ids = list(own(prompt)["input_ids"])
        assert row.token_ids[: len(ids)].tolist() == ids and row.supervised == len(row.token_ids) - len(ids) > 0
    capfd.readouterr()
    assert command("prepare", *target, "out=other", "prepare.max_new_tokens=64") == 2
    assert "prepare.max_new_tokens is 64, but a conversation has room for 64 tokens" in capfd.readouterr().err
    path.write_text('{"turns": ["a", "b"]}\n')
    assert command("prepare", *target, "out=other") == 2
    assert "prompts.jsonl:1: conversations need a chat template" in capfd.readouterr().err


def test_prepared_data_trains_on_tokens_of_the_journal(prepared: Path, loaded: LoadedTarget, tmp_path: Path) -> None:
    """From JSON lines, and as text where the template is another one."""
    records = [json.loads(line) for line in (prepared / "whole" / "part-00000.jsonl").read_text().splitlines()]
    texts = [text for record in records for text in record["documents"]]
    for record in records:
        record["messages"][-1]["content"] = "changed"
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))

    def rows(**options: Any) -> list[list[int]]:
        data = load_dataset(DataOptions(path=str(path), held_out=0, **options), loaded.tokenizer, progress=False)
        return sorted(row.token_ids.tolist() for row in data.train)

    assert rows() == sorted(text["input_ids"] for text in texts)
    assert all("changed" in loaded.tokenizer.decode(ids) for ids in rows(thinking="drop"))


@pytest.mark.usefixtures("loaded_once")
def test_prepare_template_without_calls_skips_conversations_with_them(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"role": "user", "content": "def f("}
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": {}}}]}
    records = [[asked], [asked, called, {"role": "tool", "content": "noon"}]]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in records))
    assert command("prepare", "data.path=prompts.jsonl", "out=out", *SHORT) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "prompts: 1 (skipped: 1 with tools), texts: 1" in shown
    assert "the chat template does not show how tool calls are written: conversations with them are skipped" in shown
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["skipped"] == {"with tools": 1}


@pytest.mark.usefixtures("loaded_once")
def test_prepare_damaged_journal_lines_are_named_and_answered_again(
    command: Command, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(prepared / "whole.journal", tmp_path / "x.journal")
    journal = tmp_path / "x.journal" / "rank-00000.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"tokens": [1', b'"tokens": [9')
    journal.write_bytes(b"".join(lines))
    assert command("prepare", f"data.path={prepared / 'prompts.jsonl'}", "out=x", *SHORT) == 0
    shown = capsys.readouterr().out
    assert f"{COUNT - 1} of them answered before" in shown
    assert "1 damaged lines are ignored and their texts written again: x.journal/rank-00000.jsonl:2" in shown
    assert files(tmp_path / "x") == files(prepared / "whole")


def frozen(conversation: Conversation) -> Conversation:
    return Conversation("", tuple(tuple(message.items()) for message in conversation.messages))  # type: ignore[misc]


def test_journal_cut_at_any_byte_is_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torn within a character, too, and with the zeros that a power failure leaves. At each byte of one line, and about the
    ends of all.
    """
    monkeypatch.setattr(journal_module.os, "fsync", lambda file: None)  # a slow disk takes long
    with Journal(tmp_path / "x", 0) as journal:
        for i in range(4):
            journal.append({"id": str(i), "messages": ["é\u2028漢字", i]})
    path = tmp_path / "x" / "rank-00000.jsonl"
    content, records = path.read_bytes(), [record for _, _, record in read(tmp_path / "x")]
    ends = [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]
    about = {place for end in (0, *ends) for place in (end - 1, end, end + 1) if 0 <= place <= len(content)}
    for left in sorted(about | set(range(ends[0], ends[1]))):
        for tail in (b"", b"\0" * 7, b"\0\n\0") if left in about or left % 10 == 0 else (b"",):
            path.write_bytes(content[:left] + tail)
            whole = content[:left].count(b"\n")
            assert scan(tmp_path / "x").answered == {str(i) for i in range(whole)}
            with Journal(tmp_path / "x", 0) as journal:
                for record in records[whole:]:
                    journal.append(record)
            assert path.read_bytes() == content


def test_journal_locked_by_ending_process_waits_for_lock(tmp_path: Path) -> None:
    """The system ends a killed process, and frees its files, a moment after the one that waits for it is gone."""
    killed = Journal(tmp_path / "x", 0)
    killed.append({"id": "0", "messages": []})
    ending = threading.Timer(0.2, killed.__exit__, (None, None, None))
    ending.start()
    with Journal(tmp_path / "x", 0) as journal:
        assert not ending.is_alive()
        journal.append({"id": "1", "messages": []})
    assert scan(tmp_path / "x").answered == {"0", "1"}


@pytest.mark.usefixtures("loaded_once")
def test_prepare_changed_setting_or_locked_journal_is_refused(
    command: Command, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "PATIENCE", 0.1)
    shutil.copytree(prepared / "whole.journal", tmp_path / "x.journal")
    path = f"data.path={prepared / 'prompts.jsonl'}"
    assert command("prepare", path, "out=x", *SHORT, "prepare.seed=1") == 2
    assert "begun with sampling.seed 0, now it is 1" in capsys.readouterr().err
    with Journal(Path("x.journal"), 0):
        assert command("prepare", path, "out=x", *SHORT) == 2
    assert "rank-00000.jsonl is being written by another process" in capsys.readouterr().err


MISTAKES: list[tuple[list[str], str]] = [
    ([], "out is not set"),
    (["out=."], "out is '.'; name a new directory"),
    (["out=taken"], "out=taken exists"),
    (["out=x", "prepare.drop=[lop]"], "prepare.drop has 'lop'; choose one of empty, truncated, loop, refusal"),
    (["out=x", "prepare.samples=0"], "prepare.samples is 0"),
    (["out=x", "prepare.temperatures=[-1]"], "prepare.temperatures has -1; set it to 0 or more"),
    (["out=x", "prepare.weights=[1,2]"], "prepare.weights is [1.0, 2.0]; give one for each"),
    (["out=x", "prepare.temperatures=[]"], "prepare.temperatures is empty"),
    (["out=x", "prepare.format=csv"], "prepare.format is 'csv'"),
    (["out=x", "prepare.max_new_tokens=5000"], "prepare.max_new_tokens is 5000"),
    (["out=x", "data.path=none.jsonl"], "none.jsonl"),
    (["out=x", "prepare.server=nowhere"], "prepare.server must be http://HOST:PORT/v1"),
    (["out=x", "prepare.server=http://me:secret@host/v1"], "a key goes into prepare.key_env"),
]


@pytest.mark.usefixtures("loaded_once")
def test_prepare_mistake_is_refused_in_one_line_and_writes_nothing(
    command: Command, prepared: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("keep")
    few = f"data.path={prepared / 'prompts.jsonl'}"
    capfd.readouterr()
    for arguments, line in MISTAKES:
        with subtests.test(arguments=arguments):
            code, err = command("prepare", few, *arguments), capfd.readouterr().err
            assert code == 2 and line in err and err.count("\n") == 1 and "secret" not in err
            assert [path.name for path in tmp_path.iterdir()] == ["taken"]
            assert (tmp_path / "taken" / "mine.txt").read_text() == "keep"


def test_journal_settings_removes_temporary_files_of_killed_process(tmp_path: Path) -> None:
    nobody = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1  # no process gets this number
    (tmp_path / f"settings.json.tmp-{HOST}-{nobody}").touch()
    check_settings(tmp_path, {"a": 1}, write=True)
    check_settings(tmp_path, {"a": 1}, write=True)
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]
