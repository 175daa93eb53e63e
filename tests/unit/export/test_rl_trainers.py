"""Drafters that reinforcement learning trains: files go to verl-SpeCo and NeMo-RL and come back.

Which fields of config.json these read and with which defaults, the names and shapes of their parameters, and what they write,
is from verl-SpeCo's model classes at commit 333b754 and NeMo-RL's loader at commit 7ea279a.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from drafttrain.export import convert
from drafttrain.export.convert import converted
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.golden import Golden, made
from drafttrain.export.opened import Opened
from tests.exports import TEXTS, deep, opened, written

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
BUFFERS = ("d2t", "t2d")
EMBEDDING = "embed_tokens.weight"
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(convert, "cache_home", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def layer(prefix: str, config: Config, width: int = 1, *norms: str) -> Shapes:
    """A layer of Llama's parameters. width: of the attention's input, in hidden sizes."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    sizes = {
        "q": heads * head_dim,
        "k": config["num_key_value_heads"] * head_dim,
        "v": config["num_key_value_heads"] * head_dim,
    }
    shapes: Shapes = {f"{prefix}.self_attn.{name}_proj.weight": (size, width * hidden) for name, size in sizes.items()}
    shapes |= {f"{prefix}.self_attn.o_proj.weight": (hidden, heads * head_dim)}
    shapes |= {f"{prefix}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    shapes |= {f"{prefix}.mlp.down_proj.weight": (hidden, inner)}
    return shapes | {f"{prefix}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm", *norms)}


def ends(config: Config, states: int) -> Shapes:
    hidden = config["hidden_size"]
    shapes: Shapes = {"fc.weight": (hidden, states * config.get("target_hidden_size", hidden)), "norm.weight": (hidden,)}
    return shapes | {EMBEDDING: (config["vocab_size"], hidden)}


def own_vocabulary(config: Config) -> Shapes:
    size = config.get("draft_vocab_size", config["vocab_size"])
    return {"lm_head.weight": (size, config["hidden_size"]), "d2t": (size,), "t2d": (config["vocab_size"],)}


def eagle3(config: Config) -> tuple[list[int], Shapes, Config]:
    """(blocks whose outputs it captures, its parameters, the config.json that it writes)."""
    nested = config.get("eagle_config") or {}
    places = (nested.get("target_hidden_layer_ids"), nested.get(IDS), config.get(IDS))
    ids = next(found for found in places if found is not None)
    shapes = ends(config, len(ids)) | own_vocabulary(config) | layer("midlayer", config, 2, "hidden_norm")
    shapes |= {f"fc_norm.{i}.weight": (config["target_hidden_size"],) for i in range(len(ids)) if config.get("fc_norm")}
    nested = {"target_hidden_layer_ids": ids, IDS: ids} | nested
    return ids, shapes, config | {"num_aux_hidden_states": len(ids), IDS: ids, "eagle_config": nested}


def peagle(config: Config) -> tuple[list[int], Shapes, Config]:
    defaults = {"num_draft_layers": 4, "num_aux_hidden_states": 3, "mask_token_id": config["vocab_size"] - 1}
    config = {**defaults, "num_depths": 8, "down_sample_ratio": 0.7, "down_sample_ratio_min": 0.2, **config}
    config |= {"model_type": "llama_peagle", "parallel_drafting": True}
    states, hidden = config["num_aux_hidden_states"], config["hidden_size"]
    shapes = ends(config, states) | own_vocabulary(config) | {"mask_hidden": (1, 1, states * hidden)}
    for i in range(config["num_draft_layers"]):
        shapes |= layer(f"layers.{i}", config, 2 - min(i, 1), *["hidden_norm"] * (i == 0))
    return eagle3(config)[0], shapes, config


def dflash(config: Config) -> tuple[list[int], Shapes, Config]:
    ids = config.get("target_layer_ids") or config["dflash_config"]["target_layer_ids"]
    added = {"target_layer_ids": ids, "num_context_layers": len(ids), "target_num_hidden_layers": config["num_target_layers"]}
    config = {"mask_token_id": 151669, **config, **added, "target_hidden_size": config["hidden_size"]}
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    shapes = ends(config, len(ids)) | {"hidden_norm.weight": (config["hidden_size"],)}
    for i in range(config["num_hidden_layers"]):
        shapes |= layer(f"layers.{i}", config) | {f"layers.{i}.self_attn.{x}_norm.weight": (head_dim,) for x in "qk"}
    return ids, shapes, config | {"model_type": "dflash", "architectures": ["DFlashForCausalLM"]}


def dspark(config: Config) -> tuple[list[int], Shapes, Config]:
    ids, shapes, saved = dflash(config)
    settings = {
        "num_anchors": 512,
        "confidence_head_alpha": 0.0,
        "ce_loss_alpha": 0.1,
        "l1_loss_alpha": 0.9,
        "loss_decay_gamma": 7.0,
    }
    rank, vocab = config.get("markov_rank", 256), config["vocab_size"]
    shapes |= {"markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (vocab, rank)}
    if config.get("enable_confidence_head", False):
        shapes |= {"confidence_head.proj.weight": (1, config["hidden_size"] + rank), "confidence_head.proj.bias": (1,)}
    return ids, shapes, {**settings, **saved, **config}


def domino(config: Config) -> tuple[list[int], Shapes, Config]:
    config = {"emb_dim": 256, "gru_hidden_dim": 1024, "pure_draft_prefix_len": 1, "shift_label": True, **config}
    ids, shapes, saved = dflash(config)
    hidden, state, rank = config["hidden_size"], config["gru_hidden_dim"], config["emb_dim"]
    shapes |= {"prefix_gru.weight_ih_l0": (3 * state, hidden), "prefix_gru.weight_hh_l0": (3 * state, state)}
    shapes |= {"embed_proj.0.weight": (rank, hidden + state), "embed_proj.2.weight": (config["vocab_size"], rank)}
    settings = {"num_anchors": 512, "loss_decay_gamma": 7.0, "lambda_base_start": 1.0, "lambda_base_decay_steps": 2000}
    return ids, shapes, saved | settings | {"model_type": "domino", "architectures": ["DominoDraftModel"]}


SPECO: dict[str, tuple[Callable[[Config], tuple[list[int], Shapes, Config]], str]] = {
    "eagle3": (eagle3, "vllm"),
    "eagle3-whole": (eagle3, "vllm"),
    "eagle3-two": (eagle3, "vllm"),
    "peagle": (peagle, "vllm"),
    "dflash": (dflash, "vllm"),
    "dspark": (dspark, "vllm"),
    "domino-shifted": (domino, "sglang"),
}


def exported(folder: Path, case: str, stack: str, **more: Any) -> tuple[Opened, Golden, Config, dict[str, Tensor]]:
    found, golden = opened(folder / "checkpoint", case, **more)
    written(found, golden, stack, folder / "out")
    return (
        found,
        golden,
        json.loads((folder / "out" / "config.json").read_text()),
        load_file(folder / "out" / "model.safetensors"),
    )


def assert_drafts(folder: Path, target: Any, found: Opened, golden: Golden) -> None:
    """The directory is the drafter, with all that its drafts depend on."""
    back = Opened.of(converted(ExternalCheckpoint(folder), target, lambda line: None), target)
    again = made(back, TEXTS)
    assert again.facts == golden.facts and found.tensors.keys() == back.tensors.keys()
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in found.tensors.items())
    assert torch.equal(again.token_PKR[:, 0], golden.token_PKR[:, 0])


@pytest.mark.parametrize("case", SPECO)
def test_export_has_parameters_of_verl_speco_and_its_checkpoint_comes_back(case: str, tmp_path: Path) -> None:
    """Shapes are those of the fields that its classes read, and the checkpoint has the files and fields that it writes."""
    model, stack = SPECO[case]
    found, golden, config, tensors = exported(tmp_path, case, stack)
    ids, shapes, saved = model(config)
    assert ids == found.meta.options["target_layer_ids"]
    assert saved.get("mask_token_id") in (None, found.drafter.resolved_options().get("mask_token"))
    missing = shapes.keys() - tensors.keys()
    assert missing <= {EMBEDDING, *BUFFERS}, "those that it takes from the target, or has by default"
    assert {name: tuple(x.shape) for name, x in tensors.items()} == {n: x for n, x in shapes.items() if n not in missing}
    embedding = found.loaded.target.model.get_input_embeddings().weight.detach()
    defaults = {"d2t": torch.arange(64), "t2d": torch.ones(64, dtype=torch.bool), EMBEDDING: embedding}
    folder = tmp_path / "draft_step_20"
    (folder / "optimizer").mkdir(parents=True)
    (folder / "optimizer" / ".metadata").write_bytes(b"of torch.distributed.checkpoint")
    (folder / "metadata.json").write_text(json.dumps({"step": 20, "format": "pretrained_drafter_checkpoint", "complete": True}))
    (folder / "config.json").write_text(json.dumps(saved))
    torch.save({**{name: defaults[name] for name in missing}, **tensors}, folder / "pytorch_model.bin")
    assert_drafts(folder, found.loaded, found, golden)


def nemo_rl(config: Config) -> Shapes:
    """The parameters that its loader fills, by the checkpoint's names, of the configuration as transformers gives it."""
    assert "rope_scaling" not in config, "it asks for a field of it"
    assert config["num_hidden_layers"] == 1 and not config["mlp_bias"]
    shapes = ends(config, 3) | layer("midlayer", config, 2, "hidden_norm") | own_vocabulary(config)
    left_out = (EMBEDDING, "t2d", *["d2t"] * (config["draft_vocab_size"] == config["vocab_size"]))
    return {name: shape for name, shape in shapes.items() if name not in left_out}


@pytest.mark.parametrize("case", ["eagle3", "eagle3-whole"])
def test_export_fills_draft_model_of_nemo_rl_and_its_refit_weights_come_back(case: str, tmp_path: Path) -> None:
    """Of a drafter on the official layers, which are those that it captures whatever the configuration says."""
    blocks = deep().target.shape.blocks
    captured = [1, blocks // 2 - 1, blocks - 4]
    found, golden, config, tensors = exported(tmp_path, case, "vllm", target=deep(), target_layer_ids=captured)
    assert config[IDS] == [2, blocks // 2, blocks - 3]
    shapes = nemo_rl(AutoConfig.from_pretrained(tmp_path / "out").to_dict())
    assert tensors.keys() - shapes.keys() <= {EMBEDDING, *BUFFERS}, "it ignores others without a word"
    assert {name: tuple(tensors[name].shape) for name in shapes} == shapes
    folder = tmp_path / "trained"
    folder.mkdir()
    (folder / "config.json").write_text((tmp_path / "out" / "config.json").read_text())
    save_file({name: tensors[name] for name in shapes}, folder / "model.safetensors")
    assert_drafts(folder, deep(), found, golden)
