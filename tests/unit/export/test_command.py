"""`drafttrain export` as it is typed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafttrain.export import exporter
from drafttrain.export.files import Files
from drafttrain.export.golden import GOLDEN, made, sequences_for, store
from drafttrain.export.opened import Opened
from drafttrain.export.serve import STACKS
from drafttrain.runs import checkpoint_source
from tests.exports import checkpoint, embedded

Command = Callable[..., int]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the embedded target."""
    return checkpoint(tmp_path_factory.mktemp("run") / "checkpoints", "medusa", embedded())


def test_export_command_writes_one_stack_and_respects_overwrite(
    command: Command, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("export", f"checkpoint={run}", "format=vllm", "out=a=b c", "dtype=bfloat16") == 0
    said = capsys.readouterr().out
    assert "golden drafts: the checkpoint has none; they are made now from the target" in said
    assert "vllm: a=b c (checked: its 18 drafts are the checkpoint's; bfloat16 changes" in said
    assert sorted(p.name for p in Path("a=b c").iterdir()) == [
        "README.md",
        "config.json",
        "drafttrain-checksums.json",
        "drafttrain.json",
        "model.safetensors",
    ]
    assert command("export", f"checkpoint={run}", "format=vllm", "out=a=b c") == 2
    assert "which exists; name another directory, or add overwrite=true" in capsys.readouterr().err
    assert command("export", f"checkpoint={run}", "format=tgi", "out=a=b c", "overwrite=true") == 0
    assert Path("a=b c/medusa_lm_head.safetensors").is_file() and not Path("a=b c/model.safetensors").exists()


def test_export_command_all_stacks_uses_stored_golden_drafts(
    command: Command, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = embedded()
    monkeypatch.setattr(checkpoint_source, "load_target", lambda *_: target)
    store(run, made(Opened.of(run, target), sequences_for(target)))
    try:
        assert command("export", f"checkpoint={run}", "format=all", "out=out") == 0
    finally:
        (run / GOLDEN).unlink()
    said = capsys.readouterr().out
    assert "golden drafts: the checkpoint has none" not in said
    sglang = "sglang: not exported, it has no loader for this family"
    for line in ("vllm: out/vllm (checked: its 18", sglang, "how to serve it: out/vllm/README.md"):
        assert line in said
    record = json.loads(Path("out/drafttrain.json").read_text())
    assert record["written"] == ["vllm", "tgi"] and len(record["refused"]) == len(STACKS) - 2


def test_export_command_parity_failure_exits_with_code_3(
    command: Command, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = exporter.write

    def wrong(directory: Path, files: Files, *rest: Any) -> None:
        files.tensors["lm_heads.1.weight"] = files.tensors["lm_heads.0.weight"]
        right(directory, files, *rest)

    monkeypatch.setattr(exporter, "write", wrong)
    monkeypatch.setattr(checkpoint_source, "load_target", lambda *_: embedded())
    assert command("export", f"checkpoint={run}", "format=vllm", "out=out") == 3
    error = capsys.readouterr().err
    assert error.startswith("drafttrain: Parity: logits: draft 2 at point ") and error.count("\n") == 1
    assert not list(Path().iterdir())


def test_export_command_scales_positions_of_trained_drafter(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its golden drafts, which are those of the positions that it was trained with, are not the export's."""
    target, yarn = embedded(), {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
    monkeypatch.setattr(checkpoint_source, "load_target", lambda *_: target)
    trained = checkpoint(tmp_path, "eagle3", target, target_layer_ids=[0, 1])
    store(trained, made(Opened.of(trained, target), sequences_for(target)))
    asked = "export.rope_scaling={rope_type:yarn,factor:8.0,original_max_position_embeddings:32}"
    assert command("export", f"checkpoint={trained}", "format=vllm", "out=out", asked) == 0
    assert "its positions are scaled from here on; they are made now" in capsys.readouterr().out
    assert json.loads(Path("out/config.json").read_text())["rope_scaling"] == yarn
    assert command("export", "checkpoint=out", "format=vllm", "out=again", asked) == 2
    assert "export.rope_scaling is set, but" in capsys.readouterr().err


MISTAKES = [
    (["format=vllm", "out=x"], "checkpoint is not set; name a run"),
    (["checkpoint={run}", "format=vllm"], "out is not set; name a directory with out=DIR"),
    (["checkpoint={run}", "out=x"], "format is not set; name a serving stack, as format=vllm"),
    (["checkpoint={run}", "out=x", "format=vlm"], "format is 'vlm'; choose one of vllm, sglang"),
    (
        ["checkpoint={run}", "out=x", "format=sglang"],
        "medusa cannot be exported to sglang: it has no loader for this family; vllm",
    ),
    (["checkpoint={run}", "out=x", "format=vllm", "dtype=int8"], "dtype is 'int8'; choose one of float32"),
    (
        ["checkpoint={run}", "out=x", "format=vllm", "export.rope_scaling={{rope_type:linear,factor:2}}"],
        "export.rope_scaling is set, but medusa drafters have no rotary layers of their own; leave it out",
    ),
    (["checkpoint={lookup}", "out=x", "format=all"], "prompt_lookup cannot be exported: it has no trained weights"),
    (["checkpoint={cut}", "out=x", "format=vllm"], "drafter.safetensors: damaged or cut off"),
]


def test_export_command_mistake_is_refused_in_one_line(
    command: Command,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    subtests: pytest.Subtests,
) -> None:
    monkeypatch.setattr(checkpoint_source, "load_target", lambda *_: embedded())
    names = {"run": run, "lookup": checkpoint(tmp_path / "lookup", "prompt_lookup", embedded()), "cut": tmp_path / "cut"}
    shutil.copytree(run, names["cut"])
    weights = names["cut"] / "drafter.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    for arguments, says in MISTAKES:
        with subtests.test(says=says):
            assert command("export", *(argument.format(**names) for argument in arguments)) == 2
            error = capsys.readouterr().err
            assert says in error and error.count("\n") == 1
            assert not Path("x").exists()


def test_export_command_with_two_processes_is_refused_in_one_line(
    command: Command, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This process is the first of two that torchrun or `launcher.nproc` has started."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert command("export", f"checkpoint={run}", "out=x", "format=vllm") == 2
    error = capsys.readouterr().err
    assert "export runs in one process, but 2 were started" in error and error.count("\n") == 1
    assert not Path("x").exists()


@pytest.mark.slow
def test_export_command_adapter_is_written_or_refused(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = checkpoint(tmp_path / "lora", "draft_model-lora", embedded())
    assert command("export", f"checkpoint={made}", "format=transformers", "adapter=true", "out=out") == 0
    assert "transformers: out (checked: its 18 drafts are the checkpoint's)" in capsys.readouterr().out
    assert {"adapter_config.json", "adapter_model.safetensors", "base"} <= {path.name for path in Path("out").iterdir()}
    assert command("export", f"checkpoint={made}", "format=vllm", "adapter=true", "out=other") == 2
    assert "it takes no adapter as a drafter" in capsys.readouterr().err and not Path("other").exists()
