"""A target's files: damaged, incomplete, too many, elsewhere. All is refused in one line, whatever libraries raise for it."""

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

from drafttrain.api.decoding import generate
from drafttrain.core.errors import UserError
from drafttrain.data import DataOptions
from drafttrain.data.dataset import load_dataset
from drafttrain.data.records import Listed
from drafttrain.targets import TargetOptions
from drafttrain.targets.companion import companion
from drafttrain.targets.estimate import outline
from drafttrain.targets.load import EMBEDDED, load_shape, load_target, load_tokenizer
from tests.helpers import tiny_model, tiny_target

FILE = "model.safetensors"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with the embedded target's tokenizer. No test changes it."""
    folder = tmp_path_factory.mktemp("whole")
    config = tiny_model().config
    config.vocab_size = json.loads((EMBEDDED / "config.json").read_text())["vocab_size"]
    model = type(tiny_model())(config)
    model.save_pretrained(folder)
    for path in EMBEDDED.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def test_tokenizer_larger_than_embedding_refuses_texts_with_its_further_tokens_alone(directory: Path) -> None:
    tokenizer: Any = load_tokenizer(options(directory))
    tokenizer.add_tokens(["<image_soft_token>"], special_tokens=True)
    tokenizer.eos_token = "<image_soft_token>"
    tokenizer.save_pretrained(directory)
    loaded = load_target(options(directory))
    size = loaded.target.shape.vocab_size
    assert len(loaded.tokenizer) == size + 1 and max(loaded.target.stop_ids) < size
    assert len(generate(loaded, None, ["hi"], max_new_tokens=2)[0].tokens) == 2
    with pytest.raises(UserError, match=f"token {size}, which is none of the target's {size}"):
        generate(loaded, None, ["a <image_soft_token>"], max_new_tokens=2)
    rows = Listed("x", [{"text": text} for text in ("hi you", "hi <image_soft_token>", "a boy", "b c")])
    given: dict[str, Any] = {"progress": False, "records": rows, "vocab_size": size}
    with pytest.raises(UserError, match=rf"^x:row 2: token {size} \('<image_soft_token>'\) is none of the target's {size}"):
        load_dataset(DataOptions(held_out=0), loaded.tokenizer, **given)
    assert len(load_dataset(DataOptions(held_out=0, bad_records=1), loaded.tokenizer, **given).train) == 3
    tokenizer.add_tokens([f"<{i}>" for i in range(40)])
    tokenizer.save_pretrained(directory)
    with pytest.raises(UserError, match="give a matching pair"):
        load_target(options(directory))


@pytest.fixture
def directory(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(whole, tmp_path / "target")


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


def test_load_target_path_without_name_loads_hf_target(whole: Path) -> None:
    loaded = load_target(TargetOptions(path=str(whole)))
    assert loaded.path == str(whole) and loaded.description["name"] == "hf" and loaded.target.shape.blocks == 4
    assert TargetOptions().name == "embedded"


def test_weights_that_do_not_fill_architecture_are_named(whole: Path, directory: Path, subtests: pytest.Subtests) -> None:
    changes: list[tuple[Callable[[Tensors], Any], str]] = [
        (lambda t: without(t, "layers.2."), r"they lack model\.layers\.2\.input_layernorm\.weight, .* and 6 more"),
        (lambda t: without(t, "lm_head"), r"they lack lm_head\.weight"),
        (lambda t: without(t, "layers.3.mlp.up_proj"), r"they lack model\.layers\.3\.mlp\.up_proj\.weight; "),
        (lambda t: t.update({"model.layers.4.mlp.up_proj.weight": torch.ones(2)}), r"does not know model\.layers\.4\.mlp"),
        (lambda t: t.update({"model.norm.weight": torch.ones(5)}), r"in another shape model\.norm\.weight"),
        (lambda t: t.update({"adapter": torch.ones(2)}) or without(t, "layers.0."), r"lack .*; they have and .* adapter"),
    ]
    for change, said in changes:
        shutil.copy(whole / FILE, directory)
        rewritten(directory, change)
        with subtests.test(said=said):
            refused(directory, said)


def test_load_target_known_extra_weights_are_accepted(directory: Path) -> None:
    """Buffers that were saved, and modules that draft: numbered behind the last layer."""
    config = json.loads((directory / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    more = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.4.eh_proj.weight")
    rewritten(directory, lambda tensors: tensors.update({name: torch.ones(2) for name in more}))
    load_target(options(directory))
    rewritten(directory, lambda tensors: tensors.update({"model.layers.5.eh_proj.weight": torch.ones(2)}))
    refused(directory, r"layers\.5")


def test_weights_file_that_is_damaged_is_named(directory: Path, subtests: pytest.Subtests) -> None:
    b = (directory / FILE).read_bytes()
    damages = {
        "half": b[: len(b) // 2],
        "five bytes": b[:5],
        "empty": b"",
        "header too long": b"\xff" * 8 + b[8:],
        "no header": b[:8] + bytes(40) + b[48:],
        "more bytes": b + b"more",
    }
    for name, content in damages.items():
        (directory / FILE).write_bytes(content)
        with subtests.test(name):
            refused(directory, rf"{FILE} is damaged or cut off")


def test_target_config_of_wrong_values_is_refused_in_one_line(directory: Path, subtests: pytest.Subtests) -> None:
    """Whoever reads it: transformers raises errors of many kinds."""
    file, target = directory / "config.json", tiny_target()
    config = json.loads(file.read_text())
    readers: list[Callable[[TargetOptions], Any]] = [load_target, load_shape, outline]
    readers.append(lambda given: companion(target, given.path, None))
    wrong = [("rope_scaling", "x"), ("rope_parameters", "x"), ("hidden_act", "x\x1b[2J"), ("layer_types", 3)]
    wrong += [("model_type", "x"), ("model_type", "x\x07"), ("num_hidden_layers", "x"), ("num_attention_heads", 0)]
    wrong += [("hidden_size", "many"), ("hidden_size", -1), ("vocab_size", None)]
    for name, value in wrong:
        file.write_text(json.dumps(config | {name: value}))
        with subtests.test(**{name: value}):
            for read in readers if name != "hidden_act" else [load_target]:  # which the others do not look at
                with pytest.raises(UserError) as error:
                    read(options(directory))
                said = str(error.value)
                assert len(said) < 600 and str(directory) in said and not {"\n", "\x07", "\x1b"} & set(said)


def test_target_tokenizer_that_is_damaged_is_refused(directory: Path, subtests: pytest.Subtests) -> None:
    for content in (b"", b"{", b"[]", b"{}", b"null", b'{"model": {"type": "BPE"}}', b"\xff\xfe"):
        (directory / "tokenizer.json").write_bytes(content)
        with subtests.test(content=content), pytest.raises(UserError, match="has no tokenizer that transformers can load"):
            load_tokenizer(options(directory))


def test_target_tokenizer_whose_length_is_no_number_is_refused(directory: Path, subtests: pytest.Subtests) -> None:
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    for value in ("", "512", [512], {}):
        file.write_text(json.dumps(settings | {"model_max_length": value}))
        for read in (load_tokenizer, load_target):
            with subtests.test(value=value, read=read), pytest.raises(UserError, match="expected a number in model_max_length"):
                read(options(directory))


def test_companion_incomplete_draft_model_is_refused(directory: Path) -> None:
    rewritten(directory, lambda tensors: without(tensors, "layers.2."))
    with pytest.raises(UserError, match=r"drafter\.path .* they lack model\.layers\.2"):
        companion(tiny_target(), str(directory), None)


def test_companion_damaged_draft_tokenizer_is_refused(directory: Path) -> None:
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


def test_safetensors_index_naming_files_in_same_directory_is_loaded(directory: Path) -> None:
    load_target(options(indexed(directory, str)))


def test_weights_index_that_names_files_elsewhere_is_refused(whole: Path, tmp_path: Path, subtests: pytest.Subtests) -> None:
    other = tmp_path / "other"
    other.mkdir()
    ways = {"above": "../other/{}", "absolute": f"{other}/{{}}", "below": "sub/{}", "link": "{}"}
    for way, spelled in ways.items():
        directory = indexed(shutil.copytree(whole, tmp_path / way), spelled.format)
        for file in ("one.safetensors", "two.safetensors"):
            (directory / file).replace(other / file)
            if way == "link":
                (directory / file).symlink_to(other / file)
        with subtests.test(way):
            refused(directory, "index.json names .*; only files next to it are read")


def test_load_target_hub_cache_of_symlinks_is_loaded(directory: Path, tmp_path: Path) -> None:
    indexed(directory, str)
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True), snapshot.mkdir(parents=True)
    for path in directory.iterdir():
        shutil.copy(path, blobs / path.name)
        (snapshot / path.name).symlink_to(blobs / path.name)
    load_target(options(snapshot))


def test_weights_index_that_is_none_is_refused(directory: Path, subtests: pytest.Subtests) -> None:
    for text in ("{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "gone.safetensors"}}', "[" * 100_000):
        (directory / f"{FILE}.index.json").write_text(text)
        with subtests.test(text=text[:60]):
            refused(directory, re.escape(f"{FILE}.index.json") + " (is no index|names 'gone.safetensors', which is not there)")


def pickled(directory: Path, content: Any = None) -> Path:
    """Its weights, or another content, as a pickle."""
    file = directory / "pytorch_model.bin"
    torch.save(load_file(directory / FILE) if content is None else content, file)
    (directory / FILE).unlink()
    return file


def test_pickled_weights_are_read_as_tensors_alone(whole: Path, directory: Path) -> None:
    file = pickled(directory)
    found = load_target(options(directory)).target
    assert found.fingerprint == load_target(options(whole)).target.fingerprint
    halves = list(torch.load(file).items())
    listed = {}
    for number, part in enumerate((halves[:9], halves[9:]), start=1):
        torch.save(dict(part), directory / f"part-{number}.bin")
        listed |= {name: f"part-{number}.bin" for name, _ in part}
    file.unlink()
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    assert load_target(options(directory)).target.fingerprint == found.fingerprint
    listed["lm_head.weight"] = "../target.bin"
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    refused(directory, "only files next to it are read")


class Payload:
    """Code that a pickle would run."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


def test_pickled_weights_with_code_or_damage_are_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    file = pickled(directory, {"lm_head.weight": Payload()})
    refused(directory, "pytorch_model.bin is damaged, or holds more than tensors, which is never read")
    file.write_bytes(b"nothing of a kind")
    refused(directory, "pytorch_model.bin is damaged")
    file.write_bytes(b"")
    refused(directory, "pytorch_model.bin is damaged")
    assert not (tmp_path / "ran").exists()


def test_load_target_peft_adapter_names_its_base(directory: Path) -> None:
    (directory / FILE).unlink()
    (directory / "adapter_model.safetensors").touch()
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    refused(directory, "is a peft adapter of 'org/base', no whole model; name the base, or save the merged model")
    (directory / "adapter_config.json").write_text("{}")
    refused(directory, "names no base_model_name_or_path")
