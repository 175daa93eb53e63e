"""Language models in llama.cpp's form, by their kind in transformers: names, fields, and tensors that are stored otherwise.

Shapes: E experts, I width of an expert, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Fields = dict[str, Any]
NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
EXPERTS = {f"mlp.experts.{x}_proj": f"ffn_{x}_exps" for x in ("gate", "up", "down")}
SWIGLU = (1.702, 7.0)  # gpt-oss' alpha and limit, which llama.cpp has no field for
SIGMOID = 2  # of the fields that say how scores of experts are made
SCALINGS = ("default", "linear")  # of rotary positions


def _as_it_is(name: str, tensor: Tensor) -> dict[str, Tensor]:
    return {name: tensor}


def _stacked(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Experts whose gates and values are in one tensor [E, 2I, H], the gates first."""
    stem, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        gate_EIH, up_EIH = tensor.chunk(2, 1)
        return {f"{stem}.gate_proj.weight": gate_EIH, f"{stem}.up_proj.weight": up_EIH}
    if last == "e_score_correction_bias":
        return {f"{stem}.scores.bias": tensor}
    return {f"{name}.weight" if last == "down_proj" else name: tensor}


def _interleaved(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Experts in one tensor [E, H, 2I], gates and values alternating, with biases; and sinks."""
    stem, _, last = name.rpartition(".")
    if last == "sinks":
        return {f"{name}.weight": tensor}
    if ".experts." not in name:
        return {name: tensor}
    part = "bias" if last.endswith("_bias") else "weight"
    transposed = tensor if part == "bias" else tensor.transpose(1, 2)
    if last.startswith("down_proj"):
        return {f"{stem}.down_proj.{part}": transposed}
    return {f"{stem}.gate_proj.{part}": transposed[:, ::2], f"{stem}.up_proj.{part}": transposed[:, 1::2]}


def _convolved(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Kernels of convolutions over single channels are matrices."""
    return {name: tensor.squeeze(1) if name.endswith("conv.conv.weight") else tensor}


def _no_fields(config: Any) -> Fields:
    return {}


def _nothing(config: Any) -> str | None:
    return None


def _experts(config: Any, width: int) -> Fields:
    count, used = experts_of(config)
    return {"expert_count": count, "expert_used_count": used, "expert_feed_forward_length": width}


def _qwen_moe(config: Any) -> Fields:
    return _experts(config, config.moe_intermediate_size)


def _gpt_oss(config: Any) -> Fields:
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    own = {"attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": windows}
    return _experts(config, config.intermediate_size) | own


def _minimax(config: Any) -> Fields:
    part = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    own = {"rope.dimension_count": int(config.head_dim * part), "expert_gating_func": SIGMOID}
    return _experts(config, config.intermediate_size) | own


def _lfm(config: Any) -> Fields:
    heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    return {"attention.head_count_kv": heads, "shortconv.l_cache": config.conv_L_cache}


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
    split: Callable[[str, Tensor], dict[str, Tensor]] = _as_it_is  # the tensors that stand for one
    refuse: Callable[[Any], str | None] = _nothing  # the reason why a configuration cannot be written
    scalings: tuple[str, ...] = SCALINGS  # kinds of rotary scaling that can be written
    biases: bool = False  # of attention
    windows: bool = False  # of attention
    drafts: bool = False  # as a draft model too


KINDS = {  # by transformers' model type
    "llama": GgufKind("llama", paired=True, scalings=(*SCALINGS, "llama3"), drafts=True),
    "mistral": GgufKind("llama", paired=True, scalings=(*SCALINGS, "llama3"), drafts=True),
    "qwen2": GgufKind("qwen2", drafts=True),
    "qwen3": GgufKind("qwen3", drafts=True),
    "qwen3_moe": GgufKind("qwen3moe", names=EXPERTS | {"mlp.gate": "ffn_gate_inp"}, fields=_qwen_moe, split=_stacked,
                      refuse=_refuse_qwen_moe),
    "gpt_oss": GgufKind(
        "gpt-oss",
        names=EXPERTS | {"mlp.router": "ffn_gate_inp", "self_attn.sinks": "attn_sinks",
                         "post_attention_layernorm": "post_attention_norm"},
        fields=_gpt_oss, split=_interleaved, refuse=_refuse_gpt_oss, scalings=(*SCALINGS, "yarn"), biases=True, windows=True,
    ),
    "hunyuan_v1_dense": GgufKind(
        "hunyuan-dense", names={"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"}
    ),
    "minimax_m2": GgufKind("minimax-m2", names=EXPERTS | {"mlp.gate": "ffn_gate_inp", "mlp.scores": "exp_probs_b"},
                       fields=_minimax, split=_stacked, refuse=_refuse_tied),
    "lfm2": GgufKind(
        "lfm2",
        names={
            "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
            "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down",
            "feed_forward.w3": "ffn_up", "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj",
            "conv.out_proj": "shortconv.out_proj",
        },
        fields=_lfm, split=_convolved, refuse=_refuse_lfm,
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
    kind = rope.get("rope_type", "default")
    if kind not in ("linear", "yarn"):
        return {}
    found: Fields = {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        found |= {f"rope.scaling.yarn_{key}": float(rope[key]) for key in ("beta_fast", "beta_slow") if rope.get(key)}
    return found


def facts_of(config: Any, head_dim: int) -> dict[str, Any]:
    """What the reader of a written target must find, beside the dimensions."""
    types = getattr(config, "layer_types", None) or []
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in types]
    return {
        "experts": experts_of(config),
        "windows": windows if any(windows) else [],
        "rope scaling": rope_of(config).get("rope_type", "default"),
        "rotated": int(head_dim * rope_of(config).get("partial_rotary_factor", 1.0)),
        "attention layers": [i for i, kind in enumerate(types) if kind != "conv"] if "conv" in types else [],
    }
