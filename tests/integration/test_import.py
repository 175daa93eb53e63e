"""Published drafters as they are typed: measured, written for another stack, trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.export import convert
from drafttrain.export import external as directory
from tests.integration.test_fit_errors import arguments, trained
from tests.official import LAYOUTS, put

Command = Callable[..., int]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(convert, "cache_home", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def prompt_file(folder: Path) -> Path:
    file = folder / "prompts.jsonl"
    lines = [{"question_id": i, "category": "letters", "turns": [text]} for i, text in enumerate(("abcde", "hello"))]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


# what a layout may get wrong are its drafts: unit/export/test_convert.py has those of every one
@pytest.mark.sampled(layout=["eagle3, speculators", "medusa"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_measure_published_checkpoint_layout_has_exact_matches(
    layout: str, command: Command, material: Path, tmp_path: Path
) -> None:
    folder = put(tmp_path / "published", LAYOUTS[layout]())
    asked = ("measure.minutes=0.01", "measure.timed_prompts=1", "measure.batch_sizes=[1]", "decode.max_new_tokens=12")
    target = ("target=hf", f"target.path={material / 'target'}")
    assert command("measure", f"checkpoint={folder}", *target, f"prompts={prompt_file(tmp_path)}", *asked) == 0
    (file,) = Path("outputs").glob("measure/*/report.json")
    report = json.loads(file.read_text())
    (entry,) = [entry for entry in report["checkpoints"] if entry["name"] == "published"]
    assert report["drafter"]["family"] == layout.partition(",")[0] and entry["step"] is None
    assert entry["exact_matches"] == entry["transformers_exact_matches"] == 2 and entry["tau"] >= 1.0


def test_export_published_checkpoint_to_other_stack_and_back_is_lossless(
    command: Command, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = put(tmp_path / "published", LAYOUTS["eagle3"]())
    narrow = {n: x.bfloat16() if x.is_floating_point() else x for n, x in load_file(folder / "model.safetensors").items()}
    save_file(narrow, folder / "model.safetensors")
    target = ("target=hf", f"target.path={material / 'target'}")
    assert command("export", f"checkpoint={folder}", "format=speculators", "out=there", *target) == 0
    said = capsys.readouterr().out
    assert f"imported: {folder} (portable, eagle3, bfloat16)" in said and "golden drafts: the checkpoint has none" in said
    assert f"by other people, imported from `{folder}` (portable, eagle3, bfloat16)" not in Path("there/README.md").read_text()
    assert f"by other people, imported from `{folder}` (portable, bfloat16)" in Path("there/README.md").read_text()
    assert command("export", "checkpoint=there", "format=vllm", "out=back", *target) == 0
    back = load_file("back/model.safetensors")
    assert back.keys() == narrow.keys()
    assert all(torch.equal(back[name], x) and back[name].dtype == x.dtype for name, x in narrow.items())
    assert command("export", f"checkpoint={folder}", "format=tgi", "out=x", *target) == 2
    assert "eagle3 cannot be exported to tgi" in capsys.readouterr().err and not Path("x").exists()


def test_fit_init_from_published_checkpoint_keeps_weights_with_named_options(
    command: Command, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = put(tmp_path / "published", LAYOUTS["eagle3, layers.0"]())
    asked = ("recipe=eagle3", f"train.init={folder}", "train.lr=1e-30", "train.steps=1")
    assert command(*arguments(material, *asked)) == 2
    *_, line = capsys.readouterr().err.strip().splitlines()
    named = line.partition("add ")[2].split()
    assert "drafter.draft_vocab=40" in named
    assert not Path("outputs").exists()
    weights = load_file(trained(command, material, *asked, *named) / "drafter.safetensors")
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(weights[name.replace("layers.0.", "midlayer.")], tensor), name
    assert command(*arguments(material, "recipe=hydra", f"train.init={folder}")) == 2
    assert "is of the family eagle3, but this drafter is of hydra" in capsys.readouterr().err


def test_generate_with_published_draft_model_reports_import_and_tau(
    command: Command, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = put(tmp_path / "published", LAYOUTS["draft_model"]())
    target = ("target=hf", f"target.path={material / 'target'}", "decode.max_new_tokens=6")
    assert command("generate", f"checkpoint={folder}", *target, "prompt=abc") == 0
    said = capsys.readouterr()
    assert "imported: " in said.err and "imported: " not in said.out and "verifications, tau" in said.err


def test_export_checkpoint_given_as_hub_id_is_imported(
    command: Command,
    material: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = put(tmp_path / "snapshot", LAYOUTS["medusa"]())
    monkeypatch.setattr(directory, "snapshot_download", lambda **_: str(folder))
    target = ("target=hf", f"target.path={material / 'target'}")
    assert command("export", "checkpoint=owner/heads@main", "format=vllm", "out=there", *target) == 0
    assert "imported: owner/heads@main (medusa_lm_head, medusa, float32)" in capsys.readouterr().out


def test_measure_published_checkpoint_mismatched_or_damaged_is_refused(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    folder = put(tmp_path / "published", LAYOUTS["eagle"]())
    for change, says in (
        (lambda: None, "its hidden size is 32, this target's is 192; give the target that it was trained for"),
        (lambda: (folder / "model.safetensors").write_bytes(b"abc"), "model.safetensors: damaged, cut off"),
        (lambda: (folder / "model.safetensors").unlink(), "expected weights in one of model.safetensors"),
    ):
        change()
        assert command("measure", f"checkpoint={folder}") == 2
        *_, line = capsys.readouterr().err.strip().splitlines()
        assert says in line
    assert not cache.exists() and not Path("outputs").exists()
