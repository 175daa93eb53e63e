"""A target's weight files: damaged, incomplete, too many, elsewhere."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.targets import TargetOptions
from drafttrain.targets.companion import companion
from drafttrain.targets.estimate import outline
from drafttrain.targets.load import EMBEDDED, load_shape, load_target
from tests.helpers import tiny_model, tiny_target

FILE = "model.safetensors"
Tensors = dict[str, Tensor]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A tiny Llama with the embedded target's tokenizer."""
    folder = tmp_path / "target"
    config = tiny_model().config
    config.vocab_size = json.loads((EMBEDDED / "config.json").read_text())["vocab_size"]
    model = type(tiny_model())(config)
    model.save_pretrained(folder)
    for path in EMBEDDED.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def options(directory: Path) -> TargetOptions:
    return TargetOptions("hf", str(directory))


def rewritten(directory: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(directory / FILE)
    change(tensors)
    save_file(tensors, directory / FILE, metadata={"format": "pt"})


def without(tensors: Tensors, part: str) -> None:
    for name in [name for name in tensors if part in name]:
        del tensors[name]


def refused(directory: Path, said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        load_target(options(directory))
    assert "\n" not in str(error.value) and len(str(error.value)) < 600 and str(directory) in str(error.value)


def test_a_whole_target_is_loaded(directory: Path) -> None:
    load_target(options(directory))


def test_a_path_is_used_though_the_kind_is_left_out(directory: Path) -> None:
    loaded = load_target(TargetOptions(path=str(directory)))
    assert loaded.path == str(directory) and loaded.description["name"] == "hf" and loaded.target.shape.blocks == 4
    assert TargetOptions().name == "embedded"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: without(t, "layers.2."), r"they lack model\.layers\.2\.input_layernorm\.weight, .* and 6 more"),
        (lambda t: without(t, "lm_head"), r"they lack lm_head\.weight"),
        (lambda t: without(t, "layers.3.mlp.up_proj"), r"they lack model\.layers\.3\.mlp\.up_proj\.weight; "),
        (lambda t: t.update({"model.layers.4.mlp.up_proj.weight": torch.ones(2)}), r"does not know model\.layers\.4\.mlp"),
        (lambda t: t.update({"model.norm.weight": torch.ones(5)}), r"in another shape model\.norm\.weight"),
        (lambda t: t.update({"adapter": torch.ones(2)}) or without(t, "layers.0."), r"lack .*; they have and .* adapter"),
    ],
)
def test_what_does_not_fill_the_architecture_is_named(change: Callable[[Tensors], Any], said: str, directory: Path) -> None:
    rewritten(directory, change)
    refused(directory, said)


def test_what_checkpoints_have_beside_is_known(directory: Path) -> None:
    """Buffers that were saved, and modules that draft: numbered behind the last layer."""
    config = json.loads((directory / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    more = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.4.eh_proj.weight")
    rewritten(directory, lambda tensors: tensors.update({name: torch.ones(2) for name in more}))
    load_target(options(directory))
    rewritten(directory, lambda tensors: tensors.update({"model.layers.5.eh_proj.weight": torch.ones(2)}))
    refused(directory, r"layers\.5")


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[: len(b) // 2],
        lambda b: b[:5],
        lambda b: b"",
        lambda b: b"\xff" * 8 + b[8:],
        lambda b: b[:8] + bytes(40) + b[48:],
        lambda b: b + b"more",
    ],
)
def test_damaged_files_are_named(damage: Callable[[bytes], bytes], directory: Path) -> None:
    file = directory / FILE
    file.write_bytes(damage(file.read_bytes()))
    refused(directory, rf"{FILE} is damaged or cut off")


@pytest.mark.parametrize(
    ("name", "value"),
    [("rope_scaling", "x"), ("hidden_size", "many"), ("num_attention_heads", 0), ("layer_types", 3), ("model_type", "x\x07")],
)
def test_a_configuration_of_wrong_values_is_one_line(name: str, value: object, directory: Path) -> None:
    """Whoever reads it: transformers raises errors of many kinds."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    target = tiny_target()
    for read in (load_target, load_shape, outline, lambda given: companion(target, given.path, None)):
        with pytest.raises(UserError) as error:
            read(options(directory))  # type: ignore[operator]
        assert "\n" not in str(error.value) and len(str(error.value)) < 600 and str(directory) in str(error.value)


def test_a_draft_model_is_looked_at_too(directory: Path) -> None:
    rewritten(directory, lambda tensors: without(tensors, "layers.2."))
    with pytest.raises(UserError, match=r"drafter\.path .* they lack model\.layers\.2"):
        companion(tiny_target(), str(directory), None)


def test_a_draft_models_damaged_tokenizer_is_not_taken_for_none(directory: Path) -> None:
    file = directory / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"drafter\.path .* has a tokenizer\.json that cannot be read"):
        companion(tiny_target(), str(directory), None)


def indexed(directory: Path, spelled: Callable[[str], str]) -> Path:
    """Split in two files, with an index that names them in this way."""
    tensors = load_file(directory / FILE)
    names = sorted(tensors)
    halves = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, own in halves.items():
        save_file({name: tensors[name] for name in own}, directory / file, metadata={"format": "pt"})
    (directory / FILE).unlink()
    found = {name: spelled(file) for file, own in halves.items() for name in own}
    (directory / f"{FILE}.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": found}))
    return directory


def test_an_index_may_name_files_beside_it(directory: Path) -> None:
    load_target(options(indexed(directory, str)))


@pytest.mark.parametrize("way", ["above", "absolute", "below", "link"])
def test_an_index_leads_nowhere_else(way: str, directory: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    spelled = {"above": "../other/{}", "absolute": f"{other}/{{}}", "below": "sub/{}", "link": "{}"}[way]
    indexed(directory, spelled.format)
    for file in ("one.safetensors", "two.safetensors"):
        (directory / file).rename(other / file)
        if way == "link":
            (directory / file).symlink_to(other / file)
    refused(directory, "index.json names .*; only files next to it are read")


def test_the_hubs_cache_is_made_of_links(directory: Path, tmp_path: Path) -> None:
    indexed(directory, str)
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True), snapshot.mkdir(parents=True)
    for path in directory.iterdir():
        shutil.copy(path, blobs / path.name)
        (snapshot / path.name).symlink_to(blobs / path.name)
    load_target(options(snapshot))


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "gone.safetensors"}}', "[" * 100_000])
def test_an_index_that_is_none(text: str, directory: Path) -> None:
    (directory / f"{FILE}.index.json").write_text(text)
    refused(directory, re.escape(f"{FILE}.index.json") + " (is no index|names 'gone.safetensors', which is not there)")
