"""Bad input to `fit` and `measure`: one line, exit code 2, and nothing half-written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from drafttrain.cli.config import compose_run
from drafttrain.commands import fit
from drafttrain.core.errors import UserError
from drafttrain.measure.runner import check_measurement
from drafttrain.runs import training_job
from drafttrain.targets.load import LoadedTarget
from tests.contract.test_families import build
from tests.helpers import tiny_model
from tests.integration.test_features import loaded

__all__ = ["loaded"]
Command = Callable[..., int]
QUIET = (
    "logger=none",
    "measure.enabled=false",
    "data.held_out=2",
    "train.global_batch=2",
    "train.micro_batch=2",
    "train.steps=2",
)


def refused(command: Command, capsys: pytest.CaptureFixture[str], words: str, *arguments: str) -> None:
    """One line on stderr with these words, exit code 2, and no file left in the output folder."""
    assert command(*arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and words in lines[0], lines
    assert not [p for p in Path("outputs").rglob("*") if p.is_file()]


def arguments(material: Path, *more: str) -> tuple[str, ...]:
    paths = (f"target.path={material / 'target'}", f"data.path={material / 'data.jsonl'}")
    return ("fit", "recipe=medusa", "target=hf", *paths, *QUIET, *more)


def test_fit_int8_target_notes_that_only_memory_is_saved(
    command: Command, material: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*arguments(material, "target.weights=int8")) == 0
    assert "target.weights=int8 saves memory, not time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (("decode.policy=foo", "measure.enabled=false"), "decode.policy is 'foo'; choose one of greedy"),
        (("decode.max_new_tokens=4000",), "prompts fits"),
        (("decode.max_new_tokens=16", "measure.contexts=[8]", "measure.documents=/nowhere"), "/nowhere"),
    ],
)
def test_fit_invalid_measurement_options_are_refused_before_training(
    override: tuple[str, ...], words: str, command: Command, material: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(command, capsys, words, *(a for a in arguments(material) if not a.startswith("measure.")), *override)


@pytest.mark.usefixtures("command")  # composes quickly
def test_check_measurement_refuses_settings_that_cannot_be_measured(loaded: LoadedTarget, subtests: pytest.Subtests) -> None:
    drafter = build("medusa", loaded.target)
    for override, words in (
        (["decode.policy=greedy", "decode.temperature=0.5"], "set decode.policy=lossless"),
        (["decode.max_new_tokens=1"], "decode.max_new_tokens is 1; set it to 2 or more"),
        (["measure.batch_sizes=[]"], "measure.batch_sizes is empty; give one or more sizes"),
    ):
        options = compose_run("medusa", override).options
        with subtests.test(override=override), pytest.raises(UserError, match=words):
            check_measurement(loaded, drafter, options.decode, options.measure)


def test_fit_disk_too_small_for_checkpoint_is_refused(
    command: Command, material: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    refused(command, capsys, "0.0 MB free, but a checkpoint of this drafter and its optimiser needs", *arguments(material))


def test_fit_conversations_without_chat_template_are_refused(
    command: Command, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(record) + "\n")
    refused(command, capsys, "chat template", *arguments(material, f"data.path={tmp_path / 'chat.jsonl'}"))


def test_fit_empty_or_malformed_data_is_refused(
    command: Command, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "abc"}\n{"text": \n')
    refused(command, capsys, "bad.jsonl:2", *arguments(material, f"data.path={tmp_path / 'bad.jsonl'}"))


def test_fit_more_heads_than_context_allows_is_refused(
    command: Command, material: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(command, capsys, "a context of 512 allows 510", *arguments(material, "drafter.heads=511"))


def test_fit_target_without_weight_files_is_refused(
    command: Command, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model().config.save_pretrained(tmp_path / "bare")
    refused(command, capsys, "no *.safetensors weights", *arguments(material, f"target.path={tmp_path / 'bare'}"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.precision=float8", "train.precision is 'float8'; choose one of float32, bfloat16, auto"),
        ("deepspeed.zero_stage=4", "deepspeed.zero_stage is 4; choose one of 0, 1, 2, 3"),
        ("resume=nowhere", "which is not a run directory"),
    ],
)
def test_fit_settings_out_of_range_are_refused_in_one_line(
    override: str, words: str, command: Command, material: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(command, capsys, words, *arguments(material, override))


def trained(command: Command, material: Path, *more: str) -> Path:
    assert command(*arguments(material, *more)) == 0
    return sorted(Path("outputs").glob("*/*/checkpoints/step-*"))[-1]


def test_fit_data_mix_option_reports_sources_and_refuses_unknown_key(
    command: Command, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.jsonl").write_text("".join(json.dumps({"text": "abc" * n}) + "\n" for n in range(4, 9)))
    sources = f"{{path:{material / 'data.jsonl'},weight:1}},{{path:{tmp_path / 'more'},weight:3,form:text}}"
    assert (
        command("fit", "recipe=medusa", "target=hf", f"target.path={material / 'target'}", *QUIET, f"data.mix=[{sources}]") == 0
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "data: 45 conversations" in said and "(2 sources)" in said
    assert f"{tmp_path / 'more'}: 5 records, text, 75.0% of an epoch" in said
    wrong = sources.replace("form:text", "from:text")
    says = "unknown key 'from' in data.mix; did you mean form?"
    assert command("fit", "recipe=medusa", f"data.mix=[{wrong}]") == 2
    assert says in capsys.readouterr().err


def test_fit_says_which_stacks_load_the_drafter_before_training(
    command: Command, material: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe's drafter is for all, one that reads the last block is not."""
    eagle3 = [word.replace("recipe=medusa", "recipe=eagle3") for word in arguments(material)]
    last = (*eagle3, "drafter.target_layer_ids=[0,1,3]", "export.stacks=[vllm,sglang]")
    refused(command, capsys, "export.stacks names sglang, which cannot load this drafter", *last)
    refused(command, capsys, "export.stacks names 'vlm'; choose of vllm, sglang", *eagle3, "export.stacks=[vlm]")
    assert command(*eagle3, "export.stacks=[vllm,openvino]", "train.lr=0") == 0
    said = capsys.readouterr().out
    assert (
        "vllm, sglang, trtllm, speculators, openvino load this drafter" in said and "note: train.lr is 0: the drafter" in said
    )


def test_fit_template_that_cannot_be_used_is_refused_before_the_target_is_loaded(
    command: Command, material: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fit, "place", lambda *asked: pytest.fail("the target is looked at"))
        refused(command, capsys, "data.template=nowhere: expected a Jinja file", *arguments(material, "data.template=nowhere"))
    bare = material / "without template"
    shutil.copytree(material / "target", bare)
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    (bare / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if k != "chat_template"}))
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    words = "has no chat template, and no data is named; set data.path=FILE, and data.template=FILE where"
    monkeypatch.setattr(training_job, "load_for_training", lambda *asked: pytest.fail("the target is loaded"))
    refused(command, capsys, words, "fit", "recipe=medusa", f"target={bare}", *QUIET)
    (bare / "last.jinja").write_text("{{ messages[-1].content }}")
    messages = [{"role": role, "content": role} for role in ("user", "assistant")]
    (bare / "chat.jsonl").write_text(json.dumps({"messages": messages}))
    chat = arguments(material, f"data.path={bare / 'chat.jsonl'}", f"data.template={bare / 'last.jinja'}")
    refused(command, capsys, "chat.jsonl:1: the chat template cannot be masked reliably", *chat)
    for file in bare.glob("*token*"):
        file.unlink()
    refused(command, capsys, "has no tokenizer that transformers can load", *arguments(material, f"target.path={bare}"))
