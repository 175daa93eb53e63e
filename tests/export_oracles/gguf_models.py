"""Targets in GGUF files, read as llama.cpp's models of each architecture: the settings, and all weights as transformers has
them.

Shapes: E experts, I width of an expert, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.export_oracles.gguf import BLOCK, ENDS, PAIRED, checked, fields_of, own_field, read, shape_of, tensor_of
from tests.export_oracles.parts import Config, MismatchError, TargetParts

HALVES = ("ffn_gate_exps", "ffn_up_exps")  # what transformers has in one tensor
MOE = {"ffn_gate_inp": "mlp.gate"}
# architecture -> names of a block's tensors, beside or in place of Llama's
NAMES: dict[str, dict[str, str]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3moe": MOE,
    "minimax-m2": MOE,
    "gpt-oss": {"ffn_gate_inp": "mlp.router", "post_attention_norm": "post_attention_layernorm"},
    "hunyuan-dense": {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    "lfm2": {
        "attn_norm": "operator_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_down": "feed_forward.w2",
        "ffn_up": "feed_forward.w3",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
    },
}
# (architecture, a tensor) -> its name and form in transformers
ONES: dict[tuple[str, str], tuple[str, Callable[[Tensor], Tensor]]] = {
    ("qwen3moe", "ffn_down_exps.weight"): ("mlp.experts.down_proj", Tensor.contiguous),
    ("minimax-m2", "ffn_down_exps.weight"): ("mlp.experts.down_proj", Tensor.contiguous),
    ("minimax-m2", "exp_probs_b.bias"): ("mlp.e_score_correction_bias", Tensor.contiguous),
    ("gpt-oss", "ffn_down_exps.weight"): ("mlp.experts.down_proj", lambda x: x.transpose(1, 2)),
    ("gpt-oss", "ffn_down_exps.bias"): ("mlp.experts.down_proj_bias", Tensor.contiguous),
    ("gpt-oss", "attn_sinks.weight"): ("self_attn.sinks", Tensor.contiguous),
    ("lfm2", "shortconv.conv.weight"): ("conv.conv.weight", lambda x: x[:, None]),
}
# what llama.cpp reads, and must not take from its defaults
NEEDED = {
    "qwen3moe": ("expert_feed_forward_length",),
    "gpt-oss": ("expert_feed_forward_length",),
    "minimax-m2": ("expert_feed_forward_length",),
    "lfm2": ("shortconv.l_cache",),
}


def facts(directory: Path, file: str, target: TargetParts) -> dict[str, Any]:
    """A language model's settings, from its fields, with the tokenizer checked."""
    config, kind = checked(directory, file, list(NAMES), target)
    for key in NEEDED.get(kind, ()):
        own_field(config, kind, key, "config")
    if kind == "minimax-m2":
        config.expect("minimax-m2.expert_gating_func", 2, "experts")
    own = {
        "layers": own_field(config, kind, "block_count", "config"),
        "vocabulary": len(target.embed),
        "experts": _experts(config, kind),
        "windows": _windows(config, kind),
        "rotated": own_field(config, kind, "rope.dimension_count", "head_dim"),
        "attention layers": _attention_layers(config, kind),
    }
    names = read(directory, file, "tensors", lambda reader: [x.name for x in reader.tensors])
    scaling = {"rope scaling": "llama3"} if "rope_freqs.weight" in names else {}
    return shape_of(config, kind, None).facts() | scaling | own


def _experts(config: Config, kind: str) -> list[int]:
    if f"{kind}.expert_count" not in config.values:
        return []
    return [own_field(config, kind, key, "experts") for key in ("expert_count", "expert_used_count")]


def _windows(config: Config, kind: str) -> list[int | None]:
    if f"{kind}.attention.sliding_window" not in config.values:
        return []
    window = config.values[f"{kind}.attention.sliding_window"]
    return [window if own else None for own in own_field(config, kind, "attention.sliding_window_pattern", "windows")]


def _attention_layers(config: Config, kind: str) -> list[int]:
    heads = own_field(config, kind, "attention.head_count_kv", "heads")
    return [i for i, count in enumerate(heads) if count] if isinstance(heads, list) else []


def weights(directory: Path, file: str) -> Iterator[tuple[str, Tensor]]:
    """A language model's tensors, one by one, in float32, with transformers' names, forms and order of rows."""
    config = fields_of(directory, file)
    kind = config.get("general.architecture", "architecture")
    head_dim, halves = own_field(config, kind, "attention.key_length", "head_dim"), dict[str, Tensor]()
    for stored in read(directory, file, "tensors", lambda reader: reader.tensors):
        (stem, _, part), tensor = stored.name.rpartition("."), tensor_of(stored)
        if kind in PAIRED and stem.endswith(("attn_q", "attn_k")):
            tensor = tensor.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        if stem.startswith("blk."):
            _, number, own = stem.split(".", 2)
            if own not in HALVES:
                yield f"model.layers.{number}.{_name(kind, own, part)[0]}", _name(kind, own, part)[1](tensor)
                continue
            halves[f"{number}.{own}.{part}"] = tensor
            both = [halves.get(f"{number}.{half}.{part}") for half in HALVES]
            if both[0] is not None and both[1] is not None:
                for half in HALVES:
                    del halves[f"{number}.{half}.{part}"]
                yield f"model.layers.{number}.mlp.experts.gate_up_proj" + _joined(kind, part)[0], _joined(kind, part)[1](both)
        elif stem == "output":
            yield f"lm_head.{part}", tensor
        elif stem == "token_embd_norm":
            yield f"model.embedding_norm.{part}", tensor
        elif stem != "rope_freqs":
            yield f"model.{next(llama for llama, own in ENDS.items() if own == stem)}.{part}", tensor
    if halves:
        raise MismatchError("target", f"{next(iter(halves))} has no other half")


def _name(kind: str, own: str, part: str) -> tuple[str, Callable[[Tensor], Tensor]]:
    if (kind, f"{own}.{part}") in ONES:
        return ONES[kind, f"{own}.{part}"]
    return f"{(BLOCK | NAMES[kind])[own]}.{part}", Tensor.contiguous


def _joined(kind: str, part: str) -> tuple[str, Callable[[Any], Tensor]]:
    """How the ending of a name begins, and how gates and values are joined."""
    if kind != "gpt-oss":
        return "", lambda both: torch.cat(both, 1)
    if part == "bias":
        return "_bias", lambda both: torch.stack(both, 2).flatten(1)
    return "", lambda both: torch.stack(both, 2).flatten(1, 2).transpose(1, 2)
