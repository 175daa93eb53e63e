"""The LoRA of a drafter: merged into an export, or a peft adapter on the names of the exported drafter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafttrain.commands.verify import record_of
from drafttrain.core.errors import ParityError, UserError
from drafttrain.core.files import LISTED
from drafttrain.export import convert, exporter, parity
from drafttrain.export.drafter_adapter import PEFT, adapter_of, merge
from drafttrain.export.exporter import ExportSettings
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.files import ExportSource
from drafttrain.export.opened import Opened
from drafttrain.export.table import format_of, loads
from drafttrain.model.lora import LoraOptions
from tests.exports import CASES, loaded, opened, target_of_files, written
from tests.native import native

LORA = LoraOptions(rank=2, alpha=6.0)
FILES = [
    "README.md",
    "adapter_config.json",
    "adapter_model.safetensors",
    "base",
    "drafttrain-checksums.json",
    "drafttrain.json",
]
TRAINED = [case for case, (family, options) in CASES.items() if loads(family) and not options.get("lora_rank")]

FAST = ("medusa", "peagle")
PLAIN = (  # of each other family; variants name and merge their matrices alike
    *("eagle3", "pard", "eagle", "hydra", "redrafter", "mlp_speculator", "mtp", "mtp_native", "dflash", "dspark", "dflash2"),
    *("jetspec", "domino", "xpress", "lilicorr", "draft_model"),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "cache_home", lambda: tmp_path / "cache")


def module_of(tensors: dict[str, Tensor]) -> nn.Module:
    """Linear maps and other parameters under these names, as a serving stack's module would have them."""
    root = nn.Module()
    for name, tensor in tensors.items():
        owner, *path = root, *name.split(".")
        *above, last = path
        for number, part in enumerate(above):
            if not hasattr(owner, part):
                linear = number == len(above) - 1 and tensor.ndim == 2 and last == "weight"
                owner.add_module(part, nn.Linear(*reversed(tensor.shape), bias=False) if linear else nn.Module())
            owner = getattr(owner, part)
        setattr(owner, last, nn.Parameter(tensor.clone(), requires_grad=False))
    return root


@pytest.mark.parametrize("case", ["eagle3", pytest.param("dflash", marks=pytest.mark.slow)])
def test_export_drafter_lora_adapter_loads_in_peft(case: str, tmp_path: Path) -> None:
    found, golden = opened(tmp_path / "run", case, lora=LORA)
    out, whole = tmp_path / "out", tmp_path / "whole"
    written(found, golden, "vllm", out, adapter=True)
    assert sorted(path.name for path in out.iterdir()) == FILES
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (2, 6, None)
    assert config["base_model_name_or_path"] == str(out / "base")
    written(found, golden, "vllm", whole)
    base, merged = (load_file(folder / "model.safetensors") for folder in (out / "base", whole))
    adapted = {name for name in base if not torch.equal(base[name], merged[name])}
    assert adapted == {f"{path}.weight" for path in config["target_modules"]} and "lm_head.weight" not in adapted
    model = PeftModel.from_pretrained(module_of(base), str(out)).merge_and_unload().state_dict()  # type: ignore[arg-type]
    assert all(torch.allclose(model[name], x, atol=1e-6) for name, x in merged.items() if x.is_floating_point())
    merge(out, tmp_path / "merged")
    again = load_file(tmp_path / "merged" / "model.safetensors")
    assert again.keys() == merged.keys() and all(torch.equal(again[name], x) for name, x in merged.items())
    card = (out / "README.md").read_text()
    assert f"merge(adapter='{out}', out='{out}-merged')" in card and f'"model": "{out}-merged"' in card


@pytest.mark.sampled(case=(*FAST, *PLAIN))
@pytest.mark.parametrize("case", [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in TRAINED if case not in FAST)])
def test_export_drafter_with_lora_merged_and_adapter_pass_parity(case: str, tmp_path: Path) -> None:
    """Merged, in float32 and rounded. As an adapter, or refused with the reason."""
    own = target_of_files(native("mimo", tmp_path / "target")) if CASES[case][0] == "mtp_native" else None
    found, golden = opened(tmp_path / "run", case, own, lora=LORA)
    try:
        written(found, golden, "all", tmp_path / "whole")
        written(found, golden, "all", tmp_path / "narrow", "bfloat16")
    except UserError as error:
        assert "no stack loads this" in str(error)
        return
    try:
        exported = written(found, golden, "all", tmp_path / "apart", adapter=True)
    except UserError as error:
        stored = {"draft_model": "lm.model", "pard": "lm.model", "lilicorr": "lilicorr.layers.0.attn.in_proj"}
        assert f"does not hold {stored[found.meta.family]}" in str(error)
        assert "leave adapter out to export it merged" in str(error)
        return
    assert all(sorted(p.name for p in (tmp_path / "apart" / stack).iterdir()) == FILES for stack in exported.written)
    assert set(loads(found.meta.family)) - set(exported.written) <= set(exported.refused)


def test_export_drafter_adapter_unsupported_dtype_or_stack_is_refused(tmp_path: Path) -> None:
    found, golden = opened(tmp_path / "run", "eagle3", lora=LORA)
    for stack, dtype, says in (
        ("vllm", "bfloat16", "dtype is bfloat16, but adapters are written in float32"),
        ("llamacpp", "float32", "its files are GGUF, in which weights have other names and orders"),
    ):
        with pytest.raises(UserError, match=says):
            exporter.refusals(found, ExportSettings([stack], tmp_path / "out", dtype, False, adapter=True))
    assert golden and not (tmp_path / "out").exists()


def test_drafter_adapter_changed_config_or_tensors_fail_parity(tmp_path: Path) -> None:
    found, golden = opened(tmp_path / "run", "medusa", lora=LORA)
    out, to, source = tmp_path / "out", adapter_of(format_of("medusa", "vllm")), ExportSource(found, "vllm", "float32")
    written(found, golden, "vllm", out, adapter=True)

    def check(tensors: dict[str, Tensor] | None = None, **changes: Any) -> None:
        config = json.loads((out / "adapter_config.json").read_text())
        shutil.rmtree(tmp_path / "wrong", ignore_errors=True)
        shutil.copytree(out, tmp_path / "wrong")
        (tmp_path / "wrong" / LISTED).unlink()
        (tmp_path / "wrong" / "adapter_config.json").write_text(json.dumps(config | changes))
        if tensors is not None:
            save_file(tensors, tmp_path / "wrong" / "adapter_model.safetensors")
        parity.check(tmp_path / "wrong", to, to.write(source), source, golden, golden)

    check()
    own = load_file(out / "adapter_model.safetensors")
    for harm in (lambda: check(lora_alpha=7), lambda: check({name: x + 0.01 for name, x in own.items()})):
        with pytest.raises(ParityError, match="Parity: logits"):
            harm()
    for changes in ({"target_modules": ["blocks.0.layers.0"]}, {"use_rslora": True}, {"peft_type": "IA3"}, {"r": 3}):
        with pytest.raises(ParityError, match="Parity: files: "):
            check(**changes)
    stranger = {f"{PEFT}nowhere.lora_{x}.weight": torch.ones(2, 2) for x in "AB"}
    with pytest.raises(ParityError, match=r"Parity: files: .* target_modules is"):
        check(own | stranger)


def test_merge_drafter_adapter_failure_leaves_no_directory(tmp_path: Path) -> None:
    found, golden = opened(tmp_path / "run", "medusa", lora=LORA)
    written(found, golden, "vllm", tmp_path / "out", adapter=True)
    own = load_file(tmp_path / "out" / "adapter_model.safetensors")
    save_file(
        own | {f"{PEFT}nowhere.lora_{x}.weight": torch.ones(2, 2) for x in "AB"}, tmp_path / "out" / "adapter_model.safetensors"
    )
    (tmp_path / "out" / LISTED).unlink()
    with pytest.raises(UserError, match="target_modules is"):
        merge(tmp_path / "out", tmp_path / "merged")
    assert not list(tmp_path.glob("*merged*"))
    (tmp_path / "merged").mkdir()
    with pytest.raises(UserError, match="merged is there already"):
        merge(tmp_path / "out", tmp_path / "merged")


def test_export_drafter_adapter_saved_with_other_values_fails_parity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, golden = opened(tmp_path / "run", "medusa", lora=LORA)
    monkeypatch.setattr(
        "drafttrain.export.files.save_file",
        lambda tensors, *rest: save_file({n: x + (".lora_" in n) for n, x in tensors.items()}, *rest),
    )
    with pytest.raises(ParityError, match=r"Parity: logits: draft .* is off by"):
        written(found, golden, "vllm", tmp_path / "out", adapter=True)
    assert not (tmp_path / "out").exists()


def test_import_merged_drafter_lora_is_read_and_adapter_is_refused(tmp_path: Path) -> None:
    found, golden = opened(tmp_path / "run", "medusa", lora=LORA)
    written(found, golden, "vllm", tmp_path / "whole")
    written(found, golden, "vllm", tmp_path / "apart", adapter=True)
    again = Opened.of(convert.converted(ExternalCheckpoint(tmp_path / "whole"), loaded(), str), loaded())
    assert again.meta.lora is None and all(torch.equal(x, again.tensors[name]) for name, x in found.tensors.items())
    says = "apart is an adapter of a drafter, which is read merged; its README.md has the lines that merge it"
    with pytest.raises(UserError, match=says):
        convert.converted(ExternalCheckpoint(tmp_path / "apart"), loaded(), str)
    with pytest.raises(UserError, match=says):
        record_of(tmp_path / "apart")
