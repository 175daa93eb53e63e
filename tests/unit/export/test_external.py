"""Fields of other projects' drafters that engines read, imported in the same sense; and what an import is kept by."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.export import convert
from drafttrain.export.convert import taken
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.table import recognised
from tests.exports import loaded
from tests.official import LAYOUTS, put

Config = dict[str, Any]


def options(folder: Path, change: Callable[[Config], Any]) -> Config:
    """The options of a DFlash drafter that is imported after this change of its configuration."""
    config, tensors, file = LAYOUTS["dflash"]()
    change(config)
    found = ExternalCheckpoint(put(folder / "dflash", (config, tensors, file)))
    return taken(recognised(found), found, loaded())[0].options


def test_import_dflash_use_swa_sets_window_of_all_layers(tmp_path: Path) -> None:
    """As vLLM reads them: with `use_swa` alone all layers have windows, and their slots see their whole block."""
    found = options(tmp_path, lambda c: c["dflash_config"].update(use_swa=True, swa_window_size=9))
    assert (found["layer"]["sliding_window"], found["layer"]["full_attention_layers"]) == (9, [])
    assert (found["causal"], found["causal_windows"]) == (False, False)


def test_import_dflash_config_window_overrides_top_level(tmp_path: Path) -> None:
    def change(config: Config) -> None:
        config |= {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 50, "use_sliding_window": True}
        config["dflash_config"] |= {"use_swa": True, "swa_window_size": 9}

    found = options(tmp_path, change)
    assert (found["layer"]["sliding_window"], found["layer"]["full_attention_layers"]) == (9, [0])
    assert (found["causal"], found["causal_windows"]) == (False, True)


def test_import_dflash_attention_sinks_are_read_where_vllm_looks(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """As ModelOpt writes them, and by the flag of targets that vLLM takes where that is missing."""
    nested, top, swa = ({"attention_sink_bias": True}, {"attention_sink_bias": True}, {"add_swa_attention_sink_bias": True})
    for number, (top_level, inner, says) in enumerate(
        [
            (top, nested, None),
            ({}, nested, None),
            (swa, {}, None),
            ({}, {}, r"unknown tensors layers\.0\.self_attn\.attention_sink_bias"),
            ({}, {"attention_sink_bias": False}, r"unknown tensors layers\.0\.self_attn\.attention_sink_bias"),
            ({"attention_sink_bias": False}, nested, "attention_sink_bias is False at the top level and True in dflash_config"),
        ]
    ):
        config, tensors, file = LAYOUTS["dflash"]()
        heads = config["num_attention_heads"]
        sinks = {f"layers.{i}.self_attn.attention_sink_bias": torch.randn(heads) for i in range(config["num_hidden_layers"])}
        config |= top_level | {"dflash_config": config["dflash_config"] | inner}
        found = ExternalCheckpoint(put(tmp_path / str(number), (config, tensors | sinks, file)))
        with subtests.test(top_level=top_level, inner=inner):
            if says is not None:
                with pytest.raises(UserError, match=says):
                    taken(recognised(found), found, loaded())
                continue
            meta, weights = taken(recognised(found), found, loaded())
            assert meta.options["layer"]["attention_sinks"] is True
            assert all(torch.equal(weights[name], sinks_h) for name, sinks_h in sinks.items())


def test_import_dflash_with_mask_embedding_file_is_refused(tmp_path: Path) -> None:
    folder = put(tmp_path / "dflash", LAYOUTS["dflash"]())
    torch.save({"embedding": torch.zeros(32)}, folder / "mask_embedding.pt")
    with pytest.raises(UserError, match=r"mask_embedding\.pt holds an embedding of its own for masks"):
        taken(recognised(ExternalCheckpoint(folder)), ExternalCheckpoint(folder), loaded())


def test_import_cache_key_depends_on_base_model_weights(tmp_path: Path) -> None:
    """Its weights are kept with the adapter's."""
    adapter, base = tmp_path / "adapter", tmp_path / "base-model"
    for folder in (adapter, base):
        folder.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    keys = []
    for content in (b"1", b"22"):
        (base / "model.safetensors").write_bytes(content)
        keys.append(convert._key(ExternalCheckpoint(adapter), loaded()))
    assert keys[0] != keys[1]


def test_import_cache_key_ignores_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    target, keys = loaded(), set()
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").touch()
        monkeypatch.chdir(tmp_path / name)
        keys.add(convert._key(ExternalCheckpoint(adapter), target))
    assert len(keys) == 1
