"""Published drafters, written by hand: what they are taken for, what they draft, and what is wrong with them, in one line."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.drafters import families
from drafttrain.export import convert, parity
from drafttrain.export import external as directory
from drafttrain.export.convert import converted
from drafttrain.export.external import ExternalCheckpoint, fetched
from drafttrain.export.files import ExportSource
from drafttrain.export.formats.dflash import COPIES
from drafttrain.export.golden import made
from drafttrain.export.opened import Opened
from drafttrain.export.table import format_of
from drafttrain.model.shapes import LayerOptions
from drafttrain.runs.checkpoint_source import check_start
from drafttrain.targets.load import LoadedTarget
from tests.export_oracles import (
    causal_lm,
    dflash,
    dflash2,
    domino,
    dspark,
    eagle,
    eagle3,
    hydra,
    jetspec,
    lilicorr,
    medusa,
    mlp_speculator,
    peagle,
    redrafter,
    xpress,
)
from tests.export_oracles.check import points_of, target_parts
from tests.export_oracles.parts import Config, Point, Reading, TargetParts, Tensors
from tests.exports import LINEAR, TEXTS, deep, loaded
from tests.official import IDS, LAYOUTS, LLAMA, D, H, Made, V, copies, offsets, put


def anchored(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """A block whose slots are shifted and that has no head of its own, which no stack reads."""
    config, tensors = Config.of(directory), Tensors(directory)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        tensors.take(name, V, H)
    block = dflash.raw_block(config, config, None, first=0)
    return dflash.reading(block, tensors, ("fc", "hidden_norm"), target, points)


READERS = {  # of layouts whose directories have all that a stack's reader asks for
    "eagle3": eagle3.portable("vllm"),
    "eagle3, speculators": eagle3.speculators,
    "peagle": peagle.portable,
    "peagle, speculators": peagle.speculators,
    "pard": causal_lm.parallel,
    "eagle": eagle.reader("sglang"),
    "medusa, vllm": medusa.vllm,
    "medusa": medusa.official,
    "hydra": hydra.read,
    "redrafter": redrafter.read,
    "mlp_speculator": mlp_speculator.read,
    "dflash": dflash.zlab("vllm"),
    "dflash, DeepSpec": anchored,
    "dspark": dspark.deepspec("official"),
    "dflash2": dflash2.zlab("vllm"),
    "jetspec": jetspec.reader("official"),
    "domino": domino.sglang,
    "dflash, speculators": dflash.speculators,
    "dflash, transformers": dflash.transformers,
    "dspark, speculators": dspark.speculators,
    "dflash2, speculators": dflash2.speculators,
    "xpress": xpress.vllm,
    "lilicorr": lilicorr.reader("vllm"),
}
NETWORK = {
    "eagle3": {
        "target_layer_ids": [0, 1, 2],
        "draft_vocab": D,
        "fc_norm": False,
        "norm_output": False,
        "norm_before_residual": False,
    },
    "eagle3, speculators": {"target_layer_ids": [0, 1, 2], "draft_vocab": D, "norm_before_residual": True},
    "peagle": {"target_layer_ids": [0, 1, 2], "layers": 3, "mask_token": 60, "draft_vocab": D, "fc_norm": False},
    "peagle, speculators": {"layers": 3, "mask_token": 60, "norm_before_residual": True},
    "pard": {"source": "hf", "mask_token": 60},
    "eagle": {"bias": True},
    "medusa, vllm": {"heads": 3, "layers": 1, "init": "copy"},
    "medusa": {"heads": 3, "layers": 1, "init": "copy"},
    "hydra": {"heads": 2, "layers": 2, "prefix_layer": False},
    "redrafter": {"layers": 2, "length": 4},
    "mlp_speculator": {"n_predict": 3, "inner_dim": 24, "tie_weights": False, "scale_input": True},
    "dflash": {"block_size": 4, "layers": 2, "target_layer_ids": [0, 1, 2], "mask_token": 63, "slots": "in_place"},
    "dflash, DeepSpec": {"block_size": 4, "layers": 2, "target_layer_ids": [0, 1, 2], "mask_token": 63, "slots": "shifted"},
    "dspark": {"block_size": 4, "layers": 2, "target_layer_ids": [0, 1, 2], "mask_token": 63, "slots": "shifted", "rank": 8},
    "dflash2": {"block_size": 4, "slots": "in_place", "rank": 8, "candidates": 6, "group": 16, "causal": False},
    "jetspec": {"block_size": 4, "slots": "in_place", "causal": True},
    "domino": {"block_size": 4, "slots": "in_place", "state": 12, "rank": 8, "causal": False},
    "dspark, speculators": {"block_size": 4, "layers": 2, "target_layer_ids": [0, 1, 2], "slots": "shifted", "rank": 8},
    "dflash2, speculators": {"block_size": 4, "layers": 2, "slots": "in_place", "rank": 8, "candidates": 6, "group": 16},
    "xpress": {"block_size": 4, "layers": 2, "target_layer_ids": [0, 1, 2], "slots": "in_place", "rank": 8, "mlp_hidden": 12},
    "lilicorr": {
        "block_size": 4,
        "layers": 2,
        "candidates": 4,
        "hidden_size": 16,
        "factor_dim": 12,
        "corrector_layers": 2,
        "heads": 2,
        "mlp_ratio": 1.5,
        "logit_scale": 6.0,
        "vector_eps": 0.001,
    },
    "draft_model": {"source": "hf", "lora_rank": 0},
}
RENAMED = {  # layouts with other names for the same tensors
    "dspark, early": ("dspark", {}),
    "domino, early": ("domino", {}),
    "dspark, Model-Optimizer": (
        "dspark",
        {
            "markov_w1": "markov_head.markov_w1",
            "markov_w2": "markov_head.markov_w2",
            "confidence_proj": "confidence_head.proj",
        },
    ),
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16}
OLDER = {"up_proj.": "0.", "down_proj.": "2."}
Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(convert, "cache_home", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def imported(folder: Path, target: LoadedTarget | None = None) -> tuple[Opened, list[str]]:
    """(the drafter, what was said)."""
    said: list[str] = []
    target = target or loaded()
    return Opened.of(converted(ExternalCheckpoint(folder), target, said.append), target), said


def changed(layout: str, change: Change) -> Made:
    config, tensors, file = LAYOUTS[layout]()
    change(config, tensors)
    return config, {name: x.contiguous() for name, x in tensors.items()}, file


OTHER_NETWORKS: dict[str, tuple[str, Change, str]] = {
    "biases": (
        "eagle3",
        lambda _, tensors: tensors.update({"midlayer.self_attn.q_proj.bias": torch.zeros(32)}),
        r"has unknown tensors layers\.0\.self_attn\.q_proj\.bias \(biases: drafters here have none\)",
    ),
    "embedding among the target's layers": (
        "eagle3, DeepSpec",
        lambda config, _: config.update(target_layer_ids=[-1, 0, 1]),
        "name the target's embedding",
    ),
    "the same of a block drafter": (
        "dflash",
        lambda config, _: config["dflash_config"].update(target_layer_ids=[-1, 0, 1]),
        "names -1, the target's embedding",
    ),
    "embedding in every layer": (
        "eagle3, DeepSpec",
        lambda config, tensors: (
            config.update(num_hidden_layers=2),
            tensors.update({"layers.1.hidden_norm.weight": torch.ones(H)}),
        ),
        "each of its 2 layers reads the embedding",
    ),
}


@pytest.mark.parametrize("case", OTHER_NETWORKS)
def test_import_of_another_network_names_what_is_different(case: str, tmp_path: Path) -> None:
    layout, change, words = OTHER_NETWORKS[case]
    with pytest.raises(UserError, match=words) as refused:
        imported(put(tmp_path / "hand", changed(layout, change)))
    assert "this layout is not supported" in str(refused.value)


@pytest.mark.parametrize("layout", RENAMED)
def test_import_layout_of_other_names_has_the_tensors_of_its_family(layout: str, tmp_path: Path) -> None:
    family, renamed = RENAMED[layout]
    _, tensors, _ = LAYOUTS[layout]()
    found, _ = imported(put(tmp_path / "hand", LAYOUTS[layout]()))
    state = found.drafter.state_dict()
    assert found.meta.family == family and found.meta.options["slots"] == ("shifted" if family == "dspark" else "in_place")
    for name, tensor in tensors.items():
        head, _, rest = name.removeprefix("logit_head.").partition(".")
        if name not in COPIES:
            assert torch.equal(state[f"{renamed.get(head, head)}.{rest}"], tensor)


@pytest.mark.parametrize("layout", READERS)
def test_import_published_layout_drafts_as_independent_reader(layout: str, tmp_path: Path) -> None:
    """As an independent reader of the stack reads them."""
    folder = put(tmp_path / "hand", LAYOUTS[layout]())
    found, _ = imported(folder)
    golden = made(found, TEXTS)
    reading = READERS[layout](folder, target_parts(found), points_of(golden))
    assert float(parity.gaps(torch.stack(reading.logits), golden).max()) < 1.0
    options = found.meta.options | found.drafter.resolved_options()
    assert {key: options[key] for key in NETWORK.get(layout, {})} == NETWORK.get(layout, {})
    assert not any(options.get("layer", {}).values())


def test_import_lilicorr_older_tensor_names_give_same_drafter(tmp_path: Path) -> None:
    names = {"feature_norm.": "feature_mlp.0.", "feature_mlp.up_proj.": "feature_mlp.1."}
    names |= {"feature_mlp.down_proj.": "feature_mlp.3."}
    names |= {f"lilicorr.layers.{i}.mlp.{x}": f"lilicorr.layers.{i}.mlp.{y}" for i in (0, 1) for x, y in OLDER.items()}

    def older(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("lilicorr.")]:
            tensors[reduce(lambda text, pair: text.replace(*pair), names.items(), name)] = tensors.pop(name)

    (one, _), (two, _) = (
        imported(put(tmp_path / name, made))
        for name, made in (("newer", LAYOUTS["lilicorr"]()), ("older", changed("lilicorr", older)))
    )
    assert one.tensors.keys() == two.tensors.keys()
    assert all(torch.equal(x, two.tensors[name]) for name, x in one.tensors.items())


def test_import_draft_model_drafts_as_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = put(tmp_path / "hand", LAYOUTS["draft_model"]())
    found, _ = imported(folder)
    golden, model = made(found, TEXTS), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    row = int(golden.count_P[0])
    text = torch.cat([golden.text_PT[0, :row], golden.root_P[:1], golden.draft_PK[0, :-1]])
    assert model(text[None]).logits[0, row:].argmax(-1).tolist() == golden.draft_PK[0].tolist()
    assert found.meta.options["path"] == str(folder)


def tied(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["tie_word_embeddings"] = True
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def tied_once(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tied(config, tensors)
    del tensors["lm_head.weight"]


def test_import_tied_head_stored_once_or_twice_gives_same_drafter(tmp_path: Path) -> None:
    drafters = [imported(put(tmp_path / str(i), changed("draft_model", c)))[0] for i, c in enumerate((tied, tied_once))]
    assert drafters[0].meta.sha256 == drafters[1].meta.sha256
    model: Any = drafters[0].drafter.language_model()
    assert model.model.lm_head.weight.data_ptr() == model.model.model.embed_tokens.weight.data_ptr()
    with pytest.raises(UserError, match=r"says tie_word_embeddings, but lm_head.weight is not the embedding"):
        imported(put(tmp_path / "bad", changed("draft_model", lambda config, _: config.update(tie_word_embeddings=True))))


def test_import_padded_vocabulary_is_cut_to_target_vocabulary(tmp_path: Path) -> None:
    def pad(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["vocab_size"] = V + 8
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.cat([tensors[name], torch.ones(8, H)]).bfloat16()

    folder = put(tmp_path / "hand", changed("draft_model", pad))
    loaded().tokenizer.save_pretrained(folder)
    target = copy.copy(loaded().target)
    target.tokenizer = loaded().tokenizer
    found, _ = imported(folder, dataclasses.replace(loaded(), target=target))
    whole = LAYOUTS["draft_model"]()[1]
    assert torch.equal(found.tensors["lm.model.lm_head.weight"], whole["lm_head.weight"].bfloat16())


def test_import_eagle3_both_layer_prefixes_give_same_drafter(tmp_path: Path) -> None:
    first, second = (
        imported(put(tmp_path / str(i), LAYOUTS[name]()))[0] for i, name in enumerate(("eagle3", "eagle3, layers.0"))
    )
    assert first.meta.options == second.meta.options and first.meta.sha256 == second.meta.sha256


def no_ids(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del config[IDS], config["eagle_config"]


PLACES: list[tuple[Change, list[int]]] = [
    (lambda config, _: config.pop(IDS), [0, 1, 2]),  # nested alone: the outputs' numbers
    (lambda config, _: config["eagle_config"].pop(IDS), [0, 1, 2]),  # top level alone: the inputs'
    (lambda config, _: config.pop("eagle_config"), [0, 1, 2]),
    (lambda config, _: config.update({IDS: [2, 4], "eagle_config": {}}), [1, 3]),
    (lambda config, _: (no_ids(config, {}), config.update(target_layer_ids=[0, 2])), [0, 2]),  # DeepSpec's: the outputs'
]


def test_import_eagle3_layer_ids_are_read_from_any_field(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for number, (change, taps) in enumerate(PLACES):
        config, tensors, file = changed("eagle3", change)
        tensors["fc.weight"] = tensors["fc.weight"][:, : len(taps) * H].contiguous()
        with subtests.test(number=number):
            found, _ = imported(put(tmp_path / str(number), (config, tensors, file)))
            assert found.meta.options["target_layer_ids"] == taps


def test_import_eagle3_missing_layer_ids_use_official_defaults(tmp_path: Path) -> None:
    folder = put(tmp_path / "hand", changed("eagle3", no_ids))
    assert imported(folder, deep())[0].meta.options["target_layer_ids"] == [1, 3, 4]
    with pytest.raises(UserError, match=r"names no layer ids, and the usual ones are \[2, 2, 1\]; of a target of 4 blocks"):
        imported(folder)


def absolute(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] += torch.arange(D)


def test_import_eagle3_absolute_d2t_becomes_offsets(tmp_path: Path) -> None:
    right, said = imported(put(tmp_path / "right", LAYOUTS["eagle3"]()))
    assert not any("d2t holds" in line for line in said)
    for number, change in enumerate((absolute, lambda c, t: (absolute(c, t), t.pop("t2d")))):
        found, said = imported(put(tmp_path / str(number), changed("eagle3", change)))
        assert found.meta.sha256 == right.meta.sha256
        assert sum("d2t holds the target's ids; they are stored as offsets" in line for line in said) == 1


def modelopt(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """As ModelOpt exports, but for t2d: draft tokens by their frequency, and YaRN for long contexts."""
    order = torch.randperm(D, generator=torch.Generator().manual_seed(7))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    tensors["d2t"] = (tensors["d2t"] + torch.arange(D))[order] - torch.arange(D)
    del config[IDS]
    own = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
    config["eagle_config"] |= own | {"next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1}
    config |= {"rope_scaling": dict(YARN), "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "use_cache": True}


def test_import_eagle3_of_modelopt_drafts_as_independent_reader(tmp_path: Path) -> None:
    folder = put(tmp_path / "hand", changed("eagle3", modelopt))
    found, said = imported(folder)
    assert found.meta.options["layer"]["rope_scaling"] == YARN
    assert "note: d2t does not ascend: the rows of the head are sorted by the target's ids" in said
    golden = made(found, TEXTS)
    read = eagle3.portable("trtllm")
    reading = read(folder, target_parts(found), points_of(golden))
    assert float(parity.gaps(torch.stack(reading.logits), golden).max()) < 1.0
    plain, _ = imported(put(tmp_path / "plain", LAYOUTS["eagle3"]()))
    bare, _ = imported(put(tmp_path / "bare", changed("eagle3", lambda c, t: (modelopt(c, t), t.pop("t2d")))))
    assert found.meta.sha256 == plain.meta.sha256 == bare.meta.sha256


def test_import_eagle3_missing_t2d_is_reconstructed(tmp_path: Path) -> None:
    right, _ = imported(put(tmp_path / "right", LAYOUTS["eagle3"]()))
    found, _ = imported(put(tmp_path / "bare", changed("eagle3", lambda _, tensors: tensors.pop("t2d"))))
    assert found.meta.sha256 == right.meta.sha256


def test_import_eagle3_missing_norm_before_residual_is_false(tmp_path: Path) -> None:
    found, said = imported(
        put(tmp_path / "a", changed("eagle3, speculators", lambda config, _: config.pop("norm_before_residual")))
    )
    assert found.meta.options["norm_before_residual"] is False
    assert any("does not say norm_before_residual: false, as speculators takes it (vLLM takes true)" in line for line in said)
    found, said = imported(put(tmp_path / "b", changed("eagle3", lambda config, _: config.pop("norm_before_residual"))))
    assert found.meta.options["norm_before_residual"] is False and len(said) == 1


def test_import_eagle3_layer_shape_other_than_target_is_kept(tmp_path: Path) -> None:
    """As most published ones are: no rope_theta means 10,000, whatever the target's is."""

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for key in ("rope_theta", "rms_norm_eps", "head_dim"):
            del config[key]
        config |= {"rope_scaling": {"type": "linear", "factor": 2.0}, "intermediate_size": 24}
        for name in ("gate", "up"):
            tensors[f"midlayer.mlp.{name}_proj.weight"] = tensors[f"midlayer.mlp.{name}_proj.weight"][:24]
        tensors["midlayer.mlp.down_proj.weight"] = tensors["midlayer.mlp.down_proj.weight"][:, :24]

    model: Any = loaded().target.model
    theta = model.config.rope_parameters["rope_theta"]
    found, _ = imported(put(tmp_path / "hand", changed("eagle3", change)))
    assert theta == 10000.0
    assert LayerOptions.of(found.meta.options["layer"]) == LayerOptions(intermediate_size=24, rope_scaling=LINEAR)


def test_import_eagle3_with_latent_attention_drafts_as_independent_reader(tmp_path: Path) -> None:
    folder = put(tmp_path / "hand", LAYOUTS["eagle3, latents"]())
    found, _ = imported(folder)
    golden = made(found, TEXTS)
    for stack in ("vllm", "sglang"):
        reading = eagle3.portable(stack)(folder, target_parts(found), points_of(golden))
        assert float(parity.gaps(torch.stack(reading.logits), golden).max()) < 1.0
    layer, scaling = LayerOptions.of(found.meta.options["layer"]), YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
    widths = {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    assert layer.rope_scaling == scaling | {"beta_fast": 32, "beta_slow": 1}
    layer.rope_scaling = None
    assert layer == LayerOptions(kv_heads=4, head_dim=4, kv_lora_rank=12, q_lora_rank=10, **widths)
    for number, (change, says) in enumerate(LATENT_MISTAKES):
        with pytest.raises(UserError, match=says):
            imported(put(tmp_path / str(number), changed("eagle3, latents", change)))


LATENT_MISTAKES: list[tuple[Change, str]] = [
    (lambda config, _: config.pop("v_head_dim"), "config.json does not say v_head_dim, which the drafter cannot be built"),
    (lambda config, _: config.update(rope_interleave=False), "but layers with latent attention rotate neighbouring values"),
    (lambda config, _: config["rope_scaling"].pop("mscale"), "in latent attention engines know yarn alone"),
    (lambda config, _: config.update(kv_lora_rank=11), r"kv_a_proj_with_mqa.weight is \[16, 64\], by config.json .*\[15, 64\]"),
]


@pytest.mark.parametrize(("config_bias", "zero", "bias"), [(False, True, False), (True, True, True), (True, False, True)])
def test_import_eagle_zero_bias_without_flag_is_dropped(config_bias: bool, zero: bool, bias: bool, tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["bias"] = config_bias
        if zero:
            tensors["fc.bias"].zero_()

    found, _ = imported(put(tmp_path / "hand", changed("eagle", change)))
    assert found.meta.options["bias"] is bias and ("fc.bias" in found.tensors) is bias


def test_import_eagle3_copied_target_embedding_is_dropped(tmp_path: Path) -> None:
    embedding = loaded().target.model.get_input_embeddings().weight.detach()
    for number, dtype in enumerate((torch.float32, torch.bfloat16)):
        made = changed("eagle3", lambda _, t, d=dtype: t.update({"embed_tokens.weight": embedding.to(d)}))
        found, _ = imported(put(tmp_path / str(number), made))
        assert "embed_tokens.weight" not in found.tensors
    found, said = imported(
        put(tmp_path / "own", changed("eagle3", lambda _, t: t.update({"embed_tokens.weight": embedding.flip(0)})))
    )
    assert found.meta.options["own_embedding"] and torch.equal(found.tensors["embed_tokens.weight"], embedding.flip(0))
    assert "note: embed_tokens.weight is not this target's embedding: it is the drafter's own" in said
    other = changed("eagle3", lambda _, t: t.update({"embed_tokens.weight": embedding[1:]}))
    with pytest.raises(UserError, match=r"embed_tokens.weight is \[63, 32\], this target's embedding is \[64, 32\]"):
        imported(put(tmp_path / "other", other))


@pytest.mark.parametrize("layout", ["dflash", "dspark, speculators"])
def test_import_block_drafter_of_part_of_vocabulary_drafts_as_independent_reader(layout: str, tmp_path: Path) -> None:
    """In any order of its draft tokens."""

    def part(config: dict[str, Any], tensors: dict[str, Tensor], order: Tensor) -> None:
        d2t, tensors["t2d"] = offsets()
        tensors["d2t"] = (d2t + torch.arange(D))[order] - torch.arange(D)
        tensors["lm_head.weight"] = torch.randn(D, H, generator=torch.Generator().manual_seed(4))[order]
        if "markov_head.markov_w2.weight" in tensors:
            tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][:D][order]
        config["draft_vocab_size"] = D

    orders = {"ascending": torch.arange(D), "by frequency": torch.randperm(D, generator=torch.Generator().manual_seed(7))}
    found = {}
    for name, order in orders.items():
        folder = put(tmp_path / name, changed(layout, lambda c, t, order=order: part(c, t, order)))
        found[name], said = imported(folder)
        assert any("d2t does not ascend" in line for line in said) is (name == "by frequency")
        golden = made(found[name], TEXTS)
        reading = READERS[layout](folder, target_parts(found[name]), points_of(golden))
        assert float(parity.gaps(torch.stack(reading.logits), golden).max()) < 1.0
    assert found["ascending"].meta.options["draft_vocab"] == D
    assert found["ascending"].meta.sha256 == found["by frequency"].meta.sha256


def test_import_eagle3_of_deepspec_drafts_as_same_weights_of_speculators(tmp_path: Path) -> None:
    config, tensors, file = LAYOUTS["eagle3, DeepSpec"]()
    one, _ = imported(put(tmp_path / "deepspec", (config, tensors, file)))
    other, _, _ = LAYOUTS["eagle3, speculators"]()
    other |= {"norm_before_residual": False, "draft_vocab_size": V}
    other["transformer_layer_config"] |= {"model_type": "qwen3"}
    two, _ = imported(put(tmp_path / "speculators", (other, tensors, file)))
    assert one.meta.options["qk_norm"] and one.meta.options["target_layer_ids"] == [0, 1, 2]
    assert (one.meta.options, one.meta.sha256) == (two.meta.options, two.meta.sha256)
    golden = made(two, TEXTS)
    reading = READERS["eagle3, speculators"](tmp_path / "speculators", target_parts(two), points_of(golden))
    assert float(parity.gaps(torch.stack(reading.logits), golden).max()) < 1.0


@pytest.mark.parametrize(
    "layout",
    ["dflash, speculators", "dspark, speculators", "dflash2, speculators", "xpress", "xpress, speculators", "lilicorr"],
)
def test_import_block_drafter_copies_of_target_matrices_are_dropped(layout: str, tmp_path: Path) -> None:
    found, _ = imported(put(tmp_path / "hand", changed(layout, lambda _, t: t.update(copies()))))
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(found.tensors)
    other = changed(layout, lambda _, t: t.update({"lm_head.weight": copies()["lm_head.weight"].flip(0)}))
    with pytest.raises(UserError, match=r"lm_head.weight is not this target's output matrix, which drafters here use"):
        imported(put(tmp_path / "other", other))


def test_import_weights_keep_their_dtype(tmp_path: Path) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        narrow = changed("eagle3", lambda _, t, d=dtype: t.update({n: x.to(d) for n, x in t.items() if x.is_floating_point()}))
        found, _ = imported(put(tmp_path / str(dtype), narrow))
        assert {x.dtype for x in found.tensors.values() if x.is_floating_point()} == {dtype}
        assert found.meta.imported is not None and found.meta.imported["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    ("name", "file"), [("medusa", "medusa_lm_head.pt"), ("eagle3", "pytorch_model.bin"), ("draft_model", "pytorch_model.bin")]
)
def test_import_pickle_is_converted_once_to_safetensors(
    name: str, file: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors, _ = LAYOUTS[name]()
    folder = put(tmp_path / "hand", (config, tensors, file))
    found, said = imported(folder)
    right, _ = imported(put(tmp_path / "safe", LAYOUTS[name]()))
    assert found.meta.sha256 == right.meta.sha256
    assert any(line.startswith(f"note: {file} is a pickle; only its tensors were read, and they are kept") for line in said)
    assert sorted(path.name for path in folder.iterdir()) == sorted(["config.json", file])
    monkeypatch.setattr(convert, "taken", lambda *_: pytest.fail("converted again"))
    assert imported(folder)[0].meta == found.meta
    monkeypatch.setattr(directory, "load_file", lambda *_: pytest.fail("read again"))
    assert imported(tmp_path / "safe")[0].meta == right.meta
    assert len(list((cache / "imports").iterdir())) == 2


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("code in a pickle ran",)


def test_import_pickle_with_code_is_refused_and_not_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = put(tmp_path / "hand", (*LAYOUTS["medusa"]()[:2], "medusa_lm_head.pt"))
    torch.save({"0.0.linear.weight": Evil()}, folder / "medusa_lm_head.pt")
    with pytest.raises(UserError, match=r"medusa_lm_head.pt: damaged, cut off, or no tensors"):
        imported(folder)
    assert "code in a pickle ran" not in capsys.readouterr().out


def test_import_medusa_head_count_comes_from_weights(tmp_path: Path) -> None:
    """As in the first published heads."""
    found, said = imported(put(tmp_path / "hand", changed("medusa", lambda config, _: config.update(medusa_num_heads=2))))
    assert found.meta.options["heads"] == 3
    assert "note: config.json says medusa_num_heads 2, its weights have 3 heads: 3 is used" in said


def test_import_medusa_missing_biases_become_zeros(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["medusa_fc_bias"] = False
        for name in [name for name in tensors if name.endswith("bias")]:
            del tensors[name]

    found, _ = imported(put(tmp_path / "hand", changed("medusa, vllm", change)))
    biases = [x for name, x in found.tensors.items() if name.endswith("bias")]
    assert len(biases) == 3 and not any(x.any() for x in biases)


def test_import_mlp_speculator_tied_weights_stored_once_give_same_drafter(tmp_path: Path) -> None:
    def tied(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["tie_weights"] = True
        for name in list(tensors):
            _, part, stage, _ = name.split(".")
            first = 1 if part == "proj" else 0
            if int(stage) > first:
                tensors[name] = tensors[name.replace(f".{stage}.", f".{first}.")].clone()

    def once(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tied(config, tensors)
        for name in [n for n in tensors if ".2." in n or (".1." in n and "proj" not in n)]:
            del tensors[name]

    both = [imported(put(tmp_path / str(i), changed("mlp_speculator", c)))[0] for i, c in enumerate((tied, once))]
    assert both[0].meta.sha256 == both[1].meta.sha256 and both[0].meta.options["tie_weights"]
    with pytest.raises(UserError, match=r"says tie_weights, but speculator.emb.1.weight is not that of stage 0"):
        imported(put(tmp_path / "bad", changed("mlp_speculator", lambda config, _: config.update(tie_weights=True))))


def narrowed(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["midlayer.self_attn.q_proj.weight"] = tensors["midlayer.self_attn.q_proj.weight"][:16]


def put_in(name: str, value: Tensor) -> Change:
    return lambda _, tensors: tensors.update({name: value})


def saying(**fields: Any) -> Change:
    """Fields of config.json."""
    return lambda config, _: config.update(fields)


def inside(**fields: Any) -> Change:
    """Fields of the part that describes the layers."""
    keys = ("dflash_config", "transformer_layer_config")
    return lambda config, _: next(config[key] for key in keys if key in config).update(fields)


HALF = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}


MISTAKES: dict[str, tuple[str, Change, str]] = {
    "unknown": (
        "eagle3",
        lambda c, t: t.pop("fc.weight"),
        r"no known kind of drafter: architectures \['LlamaForC.*known: port",
    ),
    "another hidden size": (
        "eagle3",
        lambda c, t: c.update(hidden_size=48),
        "its hidden size is 48, this target's is 32; give the",
    ),
    "another vocabulary": ("medusa, vllm", lambda c, t: c.update(vocab_size=99), "its vocab_size is 99, this target's is 64"),
    "another depth": ("dflash", lambda c, t: c.update(num_target_layers=36), "its num_target_layers is 36, this target's is 4"),
    "missing": ("eagle3", lambda c, t: t.pop("norm.weight"), "model.safetensors lacks norm.weight, according to config.json"),
    "unknown tensors": (
        "eagle3",
        put_in("layers.1.x", torch.ones(1)),
        r"has unknown tensors layers\.1\.x, according to config.json; this layout is not supported$",
    ),
    "no place": (
        "medusa, vllm",
        put_in("token_map", torch.ones(1)),
        r"has unknown tensors token_map, for which drafters of medusa have no place .*; this layout is not supported$",
    ),
    "a bias of attention": (
        "eagle",
        put_in("layers.0.self_attn.q_proj.bias", torch.ones(32)),
        "has unknown tensors layers.0.self_attn",
    ),
    "shape": ("eagle3", narrowed, r"q_proj.weight is \[16, 64\], by config.json and this target it should be \[32, 64\]"),
    "NaN": ("eagle3", put_in("norm.weight", torch.full((H,), torch.nan)), "norm.weight holds NaN or infinity"),
    "dtype": (
        "eagle3",
        put_in("norm.weight", torch.ones(H).to(torch.float8_e4m3fn)),
        "norm.weight is torch.float8_e4m3fn; weights",
    ),
    "whole numbers": (
        "eagle3",
        put_in("norm.weight", torch.ones(H, dtype=torch.int64)),
        "norm.weight is torch.int64, torch.float32 is",
    ),
    "d2t of floats": ("eagle3", put_in("d2t", torch.zeros(D)), "d2t is torch.float32"),
    "d2t beyond": (
        "eagle3",
        put_in("d2t", torch.full((D,), 40)),
        "d2t gives the tokens that t2d marks neither as offsets nor as ids",
    ),
    "no d2t": ("eagle3", lambda c, t: t.pop("d2t"), "it drafts 40 of this target's 64 tokens, but has no d2t"),
    "draft vocabulary": (
        "eagle3",
        lambda c, t: c.update(draft_vocab_size=41),
        "draft_vocab_size is 41, lm_head.weight has 40 rows",
    ),
    "layer ids": (
        "eagle3",
        lambda c, t: c.update({IDS: [0, 1, 2]}),
        r"contradict each other, .* means \[0, 1, 2\], .* in eagle_config means \[1, 2, 3\]; correct one",
    ),
    "layer ids of outputs": (
        "eagle3",
        lambda c, t: c.update(target_layer_ids=[1, 2, 3]),
        r"contradict each other, .*, target_layer_ids means \[2, 3, 4\]; correct one",
    ),
    "a layer too many": (
        "eagle3",
        lambda c, t: c.update({IDS: [1, 2, 5], "eagle_config": {}}),
        r"layer ids are \[1, 2, 5\]; of a",
    ),
    "two layers": (
        "eagle3",
        lambda c, t: c.update(num_hidden_layers=2),
        r"model.safetensors lacks layers\.1\.input_layernorm\.weight, ",
    ),
    "a field of a rotation": (
        "eagle3",
        lambda c, t: c.update(rope_scaling=YARN | {"attn_factor": 1.0}),
        "rope_scaling of the type yarn has no attn_factor; it has factor",
    ),
    "an unheard rotation": ("eagle3", lambda c, t: c.update(rope_scaling={"rope_type": "su"}), "of the type 'su'; layers"),
    "dynamic positions": (
        "eagle3",
        lambda c, t: c.update(rope_scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=64),
        "its positions are scaled dynamically beyond 64, this target has 512",
    ),
    "GELU": (
        "eagle",
        lambda c, t: c.update(hidden_act="gelu"),
        "hidden_act is 'gelu', but drafter layers are gated by SiLU",
    ),
    "a window": (
        "dflash",
        lambda c, t: c.update(layer_types=["sliding_attention"] * 2),
        "sliding_window is None, and layers have windows; a number",
    ),
    "a kind too few": (
        "dflash",
        lambda c, t: c.update(layer_types=["sliding_attention"], sliding_window=8),
        "layer_types names 1 layers, num_hidden_layers is 2",
    ),
    "windows that are off": (
        "dflash",
        lambda c, t: c.update(layer_types=["sliding_attention"] * 2, sliding_window=8, use_sliding_window=False),
        "use_sliding_window is False, but layer_types has layers with a window",
    ),
    "a causal head that is not": (
        "jetspec",
        lambda c, t: c.update(is_causal=False),
        "causal_head is true, but is_causal or causal, which engines follow, is false; correct one of them",
    ),
    "two block sizes": (
        "dflash",
        lambda c, t: c["dflash_config"].update(block_size=5),
        "block_size is 4 at the top level and 5 in dflash_config; correct one of them",
    ),
    "no block size": ("dflash", lambda c, t: c.pop("block_size"), "dflash_config does not say block_size"),
    "a draft vocabulary": (
        "dflash",
        lambda c, t: (c.update(draft_vocab_size=D), t.update({"d2t": offsets()[0]})),
        "it drafts 40 of the target's 64 tokens, which here only dflash and dspark do, with an lm_head of their own; take",
    ),
    "a draft vocabulary, not said": (
        "dflash2",
        lambda c, t: t.update({"d2t": offsets()[0]}),
        "it drafts 40 of the target's 64 tokens",
    ),
    "a draft vocabulary, speculators": (
        "dspark, speculators",
        lambda c, t: c.update(draft_vocab_size=D),
        "it drafts 40 of the target's 64 tokens",
    ),
    "a larger draft vocabulary": ("dspark", lambda c, t: c.update(draft_vocab_size=99), "its draft_vocab_size is 99, this"),
    "slots of speculators": (
        "dspark, speculators",
        lambda c, t: c.pop("sample_from_anchor"),
        "does not say sample_from_anchor, for which vLLM takes false here and SGLang true; add it as the drafter was trained",
    ),
    "a head without tensors": (
        "dflash, DeepSpec",
        lambda c, t: c.update(markov_rank=256),
        "markov_rank is 256, but there are no markov_head tensors; only 0 can be imported",
    ),
    "a gated bias, DeepSpec": ("dspark", lambda c, t: c.update(markov_head_type="rnn"), "markov_head_type is 'rnn'"),
    "no confidence, DeepSpec": ("dspark", lambda c, t: c.update(enable_confidence_head=False), "enable_confidence_head is F"),
    "another target's head": (
        "dspark",
        lambda c, t: t["lm_head.weight"].mul_(2),
        "lm_head.weight is not this target's output matrix",
    ),
    "scaled embeddings": (
        "dflash",
        lambda c, t: c["dflash_config"].update(input_embedding_scale=2),
        "input_embedding_scale is 2, this target's own is 1, which drafters here use; give the target",
    ),
    "no number": (
        "jetspec",
        lambda c, t: c.update(input_embedding_scale="2"),
        "input_embedding_scale is '2'; a number is needed",
    ),
    "scaled logits": (
        "dflash2",
        lambda c, t: c["dflash_config"].update(output_multiplier=0.5),
        "output_multiplier is 0.5, this target's own is 1, which drafters here use; give the target",
    ),
    "a label that is not said": (
        "domino",
        lambda c, t: c["dflash_config"].pop("shift_label"),
        "dflash_config does not say shift_label",
    ),
    "a label that is no flag": (
        "domino",
        lambda c, t: c["dflash_config"].update(shift_label="yes"),
        "shift_label is 'yes'; true or false is needed",
    ),
    "a longer pure prefix": (
        "domino",
        lambda c, t: c["dflash_config"].update(pure_draft_prefix_len=2),
        "pure_draft_prefix_len is 2, but here only the first draft comes from its slot alone",
    ),
    "two ranks": ("domino", lambda c, t: c.update(emb_dim=9), "emb_dim is 9 at the top level and 8 in dflash_config"),
    "no mask": (
        "dflash",
        lambda c, t: c["dflash_config"].pop("mask_token_id"),
        "config.json's dflash_config does not say mask_token_id",
    ),
    "another head": ("hydra", lambda c, t: c.update(hydra_head_arch="prefix-mlp"), "hydra_head_arch is 'prefix-mlp'"),
    "a projection": ("redrafter", lambda c, t: c.update(exit_dim=16), "exit_dim is 16, after a projection"),
    "a gated bias": (
        "dspark, speculators",
        lambda c, t: c.update(markov_head_type="gated"),
        "markov_head_type is 'gated', but here the token before gives a plain bias",
    ),
    "no confidence": (
        "dspark, speculators",
        lambda c, t: c.update(enable_confidence_head=False),
        "enable_confidence_head is False",
    ),
    "three taps": ("dflash2, speculators", lambda c, t: c.update(conv_kernel_size=3), "conv_kernel_size is 3"),
    "shifted slots": ("xpress", lambda c, t: c.update(sample_from_anchor=True), "sample_from_anchor is True, but slot 0"),
    "another block": ("xpress", lambda c, t: c.update(xpress_block_size=8), "xpress_block_size is 8, but the blocks have"),
    "convolutions": (
        "lilicorr",
        lambda c, t: c["dflash_config"].update(conv_kernel_size=2),
        "conv_kernel_size is 2, but layers of this family have no convolutions here",
    ),
    "no scale": (
        "lilicorr",
        lambda c, t: c["dflash_config"].pop("lilicorr_logit_scale"),
        "config.json's dflash_config does not say lilicorr_logit_scale",
    ),
    "another form": ("dflash", lambda c, t: c.update(speculators_model_type="dflash3"), "speculators_model_type 'dflash3'"),
    "layers from 0": (
        "dflash, speculators",
        lambda c, t: c.update(aux_hidden_state_layer_ids=[0, 1, 2]),
        "aux_hidden_state_layer_ids is \\[0, 1, 2\\]; of a target of 4 blocks, 1 to 4 can be read",
    ),
    "another type of speculators": (
        "eagle3, speculators",
        lambda c, t: c.update(speculators_model_type="unheard"),
        "speculators_model_type 'unheard'",
    ),
    "no mask token": ("peagle", lambda c, t: c.pop("pard_token"), "one mask token is needed, as pard_token or ptd_token_id"),
    "two mask tokens": ("peagle", lambda c, t: c.update(ptd_token_id=5), "has pard_token 60, ptd_token_id 5: correct it"),
    # fields that engines read otherwise, or that are of no such type
    "half of the width": ("dflash", saying(rope_parameters=HALF), "partial_rotary_factor is 0.5"),
    "half of the width, EAGLE": ("eagle3", saying(rope_parameters=HALF), "partial_rotary_factor is 0.5"),
    "two ropes": (
        "dflash",
        saying(rope_parameters={"full_attention": {"rope_theta": 5.0}}),
        "rope_parameters differ by kind of layer",
    ),
    "GPT-J's rope": ("dflash", saying(is_neox_style=False), "is_neox_style is False"),
    "causal in words": ("dflash", saying(is_causal="false"), "is_causal is 'false' in config.json; true or false is needed"),
    "slots in words": ("dflash", saying(sample_from_anchor="false"), "sample_from_anchor is 'false'"),
    "a number of types": ("dflash", saying(layer_types=1), "layer_types is 1; a list of names is needed"),
    "a number of classes": ("dflash", saying(architectures=1), "architectures is 1 in config.json; a list of names is needed"),
    "other states": ("dflash", saying(num_context_layers=5), "num_context_layers is 5, but it names 3 layers; only 3 can be"),
    "other layers": ("peagle", saying(num_draft_layers=4), "num_draft_layers is 4, unlike num_hidden_layers; only 3 can be"),
    "a mask in words": ("dflash", inside(mask_token_id="x"), "mask_token_id is 'x' in config.json; a number from 0 is needed"),
    "half a mask": ("dflash", inside(mask_token_id=1.5), "mask_token_id is 1.5"),
    "a list of masks": ("dspark, speculators", saying(mask_token_id=[1]), "mask_token_id is .1. in config.json"),
    "classes by name": ("dspark, speculators", saying(architectures={"a": 1}), "architectures is "),
    "lists of types": ("dspark, speculators", inside(layer_types=[[1]]), "layer_types is "),
    "a flag in words": ("eagle3", saying(norm_before_residual="false"), "norm_before_residual is 'false'"),
    "a list of fields": ("lilicorr", saying(dflash_config=[]), "dflash_config"),
    "no mask in a list": ("peagle", saying(pard_token=[]), "one mask token is needed"),
    "too wide": ("dflash", saying(intermediate_size=10**12), "no drafter can be built from config.json"),
    "an unknown function": ("draft_model", saying(hidden_act="x"), "no drafter can be built from config.json .KeyError"),
    "a width in words": ("mlp_speculator", saying(inner_dim="x"), "inner_dim is 'x'"),
    # fields that nobody reads
    "a field that is new": ("eagle3", saying(logit_softcap=30.0), "config.json says logit_softcap 30.0, which drafters of "),
    "a new field inside": ("dflash", inside(query_scale=2), "says dflash_config.query_scale 2, which drafters of dflash do"),
    "a new field of layers": ("dspark, speculators", inside(no_rope_layers=[1]), r"says transformer_layer_config.no_rope"),
    "another family's field": ("eagle", saying(target_layer_ids=[1]), r"says target_layer_ids \[1\], which drafters of eagle"),
    "a field of heads": ("medusa", saying(medusa_residual=False), "says medusa_residual False, which drafters of medusa do"),
    "another kind of PARD": (
        "pard",
        saying(spd_type="pard2"),
        "spd_type is 'pard2', which reads more than tokens; only 'pard'",
    ),
    "a step of ModelOpt's": (
        "eagle3",
        lambda c, t: c["eagle_config"].update(parallel_draft_step=4),
        "parallel_draft_step is 4, but drafters here give one draft a step",
    ),
    "tied in words": ("mlp_speculator", saying(tie_weights="false"), "tie_weights is 'false'"),
}


@pytest.mark.parametrize("layout", dict.fromkeys(layout for layout, _, _ in MISTAKES.values()))
def test_import_unsupported_drafter_is_refused_in_one_line(
    layout: str, cache: Path, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for mistake, (_, change, says) in ((name, row) for name, row in MISTAKES.items() if row[0] == layout):
        with subtests.test(mistake=mistake):
            with pytest.raises(UserError, match=says) as caught:
                imported(put(tmp_path / mistake, changed(layout, change)))
            assert "\n" not in str(caught.value) and not cache.exists()


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])


def twice(folder: Path) -> None:
    save_file({"0.0.linear.weight": torch.ones(H, H)}, folder / "medusa_lm_head.safetensors")


def ambiguous(folder: Path) -> None:
    save_file(LAYOUTS["eagle3"]()[1] | LAYOUTS["hydra"]()[1], folder / "model.safetensors")


HARMS: list[tuple[Callable[[Path], object], str]] = [
    (cut, "model.safetensors: damaged, cut off, or no tensors"),
    (twice, "holds model.safetensors and medusa_lm_head.safetensors; keep the drafter's own"),
    (ambiguous, r"could be portable \(eagle3\) and hydra_lm_head \(hydra\)"),
    (lambda folder: (folder / "config.json").unlink(), "got no drafter.json, config.json or adapter_config.json there"),
    (lambda folder: (folder / "config.json").write_text("{"), "config.json: damaged or cut off"),
    (lambda folder: (folder / "model.safetensors").rename(folder / "x.safetensors"), "got x.safetensors; rename the file"),
    (
        lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b.safetensors"}})),
        "index.json names 'b.safetensors', which is not there",
    ),
]


def test_import_damaged_directory_is_refused_in_one_line(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for number, (harm, says) in enumerate(HARMS):
        with subtests.test(says=says):
            folder = put(tmp_path / str(number), LAYOUTS["eagle3"]())
            harm(folder)
            with pytest.raises(UserError, match=says) as caught:
                imported(folder)
            assert "\n" not in str(caught.value)


def test_import_sharded_weights_give_same_drafter(tmp_path: Path) -> None:
    right, _ = imported(put(tmp_path / "whole", LAYOUTS["eagle3"]()))
    folder = put(tmp_path / "parts", LAYOUTS["eagle3"]())
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"model-{i % 2 + 1:05d}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: x for name, x in tensors.items() if names[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert imported(folder)[0].meta.sha256 == right.meta.sha256


def test_fetched_hub_id_prefers_safetensors_over_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def snapshot(**wanted: Any) -> str:
        asked.append(wanted)
        folder = tmp_path / wanted["repo_id"]
        pickled = "pytorch_model*.bin" in wanted["allow_patterns"]
        if not folder.exists():
            folder.mkdir(parents=True)
            (folder / "config.json").write_text("{}")
        if pickled or "safe" in wanted["repo_id"]:
            shutil.rmtree(folder)
            put(folder, (*LAYOUTS["eagle3"]()[:2], "pytorch_model.bin" if pickled else "model.safetensors"))
        return str(folder)

    monkeypatch.setattr(directory, "snapshot_download", snapshot)
    one, _ = imported(fetched("owner/safe@v2"))
    assert len(asked) == 1 and asked[0]["revision"] == "v2" and "*.bin" not in str(asked[0]["allow_patterns"])
    two, said = imported(fetched("owner/old"))
    assert len(asked) == 3 and asked[2]["revision"] is None and any("is a pickle" in line for line in said)
    assert one.meta.sha256 == two.meta.sha256

    def unreachable(**_: Any) -> str:
        raise OSError("no route\nto host")

    monkeypatch.setattr(directory, "snapshot_download", unreachable)
    with pytest.raises(UserError, match=r"is no directory here, and could not be fetched as a hub id \(no route to host\)"):
        fetched("owner/gone")


def test_published_layouts_match_tiny_target_shape() -> None:
    shape = loaded().target.shape
    assert (shape.vocab_size, shape.hidden_size, shape.blocks) == (V, H, 4)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (
        LLAMA["num_attention_heads"],
        LLAMA["num_key_value_heads"],
        LLAMA["head_dim"],
    )


def test_check_start_imported_draft_model_initializes_pruned_one(tmp_path: Path) -> None:
    """The same network, whatever its weights came from first."""
    folder = put(tmp_path / "hand", LAYOUTS["draft_model"]())
    meta = imported(folder)[0].meta
    pruned = dataclasses.asdict(families()["draft_model"].options(blocks=2))
    check_start("hand", meta, pruned, {})
    with pytest.raises(UserError, match=r"train.init hand: .* has other options than this run; add drafter.lora_rank=0$"):
        check_start("hand", meta, pruned | {"lora_rank": 4}, {})


def test_check_start_mismatch_lists_options_in_hydra_syntax(tmp_path: Path) -> None:
    scaled = changed("eagle3", lambda config, _: config.update(rope_scaling=dict(LINEAR), rope_theta=500.0))
    meta = imported(put(tmp_path / "hand", scaled))[0].meta
    plain = dataclasses.asdict(families()["eagle3"].options(draft_vocab=D))
    words = "add drafter.layer.rope_theta=500.0 drafter.layer.rope_scaling='{rope_type:linear,factor:2.0}' "
    words += "drafter.target_layer_ids=[0,1,2]"
    with pytest.raises(UserError, match=re.escape(words)):
        check_start("hand", meta, plain, {"target_layer_ids": [1, 2]})


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True}


WINDOWS: list[tuple[str, dict[str, Any], bool]] = [  # layout, its fields, whether slots with windows are causal
    ("dflash", SLIDING, True),
    ("dflash", SLIDING | {"is_causal": False}, False),
    ("dspark", SLIDING, True),
    ("dspark", SLIDING | {"is_causal": False}, False),
    ("domino", SLIDING, True),
    ("dflash", SLIDING | {"layer_types": [*SLIDING["layer_types"], "sliding_attention"]}, True),  # a target's, copied
    ("dflash, transformers", SLIDING | {"sliding_window": 7}, False),
]


def test_import_sliding_windows_are_read(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for number, (layout, more, causal) in enumerate(WINDOWS):
        with subtests.test(layout=layout, **more):
            options = imported(put(tmp_path / str(number), changed(layout, saying(**more))))[0].meta.options
            assert options["layer"]["sliding_window"] == 8 and list(options["layer"]["full_attention_layers"]) == [1]
            assert options["causal_windows"] is causal


def nested(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """As SpecForge writes the fields, and z-lab newer block sizes."""
    inner = config.setdefault("dflash_config", {})
    keys = ("block_size", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "sample_from_anchor")
    for key in (*keys, "enable_confidence_head", "confidence_head_with_markov"):
        if key in config:
            inner[key] = config.pop(key)
    if config["architectures"] == ["Qwen3DSparkModel"]:
        config["architectures"] = ["DSparkDraftModel"]


@pytest.mark.parametrize("layout", ["dflash", "dflash, DeepSpec", "dspark", "dflash2", "jetspec", "domino"])
def test_import_fields_nested_in_dflash_config_give_same_drafter(layout: str, tmp_path: Path) -> None:
    right, wrapped = (put(tmp_path / name, made) for name, made in (("a", LAYOUTS[layout]()), ("b", changed(layout, nested))))
    first, second = imported(right)[0], imported(wrapped)[0]
    assert first.meta.options == second.meta.options and first.meta.sha256 == second.meta.sha256


def test_import_dspark_missing_sample_from_anchor_means_shifted(tmp_path: Path) -> None:
    """Every loader of these files takes them as shifted."""
    found, said = imported(put(tmp_path / "a", changed("dspark", lambda config, _: config.pop("sample_from_anchor"))))
    assert found.meta.options["slots"] == "shifted"
    assert "note: config.json does not say sample_from_anchor: true, as vLLM, SGLang and llama.cpp take it" in said
    found, said = imported(put(tmp_path / "b", changed("dspark", lambda config, _: config.update(sample_from_anchor=False))))
    assert found.meta.options["slots"] == "in_place" and not any("sample_from_anchor" in line for line in said)


def keys_of(top: bool | None, inner: bool | None, head: bool | None) -> Change:
    """The keys that say whether blocks are causal, without those that are None."""

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config.pop("is_causal", None)
        for key in ("causal", "causal_head"):
            config["dflash_config"].pop(key, None)
        config |= {} if top is None else {"is_causal": top}
        config["dflash_config"] |= {} if inner is None else {"causal": inner}
        config["dflash_config"] |= {} if head is None else {"causal_head": head}

    return change


CAUSAL = [  # the keys, what they mean, and readers of stacks that look for them
    ((True, None, None), "dflash", True, (dflash.zlab("sglang"), dflash.zlab("vllm"))),
    ((None, True, None), "dflash", True, (dflash.zlab("vllm"),)),
    ((True, False, None), "dflash", True, (dflash.zlab("vllm"),)),
    ((False, True, None), "dflash", False, (dflash.zlab("vllm"),)),
    ((None, False, False), "dflash", False, (dflash.zlab("sglang"),)),
    ((None, None, True), "jetspec", True, (jetspec.reader("official"),)),
    ((None, True, True), "jetspec", True, (jetspec.reader("vllm"),)),
    ((True, True, True), "jetspec", True, (jetspec.reader("sglang"),)),
]


def test_import_causal_flag_of_any_project_is_read(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Whichever project's key says so."""
    for keys, family, causal, readers in CAUSAL:
        with subtests.test(keys=keys):
            folder = put(tmp_path / str(keys), changed("dflash", keys_of(*keys)))
            found, _ = imported(folder)
            assert found.meta.family == family and found.meta.options["causal"] is causal
            golden = made(found, TEXTS)
            for reader in readers:
                reading = reader(folder, target_parts(found), points_of(golden))
                assert float(parity.gaps(torch.stack(reading.logits), golden).max()) < 1.0


def test_import_domino_shift_label_gives_shifted_slots(tmp_path: Path) -> None:
    folder = put(tmp_path / "hand", changed("domino", lambda config, _: config["dflash_config"].update(shift_label=True)))
    found, _ = imported(folder)
    golden = made(found, TEXTS)
    assert found.meta.options["slots"] == "shifted" and golden.draft_PK.shape[1] == 4
    reading = domino.sglang(folder, target_parts(found), points_of(golden))
    assert float(parity.gaps(torch.stack(reading.logits), golden).max()) < 1.0


def test_export_imported_shifted_dflash_is_refused(tmp_path: Path) -> None:
    """Shifted slots without a head of their own."""
    found, _ = imported(put(tmp_path / "hand", LAYOUTS["dflash, DeepSpec"]()))
    for stack in ("vllm", "sglang", "llamacpp"):
        reason = format_of("dflash", stack).refuse(ExportSource(found, stack, "float32"))
        assert reason is not None and "its slots are shifted" in reason
