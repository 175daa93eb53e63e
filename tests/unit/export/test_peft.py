"""Low-rank matrices on their own: peft loads what is exported, and what peft saved is a drafter here."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from drafttrain.core.errors import ParityError, UserError
from drafttrain.core.files import LISTED
from drafttrain.export import convert, parity
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.files import ExportSource
from drafttrain.export.golden import Golden, made
from drafttrain.export.opened import Opened
from drafttrain.export.table import format_of
from drafttrain.model.lora import LoraSpec
from tests.export_oracles.check import check_export
from tests.exports import TEXTS, loaded, opened, put_model, written
from tests.helpers import tiny_model

PEFT = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "cache_home", lambda: tmp_path / "cache")


def imported(folder: Path) -> tuple[Opened, list[str]]:
    said: list[str] = []
    return Opened.of(convert.converted(ExternalCheckpoint(folder), loaded(), said.append), loaded()), said


def choices(model: Any, golden: Golden) -> list[int]:
    """What a model of transformers would draft behind the first golden text."""
    row = int(golden.count_P[0])
    text = torch.cat([golden.text_PT[0, :row], golden.root_P[:1], golden.draft_PK[0, :-1]])
    return model(text[None]).logits[0, row:].argmax(-1).tolist()


@pytest.mark.parametrize("source", ["pruned", "hf"])
def test_export_draft_model_adapter_loads_in_peft_and_comes_back(source: str, tmp_path: Path) -> None:
    """With its model beside it where that is a part of the target, else with the model that it was trained from."""
    more: dict[str, Any] = {} if source == "pruned" else {"source": "hf", "path": str(put_model(tmp_path / "base"))}
    found, golden = opened(tmp_path / "run", "draft_model-lora", **more)
    out, merged, second = (tmp_path / name for name in ("out", "merged", "second"))
    written(found, golden, "transformers", out, adapter=True)
    base = out / "base" if source == "pruned" else tmp_path / "base"
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base) and config["r"] == 2 and config["lora_alpha"] == 16
    assert (out / "base").exists() == (source == "pruned") and not (out / "model.safetensors").exists()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert choices(PeftModel.from_pretrained(plain, str(out)), golden) == golden.draft_PK[0].tolist()
    written(found, golden, "transformers", merged)
    assert choices(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32), golden) == golden.draft_PK[0].tolist()
    again, _ = imported(out)
    assert again.meta.options["lora_rank"] == 2 and again.meta.options["source"] == "hf"
    assert found.tensors.keys() == again.tensors.keys()
    assert all(torch.equal(x, again.tensors[name]) for name, x in found.tensors.items())
    written(again, made(again, TEXTS), "transformers", second, adapter=True)
    one, two = (load_file(folder / "adapter_model.safetensors") for folder in (out, second))
    assert one.keys() == two.keys() and all(torch.equal(x, two[name]) for name, x in one.items())


def by_peft(folder: Path, **changes: Any) -> tuple[Path, Any]:
    """(an adapter of a small model as peft saves it, the adapted model)."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(put_model(folder / "base"), dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(**PEFT | changes))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.3)
    model.save_pretrained(str(folder / "adapter"))
    return folder / "adapter", model.eval()


def test_import_peft_adapter_drafts_as_peft_model(tmp_path: Path) -> None:
    folder, model = by_peft(tmp_path)
    found, said = imported(folder)
    golden = made(found, TEXTS)
    assert found.meta.options["lora_rank"] == 2 and found.meta.options["lora_alpha"] == 8
    assert choices(model, golden) == golden.draft_PK[0].tolist()
    assert any("has no matrices for" in line and "fresh ones are used, which change nothing" in line for line in said)
    written(found, golden, "vllm", tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert choices(merged, golden) == golden.draft_PK[0].tolist()


def alien(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({name.replace("layers.1", "layers.7"): x for name, x in tensors.items()}, folder / "adapter_model.safetensors")


def no_weights(folder: Path) -> None:
    (folder.parent / "base" / "model.safetensors").unlink()


def no_base(folder: Path) -> None:
    shutil.rmtree(folder.parent / "base")


UNLIKE: list[tuple[dict[str, Any], str]] = [  # settings of peft, what the message says
    ({"use_rslora": True}, "use_rslora is True, but adapters here are plain LoRA; only False can be imported"),
    ({"rank_pattern": {"q_proj": 4}}, "but adapters here have one rank and no other weights"),
    ({"modules_to_save": ["norm"]}, r"has unknown tensors base_model.model.model.layers.0.input_layernorm.weight"),
]
HARMS: list[tuple[Callable[[Path], None], str]] = [  # each on top of those before it
    (alien, r"has unknown tensors base_model.model.model.layers.7"),
    (no_weights, r"has no safetensors weights"),
    (no_base, "does not exist; set it to a model directory or a hub id"),
]


def test_import_unsupported_adapter_is_refused_in_one_line(tmp_path: Path, subtests: pytest.Subtests) -> None:
    def check(folder: Path, says: str) -> None:
        with pytest.raises(UserError, match=says) as caught:
            imported(folder)
        assert "\n" not in str(caught.value) and not (tmp_path / "cache").exists()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, (changes, says) in enumerate(UNLIKE):
            with subtests.test(**changes):
                check(by_peft(tmp_path / str(number), **changes)[0], says)
        folder, _ = by_peft(tmp_path / "plain")
    for harm, says in HARMS:
        with subtests.test(harm=harm.__name__):
            harm(folder)
            check(folder, says)


def test_adapter_changed_config_fails_parity(tmp_path: Path) -> None:
    found, golden = opened(tmp_path / "run", "draft_model-lora")
    written(found, golden, "transformers", tmp_path / "out", adapter=True)
    source, to = ExportSource(found, "transformers", "float32"), format_of("draft_model", "transformers").adapter
    assert to is not None
    changes: list[dict[str, Any]] = [{"lora_alpha": 17}, {"use_rslora": True}, {"peft_type": "IA3"}]
    for number, change in enumerate([*changes, {"target_modules": ["q_proj"]}]):
        wrong = tmp_path / str(number)
        shutil.copytree(tmp_path / "out", wrong)
        (wrong / LISTED).unlink()
        config = json.loads((wrong / "adapter_config.json").read_text())
        (wrong / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(ParityError):
            check_export(wrong, source, golden, golden, adapter=True)
        if "target_modules" in change:  # an importer goes by the tensors
            continue
        with pytest.raises(ParityError):
            parity.check(wrong, to, to.write(source), source, golden, golden)


def test_export_adapter_of_trained_target_merges_to_its_weights(tmp_path: Path) -> None:
    found, golden = opened(tmp_path / "run", "medusa", spec=LoraSpec(rank=2, alpha=6.0))
    out = tmp_path / "out"
    written(found, golden, "vllm", out, adapter=True)
    base: Any = tiny_model()
    peft = PeftModel.from_pretrained(base, str(out / "target")).merge_and_unload()
    wanted = found.loaded.target.model.state_dict()
    assert all(torch.allclose(x, wanted[name], atol=1e-6) for name, x in peft.state_dict().items())
    assert not torch.equal(
        wanted["model.layers.0.mlp.up_proj.weight"], tiny_model().state_dict()["model.layers.0.mlp.up_proj.weight"]
    )
    assert json.loads((out / "target" / "adapter_config.json").read_text())["base_model_name_or_path"] == "targets/tiny"
    card = (out / "README.md").read_text()
    merged = str(out / "target-merged")
    assert f"from_pretrained({str(out / 'target')!r}).merge_and_unload().save_pretrained({merged!r})" in card
    assert f"vllm serve {out / 'target-merged'} " in card


@pytest.mark.parametrize(
    ("case", "stack", "dtype", "says"),
    [
        ("medusa", "vllm", "float32", "adapter=true, but this medusa drafter has no low-rank adapter; leave it out"),
        ("draft_model", "transformers", "float32", "this draft_model drafter has no low-rank adapter"),
        (
            "draft_model-lora",
            "vllm",
            "float32",
            "it takes no adapter as a drafter; leave adapter out to .*; transformers loads it",
        ),
        ("draft_model-lora", "transformers", "bfloat16", "dtype is bfloat16, but adapters are written in float32"),
    ],
)
def test_export_adapter_unavailable_is_refused(case: str, stack: str, dtype: str, says: str, tmp_path: Path) -> None:
    found, golden = opened(tmp_path / "run", case)
    with pytest.raises(UserError, match=says):
        written(found, golden, stack, tmp_path / "out", dtype, adapter=True)
    assert not (tmp_path / "out").exists()


def test_export_target_adapter_saved_with_other_values_fails_parity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, golden = opened(tmp_path / "run", "medusa", spec=LoraSpec(rank=2))
    monkeypatch.setattr(
        "drafttrain.export.drafter_adapter.save_file",
        lambda tensors, *rest: save_file({name: x + 1 for name, x in tensors.items()}, *rest),
    )
    with pytest.raises(ParityError, match=r"Parity: target: base_model.model.model.layers.0.* was not saved as it is"):
        written(found, golden, "vllm", tmp_path / "out", adapter=True)
    assert not (tmp_path / "out").exists()


def test_import_drafter_of_trained_target_fits_merged_target(tmp_path: Path) -> None:
    found, golden = opened(tmp_path / "run", "medusa", spec=LoraSpec(rank=2))
    written(found, golden, "vllm", tmp_path / "out")
    said: list[str] = []
    merged = found.loaded
    again = Opened.of(convert.converted(ExternalCheckpoint(tmp_path / "out"), merged, said.append), merged)
    assert again.drafter.adapts is None and again.meta.adapter is None
    assert torch.equal(made(again, TEXTS).draft_PK, golden.draft_PK)
    assert all(torch.equal(x, again.tensors[name]) for name, x in found.tensors.items())
