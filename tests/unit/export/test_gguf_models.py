"""GGUF files for targets of all kinds whose states llama.cpp gives: their drafters, and the targets themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafttrain.core.errors import ParityError, UserError
from drafttrain.export import parity
from drafttrain.export.exporter import ExportSettings, refusals
from drafttrain.export.files import ExportSource, Files, write
from drafttrain.export.formats import gguf as gguf_format
from drafttrain.export.gguf_models import KINDS
from drafttrain.export.opened import Opened
from drafttrain.export.table import format_of
from drafttrain.targets.load import LoadedTarget
from tests.export_oracles.check import check_export, check_gguf_target
from tests.exports import checkpoint, loaded, opened, unprobed, written
from tests.helpers import GATED
from tests.unit.export.formats.test_gguf import Change, changed, content, drop, lose, put

EXPERTS = {"num_experts_per_tok": 2, "bos_token_id": None, "eos_token_id": None}
# by model type: what differs from a small model
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "norm_topk_prob": True, "moe_intermediate_size": 24},
    "gpt_oss": {**EXPERTS, "num_local_experts": 4, "sliding_window": 6},
    "hunyuan_v1_dense": {},
    "minimax_m2": {**EXPERTS, "num_local_experts": 4, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "global_head_dim": 8,
        "final_logit_softcapping": 3.0,
    },
}
WHOLE = [name for name in CONFIGS if name != "gemma4_text"]


def target_of(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedTarget:
    """A random model, with weights large enough that its greedy text is no constant."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **GATED | {"pad_token_id": None} | CONFIGS[kind] | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=1.0 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.5)
    return LoadedTarget(unprobed(model.to(dtype)), loaded().tokenizer, kind, loaded().description)


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, "float32") for kind in WHOLE), ("qwen3_moe", "bfloat16")])
def test_gguf_target_of_each_architecture_passes_parity(kind: str, dtype: str, tmp_path: Path) -> None:
    found, golden = opened(tmp_path, "eagle3", target_of(kind))
    made = written(found, golden, "llamacpp", tmp_path / "out", dtype, with_target=True)
    assert made.written["llamacpp"].gap < 0.5
    fields, _ = content(tmp_path / "out" / "target.gguf")
    assert fields["general.architecture"] == KINDS[kind].architecture


def swap(one: str, other: str) -> Change:
    return lambda fields, tensors: tensors.update({one: tensors[other], other: tensors[one]})


WRONG: dict[str, list[tuple[str, Change]]] = {  # by kind: what the message says, and the change of the file
    "qwen3_moe": [
        ("experts: ", put("qwen3moe.expert_used_count", 3)),
        ("config: ", drop("qwen3moe.expert_feed_forward_length")),
        (
            "target: model.layers.1.mlp.experts.gate_up_proj was not saved as it is",
            swap("blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight"),
        ),
        ("target: (blk.)?0.ffn_gate_exps.weight has no other half", lose("blk.0.ffn_up_exps.weight")),
    ],
    "gpt_oss": [
        ("windows: ", put("gpt-oss.attention.sliding_window", 7)),
        ("windows: ", drop("gpt-oss.attention.sliding_window_pattern")),
        ("rope scaling: ", drop("gpt-oss.rope.scaling.type")),
        ("target: model.layers.0.self_attn.sinks was not saved", lose("blk.0.attn_sinks.weight")),
    ],
    "minimax_m2": [
        ("rotated: ", put("minimax-m2.rope.dimension_count", 8)),
        ("(experts|config): ", put("minimax-m2.expert_gating_func", 1)),
    ],
    "lfm2": [
        ("attention layers: ", put("lfm2.attention.head_count_kv", [0, 2, 2, 0])),
        ("config: ", drop("lfm2.shortconv.l_cache")),
    ],
    "hunyuan_v1_dense": [
        (
            "target: model.layers.0.self_attn.query_layernorm.weight was not saved as it is",
            swap("blk.0.attn_q_norm.weight", "blk.0.attn_k_norm.weight"),
        ),
    ],
}


@pytest.mark.parametrize("kind", WRONG)
def test_gguf_changed_target_file_fails_parity_by_name(kind: str, tmp_path: Path, subtests: pytest.Subtests) -> None:
    target = target_of(kind)
    source = ExportSource(Opened.of(checkpoint(tmp_path, "eagle3", target), target), "llamacpp", "float32")
    files, right = gguf_format.target_files(source), tmp_path / "right"
    right.mkdir()
    write(right, files, source, "5GB")
    for check in (gguf_format.check_target, check_gguf_target):
        check(right, source)
    for number, (says, change) in enumerate(WRONG[kind]):
        with subtests.test(says=says):
            wrong = changed(right, tmp_path / str(number), change, "target.gguf")
            for check in (gguf_format.check_target, check_gguf_target):
                with pytest.raises(ParityError, match=f"^Parity: {says}"):
                    check(wrong, source)


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("qwen3_moe", {"mlp_only_layers": [1]}, "some of its layers have no experts"),
        ("qwen3_moe", {"norm_topk_prob": False}, "its experts' weights are not normalized"),
        ("gpt_oss", {"tie_word_embeddings": True}, "its head is tied to its embedding"),
        ("gpt_oss", {"swiglu_limit": 6.0}, "its swiglu_alpha and swiglu_limit are not 1.702 and 7.0"),
        ("lfm2", {"conv_bias": True}, "its convolutions have biases"),
        ("gemma4_text", {}, "its architecture is gemma4_text, but GGUF files can be written only for llama"),
    ],
)
def test_gguf_unsupported_target_config_is_refused(kind: str, changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    target = target_of(kind, **changes)
    found = Opened.of(checkpoint(tmp_path, "eagle3", target), target)
    with pytest.raises(UserError, match=f"the target cannot be written as GGUF: {says}"):
        refusals(found, ExportSettings(["llamacpp"], tmp_path / "out", "float32", False, with_target=True))


def test_gguf_eagle3_norm_before_residual_is_written(tmp_path: Path) -> None:
    found, golden = opened(tmp_path, "eagle3-unlike")
    written(found, golden, "llamacpp", tmp_path / "out")
    assert content(tmp_path / "out" / "draft.gguf")[0]["eagle3.norm_before_residual"] is True


ENDS: dict[str, list[tuple[str, Change]]] = {  # by case: the name of the check that fails, and the change of the file
    "eagle3": [("logits", lose("token_embd.weight"))],
    "dflash": [
        ("logits", drop("dflash.embedding_scale")),
        ("logits", put("dflash.embedding_scale", 1.0)),
        ("soft cap", drop("dflash.final_logit_softcapping")),
    ],
    "dflash2-unlike": [("soft cap", put("dflash.final_logit_softcapping", 30.0))],
}


@pytest.mark.parametrize(("case", "dtype"), [*((case, torch.float32) for case in ENDS), ("dflash", torch.bfloat16)])
def test_gguf_embedding_scale_and_logit_softcap_are_checked(
    case: str, dtype: torch.dtype, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """llama.cpp gives a drafter the rows of the target's embedding without the factor of Gemma."""
    target: Any = target_of("gemma4_text", dtype=dtype)
    target.target.model.get_input_embeddings().weight.data.mul_(0.01)  # as small as an eps notices
    found, golden = opened(tmp_path, case, target)
    assert written(found, golden, "llamacpp", tmp_path / "out").written["llamacpp"].gap < 0.5
    source, to = ExportSource(found, "llamacpp", "float32"), format_of(found.meta.family, "llamacpp")
    for number, (name, change) in enumerate(ENDS[case]):
        with subtests.test(name=name, number=number):
            wrong = changed(tmp_path / "out", tmp_path / str(number), change)
            with pytest.raises(ParityError, match=f"^Parity: {name}: "):
                check_export(wrong, source, golden, golden)
            with pytest.raises(ParityError):
                parity.check(wrong, to, Files({}, {}), source, golden, golden)
