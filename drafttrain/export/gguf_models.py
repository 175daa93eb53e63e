"""Language models in llama.cpp's form, by their kind in transformers: names, fields, and tensors that are stored otherwise.

All of it is used in both directions. In models of the Llama kind llama.cpp rotates pairs of neighbouring values, where
transformers rotates the two halves of a head: rows of queries and keys are reordered for them.

Shapes: E experts, I width of an expert, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.errors import ParityError
from drafttrain.export.gguf_file import FACTORS, GgufFile
from drafttrain.model.shapes import LayerShape, TargetShape

Fields = dict[str, Any]
NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
EXPERTS = {f"mlp.experts.{x}_proj": f"ffn_{x}_exps" for x in ("gate", "up", "down")}
SWIGLU = (1.702, 7.0)  # gpt-oss' alpha and limit, which llama.cpp has no field for
WIDTH = "expert_feed_forward_length"
SIGMOID = 2  # of the fields that say how scores of experts are made
SCALINGS = ("default", "linear")  # of rotary positions
SCALING_FIELDS = (
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)
HALVES = ("gate_proj", "up_proj")  # of experts: what transformers has in one tensor

NAMES = NORMS | {  # of a block's tensors
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "hidden_norm": "attn_norm_2",  # in EAGLE-3's layer, of the fused states
    "attention_conv": "attn_conv_base",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv": "ffn_conv_base",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}
ENDS = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "embedding_norm": "token_embd_norm",  # of LFM2, whose last norm has this name in both
    "lm_head": "output",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "candidate_selector.predecessor_codebook": "selector_predecessor",
    "candidate_selector.successor_codebook": "selector_successor",
    "candidate_selector.hidden_projection": "selector_hidden",
    "hidden_norm": "enc.output_norm",  # of the fused states, in block drafters
}
USUAL: Mapping[str, Any] = MappingProxyType({})
BARE = "base_kernel"  # a parameter whose name there has no ending


def theirs(name: str, own: Mapping[str, str] = USUAL) -> str:
    """llama.cpp's name of a tensor. own: names of a kind's blocks, in place of the usual ones."""
    stem, _, param_name = name.rpartition(".")
    if stem.startswith("layers."):
        _, block_number, module_path = stem.split(".", 2)
        return f"blk.{block_number}.{own.get(module_path) or NAMES[module_path]}" + (
            "" if param_name == BARE else f".{param_name}"
        )
    return f"{ENDS.get(stem, stem)}.{param_name}"


def ours(name: str, own: Mapping[str, str] = USUAL) -> str:
    """The other way round. A name that is none of llama.cpp's stays."""
    if not name.startswith("blk."):
        stem, _, param_name = name.rpartition(".")
        return f"{_inverse(ENDS).get(stem, stem)}.{param_name}"
    _, block_number, rest = name.split(".", 2)
    stem, _, param_name = rest.rpartition(".") if "." in rest else (rest, "", BARE)
    return f"layers.{block_number}.{(_inverse(NAMES) | _inverse(own)).get(stem, stem)}.{param_name}"


def _inverse(names: Mapping[str, str]) -> dict[str, str]:
    return {gguf_name: our_name for our_name, gguf_name in names.items()}


def neighbours(weight: Tensor, head_dim: int) -> Tensor:
    """Make rows i and i + head_dim / 2 of each head neighbours."""
    head_halves = weight.unflatten(0, (-1, 2, head_dim // 2))
    return head_halves.transpose(1, 2).flatten(0, 2)


def halves(weight: Tensor, head_dim: int) -> Tensor:
    """The other way round: neighbouring rows of each head become rows i and i + head_dim / 2."""
    pairs = weight.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).flatten(0, 2)


def rotates(name: str) -> bool:
    """Whether a tensor, by our name, holds rows of queries or keys."""
    return "q_proj" in name or "k_proj" in name


@dataclass(frozen=True, slots=True)
class GgufStorage:
    """How a kind's tensors are stored, in both directions. Names are ours, without `model.`."""

    split: Callable[[str, Tensor], dict[str, Tensor]]  # the stored tensors that stand for one of transformers'
    whole: Callable[[str, Tensor], tuple[str, Tensor]]  # the other way round, for one that stands for one
    # the same for the gates and values of experts: the name of the experts' module, `weight` or `bias`, both tensors
    joined: Callable[[str, str, Tensor, Tensor], tuple[str, Tensor]] | None = None


def _same(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    return name, tensor


def _alone(name: str, tensor: Tensor) -> dict[str, Tensor]:
    return {name: tensor}


def _split_stacked(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Experts whose gates and values are in one tensor [E, 2I, H], the gates first."""
    stem, _, param_name = name.rpartition(".")
    if param_name == "gate_up_proj":
        gate_EIH, up_EIH = tensor.chunk(2, 1)
        return {f"{stem}.gate_proj.weight": gate_EIH, f"{stem}.up_proj.weight": up_EIH}
    if param_name == "e_score_correction_bias":
        return {f"{stem}.scores.bias": tensor}
    return {f"{name}.weight" if param_name == "down_proj" else name: tensor}


def _whole_stacked(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    if name.endswith("experts.down_proj.weight"):
        return name.removesuffix(".weight"), tensor
    return name.replace("scores.bias", "e_score_correction_bias"), tensor


def _joined_stacked(stem: str, param_name: str, gate_EIH: Tensor, up_EIH: Tensor) -> tuple[str, Tensor]:
    return f"{stem}.gate_up_proj", torch.cat([gate_EIH, up_EIH], 1)


def _split_interleaved(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Experts in one tensor [E, H, 2I], gates and values alternating, with biases; and sinks."""
    stem, _, param_name = name.rpartition(".")
    if param_name == "sinks":
        return {f"{name}.weight": tensor}
    if ".experts." not in name:
        return {name: tensor}
    stored_name = "bias" if param_name.endswith("_bias") else "weight"
    transposed = tensor if stored_name == "bias" else tensor.transpose(1, 2)
    if param_name.startswith("down_proj"):
        return {f"{stem}.down_proj.{stored_name}": transposed}
    return {f"{stem}.gate_proj.{stored_name}": transposed[:, ::2], f"{stem}.up_proj.{stored_name}": transposed[:, 1::2]}


def _whole_interleaved(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    if name.endswith("experts.down_proj.weight"):
        return name.removesuffix(".weight"), tensor.transpose(1, 2)
    if name.endswith("experts.down_proj.bias"):
        return name.replace(".bias", "_bias"), tensor
    return name.removesuffix(".weight") if name.endswith("sinks.weight") else name, tensor


def _joined_interleaved(stem: str, param_name: str, gate: Tensor, up: Tensor) -> tuple[str, Tensor]:
    if param_name == "bias":
        return f"{stem}.gate_up_proj_bias", torch.stack([gate, up], 2).flatten(1)
    return f"{stem}.gate_up_proj", torch.stack([gate, up], 2).flatten(1, 2).transpose(1, 2)


def _split_convolved(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Kernels of convolutions over single channels are matrices."""
    return {name: tensor.squeeze(1) if name.endswith("conv.conv.weight") else tensor}


def _whole_convolved(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    return name, tensor[:, None] if name.endswith("conv.conv.weight") else tensor


AS_THEY_ARE = GgufStorage(_alone, _same)
STACKED = GgufStorage(_split_stacked, _whole_stacked, _joined_stacked)
INTERLEAVED = GgufStorage(_split_interleaved, _whole_interleaved, _joined_interleaved)
CONVOLVED = GgufStorage(_split_convolved, _whole_convolved)


def _no_fields(config: Any) -> Fields:
    return {}


def _nothing(config: Any) -> str | None:
    return None


def _experts(config: Any, width: int) -> Fields:
    count, used = experts_of(config)
    return {"expert_count": count, "expert_used_count": used, WIDTH: width}


def _qwen_moe(config: Any) -> Fields:
    return _experts(config, config.moe_intermediate_size)


def _gpt_oss(config: Any) -> Fields:
    window_pattern = [layer_type == "sliding_attention" for layer_type in config.layer_types]
    window_fields = {"attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": window_pattern}
    return _experts(config, config.intermediate_size) | window_fields


def _minimax(config: Any) -> Fields:
    rotary_factor = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    rope_fields = {"rope.dimension_count": int(config.head_dim * rotary_factor)}
    return _experts(config, config.intermediate_size) | rope_fields


def _lfm(config: Any) -> Fields:
    kv_heads = [config.num_key_value_heads if layer_type == "full_attention" else 0 for layer_type in config.layer_types]
    return {"attention.head_count_kv": kv_heads, "shortconv.l_cache": config.conv_L_cache}


def _refuse_qwen_moe(config: Any) -> str | None:
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        return "some of its layers have no experts, but llama.cpp reads experts in every layer"
    return None if config.norm_topk_prob else "its experts' weights are not normalized, but llama.cpp normalizes them"


def _refuse_tied(config: Any) -> str | None:
    return (
        "its head is tied to its embedding, but llama.cpp needs one for this architecture"
        if config.tie_word_embeddings
        else None
    )


def _refuse_gpt_oss(config: Any) -> str | None:
    if (config.swiglu_alpha, config.swiglu_limit) != SWIGLU:
        return f"its swiglu_alpha and swiglu_limit are not {SWIGLU[0]} and {SWIGLU[1]}, as in llama.cpp"
    if rope_of(config).get("attention_factor") is not None:
        return "its rotary scaling has an attention_factor of its own, for which llama.cpp has no field"
    return _refuse_tied(config)


def _refuse_lfm(config: Any) -> str | None:
    return "its convolutions have biases, which llama.cpp does not read" if config.conv_bias else None


@dataclass(frozen=True, slots=True)
class GgufKind:
    """A language model of llama.cpp."""

    architecture: str
    paired: bool = False  # whether neighbouring values are rotated
    names: dict[str, str] = field(default_factory=dict)  # of a block's tensors, beside those that all models share
    fields: Callable[[Any], Fields] = _no_fields  # own fields, from transformers' configuration
    storage: GgufStorage = AS_THEY_ARE
    refuse: Callable[[Any], str | None] = _nothing  # the reason why a configuration cannot be written
    scalings: tuple[str, ...] = SCALINGS  # kinds of rotary scaling that can be written
    biases: bool = False  # of attention
    windows: bool = False  # of attention
    drafts: bool = False  # as a draft model too
    fixed: Mapping[str, Any] = field(default_factory=dict)  # further fields with one value
    needed: tuple[str, ...] = ()  # fields that no setting below comes from, but for which llama.cpp has defaults


KINDS = {  # by transformers' model type
    "llama": GgufKind("llama", paired=True, scalings=(*SCALINGS, "llama3"), drafts=True),
    "mistral": GgufKind("llama", paired=True, scalings=(*SCALINGS, "llama3"), drafts=True),
    "qwen2": GgufKind("qwen2", drafts=True),
    "qwen3": GgufKind("qwen3", drafts=True),
    "qwen3_moe": GgufKind("qwen3moe", names=EXPERTS | {"mlp.gate": "ffn_gate_inp"}, fields=_qwen_moe,
                          needed=(WIDTH,), storage=STACKED, refuse=_refuse_qwen_moe),
    "gpt_oss": GgufKind(
        "gpt-oss",
        names=EXPERTS | {"mlp.router": "ffn_gate_inp", "self_attn.sinks": "attn_sinks",
                         "post_attention_layernorm": "post_attention_norm"},
        fields=_gpt_oss, needed=(WIDTH,), storage=INTERLEAVED, refuse=_refuse_gpt_oss, scalings=(*SCALINGS, "yarn"),
        biases=True, windows=True,
    ),
    "hunyuan_v1_dense": GgufKind(
        "hunyuan-dense", names={"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"}
    ),
    "minimax_m2": GgufKind("minimax-m2", names=EXPERTS | {"mlp.gate": "ffn_gate_inp", "mlp.scores": "exp_probs_b"},
                           fields=_minimax, fixed={"expert_gating_func": SIGMOID}, needed=(WIDTH,), storage=STACKED,
                           refuse=_refuse_tied),
    "lfm2": GgufKind(
        "lfm2",
        names={
            "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
            "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down",
            "feed_forward.w3": "ffn_up", "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj",
            "conv.out_proj": "shortconv.out_proj",
        },
        needed=("shortconv.l_cache",), fields=_lfm, storage=CONVOLVED, refuse=_refuse_lfm,
    ),
}  # fmt: skip


def experts_of(config: Any) -> list[int]:
    """The number of experts, and how many of them a token uses; empty where there are none."""
    count = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    return [count, config.num_experts_per_tok] if count else []


def rope_of(config: Any) -> dict[str, Any]:
    """The settings of rotary positions."""
    return getattr(config, "rope_parameters", None) or {}


def scaling_fields(config: Any) -> Fields:
    """The fields of scaled rotary positions. For the kind `llama3` there are none: it has a tensor of factors."""
    rope = rope_of(config)
    rope_type = rope.get("rope_type", "default")
    if rope_type not in ("linear", "yarn"):
        return {}
    fields: Fields = {"rope.scaling.type": rope_type, "rope.scaling.factor": float(rope["factor"])}
    if rope_type == "yarn":
        fields["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        fields |= {f"rope.scaling.yarn_{key}": float(rope[key]) for key in ("beta_fast", "beta_slow") if rope.get(key)}
    return fields


def facts_of(config: Any, head_dim: int) -> dict[str, Any]:
    """The settings that a written model must have again when it is read back, beside the dimensions."""
    layer_types = getattr(config, "layer_types", None) or []
    windows = [config.sliding_window if layer_type == "sliding_attention" else None for layer_type in layer_types]
    return {
        "layers": config.num_hidden_layers,
        "experts": experts_of(config),
        "windows": windows if any(windows) else [],
        "rope scaling": rope_of(config).get("rope_type", "default"),
        "scaling fields": scaling_fields(config),
        "rotated": int(head_dim * rope_of(config).get("partial_rotary_factor", 1.0)),
        "attention layers": [i for i, layer_type in enumerate(layer_types) if layer_type != "conv"]
        if "conv" in layer_types
        else [],
    }


def shape_of(file: GgufFile) -> LayerShape:
    """The dimensions of a file's layers, all with the same rotary positions. Raises ParityError for a field that is missing."""
    kv_heads, scaled = file.own("attention.head_count_kv", "heads"), f"{file.architecture}.rope.scaling.type" in file.fields
    return LayerShape(
        file.own("vocab_size", "vocabulary"),
        file.own("embedding_length", "config"),
        file.own("block_count", "config"),
        file.own("attention.head_count", "heads"),
        max(kv_heads) if isinstance(kv_heads, list) else kv_heads,
        file.own("attention.key_length", "head_dim"),
        file.own("feed_forward_length", "config"),
        file.own("context_length", "max positions"),
        file.own("rope.freq_base", "rope"),
        file.own("attention.layer_norm_rms_epsilon", "norm"),
        {"rope_type": file.own("rope.scaling.type", "rope scaling")} if scaled else None,
    )


def layer_facts(shape: TargetShape) -> dict[str, Any]:
    """What `golden.facts_of` has of these dimensions, but for the rotary scaling."""
    return {
        "vocabulary": shape.vocab_size,
        "rope": shape.rope_theta,
        "norm": shape.norm_eps,
        "head_dim": shape.head_dim,
        "heads": [shape.heads, shape.kv_heads],
        "max positions": shape.max_positions,
    }


def settings_of(file: GgufFile, kind: GgufKind) -> dict[str, Any]:
    """A language model's settings in its file, in the terms of `golden.facts_of` and of `facts_of`."""
    shape, architecture = shape_of(file), file.architecture
    for key in kind.needed:
        file.own(key, "config")
    for key, value in kind.fixed.items():
        file.expect(f"{architecture}.{key}", value, "config")
    file.expect(f"{architecture}.attention.value_length", shape.head_dim, "head_dim")
    has_experts, kv_heads = f"{architecture}.expert_count" in file.fields, file.own("attention.head_count_kv", "heads")
    scaling = {key: value for key in SCALING_FIELDS if (value := file.fields.get(f"{architecture}.{key}")) is not None}
    return layer_facts(shape) | {
        "rope scaling": "llama3" if FACTORS in file.names else scaling.get(SCALING_FIELDS[0], "default"),
        "scaling fields": scaling,
        "layers": shape.blocks,
        "experts": [file.own(key, "experts") for key in ("expert_count", "expert_used_count")] if has_experts else [],
        "windows": _windows(file),
        "rotated": file.own("rope.dimension_count", "head_dim"),
        "attention layers": [i for i, count in enumerate(kv_heads) if count] if isinstance(kv_heads, list) else [],
    }


def _windows(file: GgufFile) -> list[int | None]:
    if (window := file.fields.get(f"{file.architecture}.attention.sliding_window")) is None:
        return []
    return [window if is_sliding else None for is_sliding in file.own("attention.sliding_window_pattern", "windows")]


def weights_of(file: GgufFile, kind: GgufKind) -> Iterator[tuple[str, Tensor]]:
    """A language model's tensors, one by one, in float32, with transformers' names, forms and order of rows.

    Raises ParityError for gates of experts without values, or values without gates.
    """
    head_dim, unpaired = file.own("attention.key_length", "head_dim"), dict[str, Tensor]()
    for gguf_name, tensor in file.tensors():
        name = ours(gguf_name, kind.names)
        if kind.paired and rotates(name):
            tensor = halves(tensor, head_dim)
        stem, _, param_name = name.rpartition(".")
        owner, _, projection = stem.rpartition(".")
        if kind.storage.joined is not None and owner.endswith(".experts") and projection in HALVES:
            unpaired[name] = tensor
            pair_names = [f"{owner}.{half}.{param_name}" for half in HALVES]
            if not all(pair_name in unpaired for pair_name in pair_names):
                continue
            name, tensor = kind.storage.joined(owner, param_name, *(unpaired.pop(pair_name) for pair_name in pair_names))
        else:
            name, tensor = kind.storage.whole(name, tensor)
        yield name if stem == "lm_head" or gguf_name == FACTORS else f"model.{name}", tensor
    if unpaired:
        raise ParityError("target", f"{theirs(next(iter(unpaired)), kind.names)} has no other half")
