"""Small checkpoints of every family, to be exported in tests."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from drafttrain.drafters import families
from drafttrain.drafters.checkpoint import CheckpointMeta, TargetRecord, adapter_state, save_drafter
from drafttrain.drafters.common.drafter_lora import add_matrices, name_in_checkpoint
from drafttrain.export.exporter import Exported, ExportSettings, export
from drafttrain.export.files import ExportSource
from drafttrain.export.golden import Golden, made, store
from drafttrain.export.opened import Opened
from drafttrain.export.parity import rounded
from drafttrain.export.table import stacks_for
from drafttrain.model.drafter import Drafter
from drafttrain.model.lora import LoraOptions, LoraSpec
from drafttrain.targets import TargetOptions
from drafttrain.targets.adapt import Adapter
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.load import LoadedTarget, load_target
from drafttrain.targets.parallel import Part
from tests.export_oracles.check import check_export, check_gguf_target
from tests.helpers import tiny_model, tiny_target
from tests.native import Native
from tests.tiny import shake

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LATENT = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 12}
# by what a test calls them: (family, options)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {"target_layer_ids": [0, 1, 2], "draft_length": 3, "draft_vocab": 40}),
    "eagle3-whole": ("eagle3", {"target_layer_ids": [0, 1, 2], "draft_length": 3}),
    "eagle3-two": ("eagle3", {"target_layer_ids": [0, 2], "draft_length": 3}),
    "eagle3-last": ("eagle3", {"target_layer_ids": [0, 1, 3], "draft_length": 3}),
    "eagle3-normed": ("eagle3", {"target_layer_ids": [0, 1, 2], "draft_length": 3, "fc_norm": True, "norm_output": True}),
    "eagle3-unlike": (
        "eagle3",
        {
            "target_layer_ids": [0, 1, 2],
            "draft_length": 3,
            "norm_before_residual": True,
            "layer": {"heads": 2, "kv_heads": 1, "intermediate_size": 40, "rope_theta": 500.0, "norm_eps": 1e-4},
        },
    ),
    "eagle3-stretched": ("eagle3", {"target_layer_ids": [0, 1, 2], "layer": {"rope_scaling": YARN}}),
    "eagle3-scaled": (
        "eagle3",
        {"target_layer_ids": [2, 0, 1], "draft_length": 3, "layer": {"head_dim": 6, "rope_scaling": LLAMA3}},
    ),
    "dflash-part": (
        "dflash",
        {"block_size": 4, "layers": 2, "target_layer_ids": [0, 2, 1], "mask_token": 9, "draft_vocab": 40},
    ),
    "dspark-part": ("dspark", {"block_size": 3, "layers": 2, "target_layer_ids": [0, 2], "rank": 8, "draft_vocab": 40}),
    "eagle3-others": (
        "eagle3",
        {
            "target_layer_ids": [0, 1, 2],
            "draft_length": 3,
            "layers": 3,
            "norm_before_fc": True,
            "own_embedding": True,
            "draft_vocab": 40,
        },
    ),
    "eagle3-qwen3": ("eagle3", {"target_layer_ids": [0, 2], "draft_length": 3, "layers": 2, "qk_norm": True}),
    "eagle3-latent": (
        "eagle3",
        {
            "target_layer_ids": [0, 1, 2],
            "draft_length": 3,
            "draft_vocab": 40,
            "fc_norm": True,
            "norm_output": True,
            "layer": LATENT
            | {"q_lora_rank": 10, "rope_theta": 500.0, "norm_eps": 1e-4}
            | {"rope_scaling": {k: YARN[k] for k in YARN if k != "truncate"} | {"mscale": 0.7, "mscale_all_dim": 0.9}},
        },
    ),
    "eagle3-latent-queries": (
        "eagle3",
        {
            "target_layer_ids": [0, 3],
            "draft_length": 3,
            "layers": 2,
            "own_embedding": True,
            "norm_before_residual": True,
            "layer": LATENT | {"heads": 3, "qk_nope_head_dim": 14},
        },
    ),
    "peagle-together": ("peagle", {"target_layer_ids": [0, 1, 2], "draft_length": 3, "layers": 2, "norm_before_fc": True}),
    "peagle": ("peagle", {"target_layer_ids": [0, 1, 2], "draft_length": 3, "layers": 2, "draft_vocab": 40}),
    "peagle-normed": (
        "peagle",
        {
            "target_layer_ids": [0, 3],
            "draft_length": 4,
            "layers": 3,
            "mask_token": 5,
            "fc_norm": True,
            "norm_before_residual": True,
        },
    ),
    "eagle3-windows": ("eagle3", {"target_layer_ids": [0, 1, 2], "draft_length": 3, "layer": {"sliding_window": 6}}),
    "peagle-windows": (
        "peagle",
        {
            "target_layer_ids": [0, 1, 2],
            "draft_length": 3,
            "layers": 2,
            "layer": {"sliding_window": 10, "full_attention_layers": [1]},
        },
    ),
    "pard": ("pard", {"blocks": 2, "draft_length": 3}),
    "pard-lora": ("pard", {"blocks": 2, "draft_length": 3, "lora_rank": 2, "mask_token": 7}),
    "eagle": ("eagle", {"draft_length": 3, "bias": False}),
    "eagle-bias": ("eagle", {"draft_length": 3}),
    "medusa": ("medusa", {"heads": 3}),
    "medusa-deep": ("medusa", {"heads": 2, "layers": 2}),
    "medusa-shared": ("medusa", {"heads": 2, "init": "share"}),
    "hydra": ("hydra", {"heads": 3, "layers": 2}),
    "hydra-deep": ("hydra", {"heads": 2, "layers": 3}),
    "mlp_speculator": ("mlp_speculator", {"n_predict": 3, "scale_input": True}),
    "mlp_speculator-tied": ("mlp_speculator", {"n_predict": 3, "inner_dim": 24, "tie_weights": True}),
    "mlp_speculator-equal": ("mlp_speculator", {"n_predict": 3, "tie_weights": True}),
    "mtp": ("mtp", {"draft_length": 3}),
    "mtp-qwen3": ("mtp", {"draft_length": 3, "norm_output": True, "qk_norm": True, "layer": {"head_dim": 12}}),
    "mtp_native": ("mtp_native", {"draft_length": 3}),
    "early_exit": ("early_exit", {"adapter": True}),
    "uno": ("uno", {"draft_length": 4, "lora_rank": 3}),
    "uno-few": ("uno", {"draft_length": 3, "lora_rank": 2, "lora_alpha": 3.0, "lora_targets": ["q_proj", "down_proj"]}),
    "redrafter": ("redrafter", {"width": 1, "length": 3}),
    "dflash": ("dflash", {"block_size": 4, "layers": 2, "target_layer_ids": [0, 1, 2]}),
    "dflash-unlike": (
        "dflash",
        {
            "block_size": 3,
            "layers": 1,
            "target_layer_ids": [1],
            "mask_token": 5,
            "layer": {"rope_scaling": LINEAR, "head_dim": 12},
        },
    ),
    "dflash-shifted": ("dflash", {"block_size": 4, "layers": 1, "target_layer_ids": [0, 1, 2], "slots": "shifted"}),
    "dflash-windows": (
        "dflash",
        {"block_size": 3, "layers": 2, "target_layer_ids": [1], "layer": {"sliding_window": 5, "full_attention_layers": [0]}},
    ),
    "dflash-open-windows": (
        "dflash",
        {"block_size": 3, "layers": 2, "target_layer_ids": [1], "causal_windows": False, "layer": {"sliding_window": 5}},
    ),
    "dflash-causal": ("dflash", {"block_size": 4, "layers": 2, "target_layer_ids": [1, 2], "causal": True}),
    "dflash-causal-windows": (
        "dflash",
        {"block_size": 4, "layers": 2, "target_layer_ids": [1, 2], "causal": True, "layer": {"sliding_window": 5}},
    ),
    "dflash-sinks": (
        "dflash",
        {
            "block_size": 3,
            "layers": 2,
            "target_layer_ids": [1],
            "causal_windows": False,
            "layer": {"sliding_window": 5, "attention_sinks": True},
        },
    ),
    "jetspec": ("jetspec", {"block_size": 4, "layers": 2, "target_layer_ids": [0, 1, 2], "tree": "chain"}),
    "jetspec-windows": (
        "jetspec",
        {
            "block_size": 3,
            "layers": 2,
            "target_layer_ids": [1],
            "tree": "chain",
            "layer": {"sliding_window": 5, "full_attention_layers": [0]},
        },
    ),
    "jetspec-open": ("jetspec", {"block_size": 4, "layers": 1, "target_layer_ids": [1], "causal": False}),
    "domino": ("domino", {"block_size": 4, "layers": 2, "target_layer_ids": [0, 1, 2], "state": 12, "rank": 8}),
    "domino-shifted": (
        "domino",
        {"block_size": 3, "layers": 1, "target_layer_ids": [1], "state": 8, "rank": 4, "slots": "shifted", "mask_token": 5},
    ),
    "domino-causal": (
        "domino",
        {
            "block_size": 4,
            "layers": 2,
            "target_layer_ids": [1],
            "state": 8,
            "rank": 4,
            "causal": True,
            "layer": {"sliding_window": 6},
        },
    ),
    "dspark-causal": ("dspark", {"block_size": 3, "layers": 2, "target_layer_ids": [1], "rank": 8, "causal": True}),
    "dspark-open-windows": (
        "dspark",
        {
            "block_size": 3,
            "layers": 2,
            "target_layer_ids": [1],
            "rank": 8,
            "causal_windows": False,
            "layer": {"sliding_window": 5},
        },
    ),
    "dspark-sinks": (
        "dspark",
        {"block_size": 3, "layers": 2, "target_layer_ids": [1], "rank": 8, "layer": {"attention_sinks": True}},
    ),
    "dflash2-causal": (
        "dflash2",
        {"block_size": 4, "layers": 2, "target_layer_ids": [0, 1], "rank": 4, "candidates": 5, "causal": True},
    ),
    "dspark-windows": (
        "dspark",
        {
            "block_size": 3,
            "layers": 2,
            "target_layer_ids": [1],
            "rank": 8,
            "layer": {"sliding_window": 5, "full_attention_layers": [0]},
        },
    ),
    "dflash2-windows": (
        "dflash2",
        {"block_size": 3, "layers": 2, "target_layer_ids": [1], "rank": 4, "candidates": 5, "layer": {"sliding_window": 5}},
    ),
    "dspark": ("dspark", {"block_size": 3, "layers": 2, "target_layer_ids": [0, 1, 2], "rank": 8}),
    "dspark-in-place": (
        "dspark",
        {"block_size": 4, "layers": 1, "target_layer_ids": [1], "rank": 4, "slots": "in_place", "mask_token": 5},
    ),
    "dflash2": ("dflash2", {"block_size": 4, "layers": 2, "target_layer_ids": [0, 1, 2], "rank": 8, "candidates": 8}),
    "dflash2-unlike": (
        "dflash2",
        {
            "block_size": 3,
            "layers": 1,
            "target_layer_ids": [1],
            "rank": 4,
            "candidates": 5,
            "group": 8,
            "layer": {"head_dim": 12},
        },
    ),
    "lilicorr": (
        "lilicorr",
        {
            "block_size": 4,
            "layers": 2,
            "target_layer_ids": [0, 1, 2],
            "candidates": 4,
            "hidden_size": 16,
            "factor_dim": 12,
            "heads": 2,
        },
    ),
    "lilicorr-wide": (  # as wide as the target: token_proj is the identity
        "lilicorr",
        {
            "block_size": 3,
            "layers": 1,
            "target_layer_ids": [1],
            "candidates": 8,
            "hidden_size": 32,
            "factor_dim": 8,
            "heads": 4,
            "corrector_layers": 1,
            "mlp_ratio": 1.5,
            "logit_scale": 5.0,
            "layer": {"head_dim": 12, "norm_eps": 1e-4},
        },
    ),
    "xpress": ("xpress", {"block_size": 4, "layers": 2, "target_layer_ids": [0, 1, 2], "rank": 8}),
    "xpress-unlike": (
        "xpress",
        {
            "block_size": 3,
            "layers": 1,
            "target_layer_ids": [1],
            "rank": 4,
            "mlp_hidden": 6,
            "mask_token": 5,
            "layer": {"head_dim": 12},
        },
    ),
    "xpress-windows": (
        "xpress",
        {
            "block_size": 3,
            "layers": 2,
            "target_layer_ids": [1],
            "rank": 4,
            "layer": {"sliding_window": 5, "full_attention_layers": [0]},
        },
    ),
    "draft_model": ("draft_model", {"blocks": 2, "draft_length": 3}),
    "draft_model-lora": ("draft_model", {"blocks": 2, "draft_length": 3, "lora_rank": 2}),
    "prompt_lookup": ("prompt_lookup", {"draft_length": 3}),
}
GOES_TO = {  # case -> the stacks that it is exported to, those apart whose targets are of another kind (lmdeploy)
    "eagle3": ["vllm", "sglang", "trtllm", "speculators", "llamacpp", "openvino"],
    "eagle3-whole": ["vllm", "sglang", "trtllm", "speculators", "llamacpp", "openvino"],
    "eagle3-two": ["vllm", "sglang", "trtllm", "speculators"],
    "eagle3-last": ["vllm"],
    "eagle3-unlike": ["vllm", "speculators", "llamacpp"],
    "eagle3-scaled": ["vllm", "sglang", "trtllm", "speculators", "openvino"],
    "eagle3-normed": ["vllm", "sglang", "trtllm", "speculators"],
    "dflash-part": ["vllm", "sglang", "speculators"],
    "dspark-part": ["vllm", "sglang", "speculators"],
    "eagle3-others": ["vllm", "sglang", "speculators"],
    "eagle3-qwen3": ["speculators"],
    "eagle3-latent": ["vllm", "sglang"],
    "eagle3-latent-queries": ["vllm"],
    "peagle-together": ["vllm"],
    "peagle": ["vllm", "speculators"],
    "peagle-normed": ["vllm"],
    "eagle3-windows": ["vllm", "speculators"],
    "peagle-windows": ["vllm", "speculators"],
    "pard": ["vllm", "trtllm"],
    "pard-lora": ["vllm", "trtllm"],
    "eagle": ["vllm", "sglang", "lmdeploy"],
    "eagle-bias": ["sglang"],
    "medusa": ["vllm", "tgi"],
    "medusa-deep": ["vllm", "tgi"],
    "hydra": ["official"],
    "redrafter": ["official"],
    "mlp_speculator": ["tgi", "official"],
    "mlp_speculator-tied": ["tgi", "official"],
    "mlp_speculator-equal": ["tgi", "official"],
    "mtp": ["official"],
    "mtp-qwen3": ["speculators"],
    "dflash": ["vllm", "sglang", "trtllm", "speculators", "transformers", "llamacpp", "openvino", "official"],
    "dflash-unlike": ["vllm", "sglang", "trtllm", "speculators", "transformers", "openvino", "official"],
    "dflash-windows": ["vllm", "sglang", "official"],
    "dflash-open-windows": ["vllm", "sglang", "speculators", "transformers", "official"],
    "dflash-causal": ["vllm", "sglang", "llamacpp", "official"],
    "dflash-causal-windows": ["vllm", "sglang", "speculators", "official"],
    "dflash-sinks": ["vllm"],
    "jetspec": ["vllm", "sglang", "llamacpp", "official"],
    "jetspec-windows": ["vllm", "sglang"],
    "domino": ["sglang"],
    "domino-shifted": ["sglang"],
    "domino-causal": ["sglang"],
    "dspark-windows": ["vllm", "sglang", "speculators"],
    "dspark-open-windows": ["vllm", "sglang"],
    "dspark-causal": ["vllm", "sglang", "llamacpp"],
    "dspark-sinks": ["vllm"],
    "dflash2-windows": ["vllm", "sglang", "speculators", "official"],
    "dflash2-causal": ["vllm", "sglang", "llamacpp", "official"],
    "dspark": ["vllm", "sglang", "trtllm", "speculators", "llamacpp", "official"],
    "dspark-in-place": ["vllm", "sglang", "speculators", "llamacpp"],
    "dflash2": ["vllm", "sglang", "speculators", "official"],
    "dflash2-unlike": ["vllm", "sglang", "speculators", "llamacpp", "official"],
    "lilicorr": ["vllm", "sglang"],
    "lilicorr-wide": ["vllm", "sglang"],
    "xpress": ["vllm"],
    "xpress-unlike": ["vllm"],
    "xpress-windows": ["vllm"],
    "uno": ["sglang"],
    "uno-few": ["sglang"],
    "draft_model": ["vllm", "sglang", "trtllm", "transformers", "llamacpp", "openvino"],
    "draft_model-lora": ["vllm", "sglang", "trtllm", "transformers", "llamacpp", "openvino"],
}
TEXTS = [[7, 3, 19, 40, 5, 60, 22, 11], [50, 2, 2, 31]]
RECORD_KEYS = ("name", "path", "revision", "dtype", "weights")


@cache
def loaded(name: str = "llama", seed: int = 0) -> LoadedTarget:
    """A tiny target with a tokenizer that knows all its tokens."""
    target = tiny_target(name, seed)
    vocab = target.shape.vocab_size
    pieces = {f"w{i}": i for i in range(vocab - 2)} | {"w": vocab - 2, "0": vocab - 1}
    words = Tokenizer(models.BPE(pieces, [("w", "0")]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1")
    tokenizer.chat_template = "{{ messages }}"
    about = {"name": "hf", "path": "targets/tiny", "revision": None, "dtype": "float32", "weights": None}
    return LoadedTarget(target, tokenizer, "targets/tiny", about | {"architecture": type(target.model).__name__})


@cache
def embedded() -> LoadedTarget:
    """The embedded target, loaded once."""
    return load_target(TargetOptions())


def loaded_before(options: TargetOptions, part: Part | None = None) -> LoadedTarget:
    """For `load_target`, in a module whose commands ask for the embedded target and leave it as it is."""
    assert options.name == "embedded"
    return embedded()


def unprobed(model: Any) -> HFTarget:
    """A target that does not try out how it decodes: that is most of its time, and exports do not depend on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drafttrain.targets.hf.probe", lambda target: "it is recurrent" if target.recurrent else None)
        patch.setattr("drafttrain.targets.hf.wrong_tap", lambda target: None)
        return HFTarget(model)


@cache
def deep() -> LoadedTarget:
    """One of eight blocks, whose official taps are three."""
    model: Any = tiny_model()
    config = model.config
    config.num_hidden_layers = 8
    torch.manual_seed(0)
    return LoadedTarget(unprobed(type(model)(config)), loaded().tokenizer, "deep", loaded().description)


def target_of_files(made: Native, dtype: torch.dtype = torch.float32) -> LoadedTarget:
    """A target whose files hold MTP modules."""
    model = AutoModelForCausalLM.from_pretrained(made.directory, dtype=dtype, attn_implementation="sdpa")
    about = loaded().description | {"architecture": type(model).__name__, "path": str(made.directory)}
    return LoadedTarget(unprobed(model), loaded().tokenizer, str(made.directory), about)


def drafter_of(family: str, options: Any, target: LoadedTarget) -> Drafter:
    """A fresh one whose weights are shaken, so that nothing about it is special."""
    torch.manual_seed(1)
    drafter = families()[family].build(options, target.target)
    drafter.prepare(lambda: torch.arange(64) * 37 % 64)
    shake((p for p in drafter.parameters() if p.requires_grad), 1.0, least=0.1)
    return drafter


def record_of(target: LoadedTarget) -> TargetRecord:
    """What a checkpoint keeps of this target."""
    shape = target.target.shape
    return TargetRecord(
        **{key: target.description[key] for key in RECORD_KEYS},
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        blocks=shape.blocks,
        fingerprint=target.target.fingerprint,
    )


def checkpoint(
    folder: Path,
    case: str,
    target: LoadedTarget | None = None,
    spec: LoraSpec | None = None,
    lora: LoraOptions | None = None,
    **more: Any,
) -> Path:
    """A checkpoint of this case, without golden material. spec: of a target that was trained too. lora: of the drafter."""
    target = target or loaded()
    family, chosen = CASES[case]
    options = families()[family].options(**chosen | more)
    record = record_of(target)
    directory = folder / "step-00004"
    directory.mkdir(parents=True)
    drafter, adapter = drafter_of(family, options, target), None
    if lora is not None:
        add_matrices(drafter, lora, target.target.shape.vocab_size)
        for matrix in (p for p in drafter.parameters() if p.requires_grad):
            matrix.data.add_(torch.randn_like(matrix) * 0.2)
    state = {name_in_checkpoint(name) if lora else name: x for name, x in drafter.state_dict().items()}
    if spec is not None:
        adapter = Adapter(target.target, spec)
        for matrix in adapter.parameters():
            matrix.data.add_(torch.randn_like(matrix) * 0.1)
    plain, own = (None if given is None else dataclasses.asdict(given) for given in (spec, lora))
    meta = CheckpointMeta(family, dataclasses.asdict(options), {}, record, step=4, adapter=plain, lora=own)
    save_drafter(directory, {**state, **adapter_state(adapter)}, meta)
    return directory


def opened(folder: Path, case: str, target: LoadedTarget | None = None, **more: Any) -> tuple[Opened, Golden]:
    target = target or loaded()
    found = Opened.of(checkpoint(folder, case, target, **more), target)
    golden = made(found, TEXTS)
    store(found.directory, golden)
    return found, golden


def written(found: Opened, golden: Golden, stack: str, out: Path, dtype: str = "float32", **more: Any) -> Exported:
    """Export, and compare the files once more by the independent readers of the stacks."""
    stacks = stacks_for(found.meta.family, stack)
    exported = export(found, golden, ExportSettings(stacks, out, dtype, stack == "all", **more))
    expected = rounded(found, golden, dtype)
    for name in exported.written:
        folder, source = out / name if stack == "all" else out, ExportSource(found, name, dtype)
        check_export(folder, source, golden, expected, more.get("adapter", False))
        if more.get("with_target"):
            check_gguf_target(folder, source)
    return exported


def put_model(folder: Path, blocks: int = 2) -> Path:
    """A small language model in a directory of transformers, with the target's tokenizer."""
    model: Any = tiny_model(seed=3)
    config = model.config
    config.num_hidden_layers = blocks
    torch.manual_seed(3)
    type(model)(config).save_pretrained(folder)
    loaded().tokenizer.save_pretrained(folder)
    return folder
