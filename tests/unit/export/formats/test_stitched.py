"""Modules written back into copies of their targets: the module's bytes change, all others stay."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.core.errors import ParityError, UserError
from drafttrain.export.files import ExportSource, Files
from drafttrain.export.formats import stitched
from drafttrain.export.golden import Golden
from drafttrain.export.opened import Opened
from drafttrain.export.parity import check
from drafttrain.export.table import format_of
from tests.export_oracles.check import check_export
from tests.exports import loaded, opened, target_of_files, written
from tests.helpers import prompts
from tests.native import CONFIGS, NAMES, Native, native

FEW = ("mimo", "qwen3_5", "deepseek_v3")


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Native, Opened, Golden]:
    """A target with its module, and a checkpoint of it."""
    folder = tmp_path_factory.mktemp("mimo")
    made = native("mimo", folder / "target")
    return made, *opened(folder, "mtp_native", target_of_files(made))


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: x for file in sorted(directory.glob("*.safetensors")) for name, x in load_file(file).items()}


def of_module(name: str, kind: str) -> bool:
    return name.startswith(NAMES[kind][4]) or name.removesuffix(".weight") in NAMES[kind]


@pytest.mark.parametrize("kind", [*FEW, *(pytest.param(kind, marks=pytest.mark.slow) for kind in CONFIGS if kind not in FEW)])
def test_stitched_export_changes_only_mtp_module_tensors(kind: str, tmp_path: Path) -> None:
    made = native(kind, tmp_path / "target")
    (made.directory / "README.md").write_text("the target's")
    found, golden = opened(tmp_path, "mtp_native", target_of_files(made))
    exported = written(found, golden, "stitched", tmp_path / "out")
    assert exported.written["stitched"].gap < 0.5 and exported.written["stitched"].drafts == golden.draft_PK.numel()
    before, after = tensors_of(made.directory), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    kept = ("e_score_correction_bias", "embed_tokens.weight", "shared_head.head.weight")  # are not trained
    assert {n for n in before if not torch.equal(before[n], after[n])} == {
        n for n in before if of_module(n, kind) and not n.endswith(kept)
    }
    for name in ("config.json", "model.safetensors.index.json"):
        assert (made.directory / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    assert (tmp_path / "out" / "README.target.md").read_text() == "the target's"
    card = (tmp_path / "out" / "README.md").read_text()
    assert f'vllm serve {tmp_path / "out"} --speculative-config \'{{"method": "mtp", "num_speculative_tokens": 3}}\'' in card
    again, _ = opened(tmp_path / "again", "mtp_native", target_of_files(Native(tmp_path / "out", made.whole, {}, kind)))
    assert again.loaded.target.fingerprint == found.loaded.target.fingerprint


def test_stitched_target_reloads_trained_mtp_module(tmp_path: Path) -> None:
    from drafttrain.drafters.mtp_native import MTPNative, MTPNativeOptions

    made = native("glm4_moe", tmp_path / "target")
    found, golden = opened(tmp_path, "mtp_native", target_of_files(made))
    written(found, golden, "stitched", tmp_path / "out")
    taken = MTPNative(MTPNativeOptions(), target_of_files(Native(tmp_path / "out", made.whole, {}, "glm4_moe")).target)
    assert taken.state_dict().keys() == found.tensors.keys()
    assert all(torch.equal(x, found.tensors[name]) for name, x in taken.state_dict().items())


@pytest.mark.sampled(kind=("mimo", "qwen3_5"))  # deepseek_v3 names its count as mimo does
@pytest.mark.parametrize("kind", FEW)
def test_stitched_export_without_mtp_module_adds_new_file(kind: str, tmp_path: Path) -> None:
    made = native(kind, tmp_path / "target", module=False)
    found, golden = opened(tmp_path, "mtp_native", target_of_files(made), source="fresh")
    written(found, golden, "stitched", tmp_path / "out")
    for file in made.directory.glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    added = load_file(tmp_path / "out" / "model-mtp.safetensors")
    assert {name for name, file in index["weight_map"].items() if file == "model-mtp.safetensors"} == set(added)
    assert all(of_module(name, kind) for name in added)
    count = json.loads((tmp_path / "out" / "config.json").read_text())
    assert count[{"qwen3_5": "mtp_num_hidden_layers"}.get(kind, "num_nextn_predict_layers")] == 1
    assert target_of_files(Native(tmp_path / "out", made.whole, {}, kind)).target.fingerprint == found.loaded.target.fingerprint


def test_stitched_export_single_file_target_gets_index(tmp_path: Path) -> None:
    made = native("mimo", tmp_path / "target", module=False)
    whole = tensors_of(made.directory)
    for file in [*made.directory.glob("*.safetensors"), made.directory / "model.safetensors.index.json"]:
        file.unlink()
    save_file(whole, made.directory / "model.safetensors", {"format": "pt"})
    found, golden = opened(tmp_path, "mtp_native", target_of_files(made), source="fresh")
    written(found, golden, "stitched", tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors_of(tmp_path / "out").keys()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (made.directory / "model.safetensors").read_bytes()


def test_stitched_export_keeps_stored_dtype(tmp_path: Path) -> None:
    made = native("qwen3_5", tmp_path / "target", dtype=torch.bfloat16)
    found, golden = opened(tmp_path, "mtp_native", target_of_files(made))
    with pytest.raises(UserError, match="is stored as bfloat16 and keeps its dtype; export with dtype=bfloat16"):
        written(found, golden, "stitched", tmp_path / "wide")
    assert not (tmp_path / "wide").exists()
    assert written(found, golden, "stitched", tmp_path / "out", "bfloat16").written["stitched"].gap < 0.5
    assert {x.dtype for x in tensors_of(tmp_path / "out").values()} == {torch.bfloat16}


def test_stitched_export_unsupported_module_or_target_is_refused(mimo: tuple[Native, Opened, Golden], tmp_path: Path) -> None:
    found, golden = opened(tmp_path / "raw", "mtp_native", mimo[1].loaded, norm_output=False)
    with pytest.raises(UserError, match=r"stacks pass on the normed output; train with drafter\.norm_output=null"):
        written(found, golden, "stitched", tmp_path / "out")
    found, golden = opened(tmp_path / "llama", "mtp_native", loaded(), source="fresh")
    with pytest.raises(UserError, match="no stack reads a module from the files of a llama"):
        written(found, golden, "stitched", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def damaged(directory: Path, change: Any) -> None:
    """Change the tensors of every file."""
    for file in sorted(directory.glob("*.safetensors")):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})


def test_stitched_export_changed_head_copy_is_refused(tmp_path: Path) -> None:
    """Some stacks draft with the copy."""
    made = native("glm4_moe", tmp_path / "target")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if "model.layers.3.shared_head.head.weight" in tensors:
            tensors["model.layers.3.shared_head.head.weight"] *= 2

    damaged(made.directory, change)
    found, golden = opened(tmp_path, "mtp_native", target_of_files(made))
    with pytest.raises(ParityError, match=r"shared_head\.head\.weight is not the target's"):
        written(found, golden, "stitched", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_stitched_parity_check_detects_changed_tensor(
    mimo: tuple[Native, Opened, Golden], tmp_path: Path, subtests: pytest.Subtests
) -> None:
    _, found, golden = mimo
    written(found, golden, "stitched", tmp_path / "right")
    source = ExportSource(found, "stitched", "float32")
    for name in ("input_proj.weight", "self_attn.q_proj.bias", "final_layernorm.weight"):
        whole = f"model.mtp_layers.0.{name}"

        def change(tensors: dict[str, torch.Tensor], whole: str = whole) -> None:
            if whole in tensors:
                tensors[whole] = tensors[whole].flip(-1)

        with subtests.test(name=name):
            shutil.copytree(tmp_path / "right", tmp_path / name)
            damaged(tmp_path / name, change)
            with pytest.raises(ParityError, match="Parity: logits"):
                check(tmp_path / name, format_of("mtp_native", "stitched"), Files({}, {}), source, golden, golden)
            with pytest.raises(ParityError, match="Parity: logits"):
                check_export(tmp_path / name, source, golden, golden)


def test_stitched_export_bytes_written_elsewhere_fail_parity(
    mimo: tuple[Native, Opened, Golden], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found, golden = mimo
    replaced = stitched._replace

    def careless(file: Path, places: Any, left: Any) -> None:
        replaced(file, {n: replace(p, first=p.first - 4, last=p.last - 4) for n, p in places.items()}, left)

    monkeypatch.setattr(stitched, "_replace", careless)
    with pytest.raises(ParityError, match="differs from the target's where nothing was written"):
        written(found, golden, "stitched", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "modules", "texts", "tokens"),
    [
        ("deepseek_v3", 2, 3, 12),
        pytest.param("glm4_moe", 1, 3, 12, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 1, 6, 24, marks=pytest.mark.grid),
        pytest.param("glm4_moe", 2, 6, 24, marks=pytest.mark.grid),
    ],
)
def test_stitched_target_acceptance_equals_transformers_use_mtp(
    kind: str, modules: int, texts: int, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own `generate(use_mtp=True)` on the stitched directory, text by text."""
    from drafttrain.engines.process import EngineResult
    from drafttrain.engines.scripts.transformers import decoded as engine
    from drafttrain.export.engine_check import Ending, chain_drafter, decoded, engine_check, plain

    made = native(kind, tmp_path / "target", twice=modules == 2)
    found, golden = opened(tmp_path, "mtp_native", target_of_files(made), draft_length=modules)
    written(found, golden, "stitched", tmp_path / "out")
    # transformers knows the number of the module's block for the published sizes alone
    monkeypatch.setattr(type(made.whole), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3.*", r"model\.layers\.4.*"])
    asked, ending = prompts(texts, seed=3), Ending(frozenset(), tokens)
    job = {
        "target": "",
        "drafter": str(tmp_path / "out"),
        "family": "mtp_native",
        "layout": "stitched",
        "draft_length": modules,
    }
    job |= {"max_new_tokens": tokens, "stop_ids": [], "prompts": asked, "facts": {}, "timed": None}
    outcome = EngineResult.of(engine(job))
    target, drafter = found.loaded.target, chain_drafter(found, modules, "float32")
    ours = [decoded(target, drafter, prompt, ending, modules, outcome.begins) for prompt in asked]
    check = engine_check(outcome, [str(i) for i in range(texts)], plain(target, asked, ending), ours, ending, modules)
    check.check()
    assert check.ours > 0
    with pytest.raises(ValueError, match=f"{modules} module"):
        engine(job | {"draft_length": 3})
