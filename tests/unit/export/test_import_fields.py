"""Fields of other projects' drafters that engines read: imported in the same sense, or refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.export.importers import convert
from drafttrain.export.importers.convert import taken
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.table import recognised
from tests.exports import loaded, opened, written

# with the stack of its layout
CASES = {"dflash": "vllm", "dspark": "speculators", "eagle3": "vllm", "lilicorr": "vllm", "peagle": "vllm"}
CASES |= {"mlp_speculator": "tgi", "draft_model": "transformers"}
Config = dict[str, Any]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of each case, without our own record."""
    folder = tmp_path_factory.mktemp("exports")
    for case, stack in CASES.items():
        written(*opened(folder / "run" / case, case), stack, folder / case)
        for name in ("drafttrain.json", "drafttrain-checksums.json"):
            (folder / case / name).unlink()
    return folder


def options(exports: Path, folder: Path, case: str, change: Callable[[Config], Any]) -> Config:
    """The options of the drafter that is imported after this change of its configuration."""
    shutil.copytree(exports / case, folder / case)
    file = folder / case / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
    found = Foreign(folder / case)
    return taken(recognised(found), found, loaded())[0].options


def test_windows_of_dflash_config(exports: Path, tmp_path: Path) -> None:
    """As vLLM reads them: with `use_swa` alone all layers have windows, and their slots see their whole block."""
    found = options(exports, tmp_path, "dflash", lambda c: c["dflash_config"].update(use_swa=True, swa_window_size=9))
    assert (found["layer"]["sliding_window"], found["layer"]["full_attention_layers"]) == (9, [])
    assert (found["causal"], found["causal_windows"]) == (False, False)


def test_a_window_of_dflash_config_counts_first(exports: Path, tmp_path: Path) -> None:
    def change(config: Config) -> None:
        config |= {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 50, "use_sliding_window": True}
        config["dflash_config"] |= {"use_swa": True, "swa_window_size": 9}

    found = options(exports, tmp_path, "dflash", change)
    assert (found["layer"]["sliding_window"], found["layer"]["full_attention_layers"]) == (9, [0])
    assert (found["causal"], found["causal_windows"]) == (False, True)


def put(**fields: Any) -> Callable[[Config], Any]:
    return lambda config: config.update(fields)


def inside(**fields: Any) -> Callable[[Config], Any]:
    return lambda config: next(config[key] for key in ("dflash_config", "transformer_layer_config") if key in config).update(
        fields
    )


@pytest.mark.parametrize(
    ("case", "change", "says"),
    [
        ("dflash", put(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}), "partial_rotary_factor is 0.5"),
        ("eagle3", put(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}), "partial_rotary_factor is 0.5"),
        ("dflash", put(rope_parameters={"full_attention": {"rope_theta": 5.0}}), "rope_parameters differ by kind of layer"),
        ("dflash", put(is_neox_style=False), "is_neox_style is False"),
        ("dflash", put(is_causal="false"), "is_causal is 'false' in config.json; true or false is needed"),
        ("dflash", put(sample_from_anchor="false"), "sample_from_anchor is 'false'"),
        ("dflash", put(layer_types=1), "layer_types is 1; a list of names is needed"),
        ("dflash", put(architectures=1), "architectures is 1 in config.json; a list of names is needed"),
        ("dflash", inside(mask_token_id="x"), "mask_token_id is 'x' in config.json; a number from 0 is needed"),
        ("dflash", inside(mask_token_id=1.5), "mask_token_id is 1.5"),
        ("dspark", put(mask_token_id=[1]), "mask_token_id is .1. in config.json"),
        ("dspark", put(architectures={"a": 1}), "architectures is "),
        ("dspark", inside(layer_types=[[1]]), "layer_types is "),
        ("eagle3", put(norm_before_residual="false"), "norm_before_residual is 'false'"),
        ("lilicorr", put(dflash_config=[]), "dflash_config"),
        ("peagle", put(pard_token=[]), "one mask token is needed"),
        ("dflash", put(intermediate_size=10**12), "no drafter can be built from config.json"),
        ("draft_model", put(hidden_act="x"), "no drafter can be built from config.json .KeyError"),
        ("mlp_speculator", put(inner_dim="x"), "inner_dim is 'x'"),
        ("mlp_speculator", put(tie_weights="false"), "tie_weights is 'false'"),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_is_named(
    case: str, change: Callable[[Config], Any], says: str, exports: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says):
        options(exports, tmp_path, case, change)


def test_an_embedding_of_masks_is_not_dropped(exports: Path, tmp_path: Path) -> None:
    def change(config: Config) -> None:
        torch.save({"embedding": torch.zeros(32)}, tmp_path / "dflash" / "mask_embedding.pt")

    with pytest.raises(UserError, match=r"mask_embedding\.pt holds an embedding of its own for masks"):
        options(exports, tmp_path, "dflash", change)


def test_a_changed_base_model_is_converted_again(tmp_path: Path) -> None:
    """Its weights are kept with the adapter's."""
    adapter, base = tmp_path / "adapter", tmp_path / "base-model"
    for folder in (adapter, base):
        folder.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    keys = []
    for content in (b"1", b"22"):
        (base / "model.safetensors").write_bytes(content)
        keys.append(convert._key(Foreign(adapter), loaded()))
    assert keys[0] != keys[1]


def test_an_adapter_without_a_base_model_is_the_same_in_every_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    target, keys = loaded(), set()
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").touch()
        monkeypatch.chdir(tmp_path / name)
        keys.add(convert._key(Foreign(adapter), target))
    assert len(keys) == 1
