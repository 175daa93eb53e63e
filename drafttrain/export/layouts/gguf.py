"""llama.cpp's GGUF files: a draft model or a target, EAGLE-3, and the block drafters, which have one architecture, `dflash`.

Its loaders of EAGLE-3 and of block drafters take the embedding, and for blocks the head too, from the loaded target, without
the factor that some targets apply to the embedding, or the soft cap of their logits. Block drafters have fields for these, and
EAGLE-3 can bring an embedding of its own. All read the target's tokenizer from the drafter's file.

In models of the Llama kind, EAGLE-3 among them, llama.cpp rotates pairs of neighbouring values, where transformers rotates the
two halves of a head. So rows of queries and keys are reordered for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafttrain.export.files import ExportSource, Files
from drafttrain.export.ggufs import ARCHITECTURE, FACTORS, FILE_TYPES
from drafttrain.export.layouts import dflash as zlab
from drafttrain.export.layouts import dflash2, draft_model, dspark, eagle3, jetspec
from drafttrain.export.layouts import gguf_tokenizer as tokens
from drafttrain.export.layouts.causal import causal_layers, windows
from drafttrain.export.layouts.gguf_models import KINDS, NORMS, rope_of, scaling_fields
from drafttrain.export.layouts.target_ends import embedding_scale, logit_ends
from drafttrain.model.shapes import TargetShape

DRAFT, TARGET = "draft.gguf", "target.gguf"
EMBEDDING = "token_embd.weight"
# targets whose blocks' inputs llama.cpp 11434 can capture, by the model type of their text part. Its models of two more kinds
# can too: their states are several streams (qwen4_exp), or a mean over streams (deepseek_v4), which are no blocks' outputs here
CAPTURED = (
    "llama", "mistral", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gpt_oss", "gemma4_text",
    "lfm2", "lfm2_moe", "minimax", "minimax_m2", "mimo_v2_flash", "nemotron_h", "hunyuan_v1_dense", "hunyuan_vl_text",
    "muse_glimmer_text",
)  # fmt: skip
NAMES = NORMS | {
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
}
BARE = "base_kernel"  # a parameter whose name there has no ending


def refuse_eagle3(source: ExportSource) -> str | None:
    """Why llama.cpp cannot load this drafter; None where it can."""
    return eagle3.refuse(source) or _refuse_states(source)


def refuse_dflash(source: ExportSource) -> str | None:
    """Why llama.cpp cannot load this drafter; None where it can."""
    return _refuse_windows(source) or zlab.refuse(source) or _refuse_states(source)


def refuse_dspark(source: ExportSource) -> str | None:
    """Why llama.cpp cannot load this drafter; None where it can."""
    return _refuse_windows(source) or dspark.refuse(source) or _refuse_states(source)


def refuse_dflash2(source: ExportSource) -> str | None:
    """Why llama.cpp cannot load this drafter; None where it can. Of k candidates k (k + 1) numbers must fit a state."""
    pairs, width = source.options["candidates"] * (source.options["candidates"] + 1), source.shape.hidden_size
    if pairs > width:
        return (
            f"it has {source.options['candidates']} candidates, and llama.cpp takes k of them only where k (k + 1) is at most "
            f"the hidden size, {width}; train with fewer drafter.candidates"
        )
    return _refuse_windows(source) or dflash2.refuse(source) or _refuse_states(source)


def refuse_jetspec(source: ExportSource) -> str | None:
    """Why llama.cpp cannot load this drafter; None where it can."""
    return _refuse_windows(source) or jetspec.refuse(source) or _refuse_states(source)


def refuse_model(source: ExportSource) -> str | None:
    """Why llama.cpp cannot load this draft model; None where it can."""
    lm: Any = source.drafter.language_model()
    return draft_model.refuse(source) or refuse_language_model(source, lm.model, [k for k in KINDS if KINDS[k].drafts])


def refuse_target(source: ExportSource) -> str | None:
    """Why the target cannot be written; None where it can."""
    return refuse_language_model(source, source.target.model, list(KINDS))


def refuse_language_model(source: ExportSource, model: Any, able: list[str]) -> str | None:
    """Why the target or a draft model cannot be written with its tokenizer; None where it can. able: the kinds that can."""
    config = model.config
    if (weights := source.opened.loaded.description.get("weights")) is not None:
        return f"its weights are {weights}, but GGUF files need unquantised ones; leave out target.weights"
    if config.model_type not in able:
        return f"its architecture is {config.model_type}, but GGUF files can be written only for {', '.join(able)}"
    kind = KINDS[config.model_type]
    if not kind.biases and (getattr(config, "mlp_bias", False) or getattr(config, "attention_bias", False)):
        return "its linear maps have biases, but GGUF files can be checked only without them"
    if (scaling := rope_of(config).get("rope_type", "default")) not in kind.scalings:
        return f"its rotary scaling is {scaling!r}, for which llama.cpp has no field in {config.model_type} models"
    if not kind.windows and "sliding_attention" in (getattr(config, "layer_types", None) or [_window(config)]):
        return "it has sliding-window attention, which llama.cpp does not support for this architecture"
    return kind.refuse(config) or tokens.refuse(source.opened.loaded.tokenizer)


def eagle3_files(source: ExportSource) -> Files:
    """An EAGLE-3 drafter. d2t holds the target's ids. An embedding with a factor is written, with it."""
    tensors = eagle3.weights(source)
    shape, d2t = source.layer_shape, tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    tensors = _renamed({name.replace("midlayer.", "layers.0."): x for name, x in tensors.items()}, shape, paired=True)
    if d2t is not None:
        tensors["d2t"] = d2t + torch.arange(len(d2t))  # the target's ids and not offsets
    own = {
        "target_layers": source.layer_inputs,
        "target_hidden_size": shape.hidden_size,
        "norm_before_residual": eagle3.before(source),
        "norm_before_fc": False,
    }
    if embedding_scale(source.target) is not None:
        tensors[EMBEDDING] = source.embedded
    fields = _fields("eagle3", source, shape, 1) | _own("eagle3", own)
    return Files(fields, tensors, DRAFT, True, eagle3.facts(source), as_is=(EMBEDDING,) if EMBEDDING in tensors else ())


def dflash_files(source: ExportSource) -> Files:
    """A block drafter without a head of its own."""
    return _block_files(source)


def dspark_files(source: ExportSource) -> Files:
    """A block drafter with a Markov head and a confidence head. The rank is that of the tensors."""
    return _block_files(source, sample_from_anchor=source.options["slots"] == "shifted", has_confidence_head=True)


def dflash2_files(source: ExportSource) -> Files:
    """A block drafter with convolutions and a selector."""
    return _block_files(source, **dflash2.shapes(source))


def _block_files(source: ExportSource, **more: Any) -> Files:
    """The layer ids name the blocks that read the states, unlike in the authors' configuration. more: fields of the head."""
    shape, mask = source.layer_shape, zlab.mask_token(source)
    tensors = {"enc.output_norm.weight" if name == "hidden_norm.weight" else name: x for name, x in source.tensors.items()}
    own = {
        "block_size": source.options["block_size"],
        "target_layers": source.layer_inputs,
        "attention.causal": all(causal_layers(source)),
        **more,
    }
    if (scale := embedding_scale(source.target)) is not None:
        own["embedding_scale"] = scale
    _, cap = logit_ends(source.target)
    if cap is not None:
        own["final_logit_softcapping"] = cap
    fields = _fields("dflash", source, shape, source.options["layers"]) | _own("dflash", own)
    fields["tokenizer.ggml.mask_token_id"] = mask
    facts = zlab.facts(source) | {"soft cap": cap}
    return Files(fields, _renamed(tensors, shape, paired=False), DRAFT, True, facts)


def model_files(source: ExportSource) -> Files:
    """A draft model."""
    lm: Any = source.drafter.language_model()
    return _language_model(source, lm.model, source.shape, draft_model.merged(lm.model), DRAFT)


def target_files(source: ExportSource) -> Files:
    """The target, with its trained adapter merged."""
    target = source.opened.loaded.target
    return _language_model(source, target.model, target.shape, draft_model.merged(target.model), TARGET)


def _language_model(source: ExportSource, model: Any, shape: TargetShape, weights: dict[str, Tensor], file: str) -> Files:
    config, kind = model.config, KINDS[model.config.model_type]
    parts: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        parts |= kind.split(name.removeprefix("model."), tensor)
    fields = _fields(kind.architecture, source, shape, config.num_hidden_layers)
    fields |= _own(kind.architecture, kind.fields(config) | scaling_fields(config))
    tensors = _renamed(parts, shape, kind.paired, kind.names)
    if rope_of(config).get("rope_type") == "llama3":
        plain_F = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        tensors[FACTORS] = plain_F / model.model.rotary_emb.inv_freq.float().cpu()
    return Files(fields, tensors, file, True)


def _fields(architecture: str, source: ExportSource, shape: TargetShape, blocks: int) -> dict[str, Any]:
    """Every field is written, even if llama.cpp has a default for it."""
    own = {
        "vocab_size": shape.vocab_size,
        "context_length": shape.max_positions,
        "embedding_length": shape.hidden_size,
        "block_count": blocks,
        "feed_forward_length": shape.intermediate_size,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": float(shape.norm_eps),
        "rope.freq_base": float(shape.rope_theta),
        "rope.dimension_count": shape.head_dim,
    }
    general = {
        ARCHITECTURE: architecture,
        "general.name": f"{source.opened.meta.family} for {Path(source.target_name).name}",
        "general.file_type": FILE_TYPES[source.dtype],
    }
    loaded = source.opened.loaded
    vocab = tokens.fields(loaded.tokenizer, loaded.target.shape.vocab_size, frozenset(loaded.target.stop_ids))
    return general | _own(architecture, own) | vocab


def _own(architecture: str, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{architecture}.{key}": value for key, value in values.items()}


def _renamed(
    tensors: dict[str, Tensor], shape: TargetShape, paired: bool, names: dict[str, str] | None = None
) -> dict[str, Tensor]:
    """The tensors under llama.cpp's names. paired: reorder rows of queries and keys for rotating neighbours. names: a kind's
    own.
    """
    found, known = {}, NAMES | (names or {})
    for name, tensor in tensors.items():
        if paired and ("q_proj" in name or "k_proj" in name):
            tensor = neighbours(tensor, shape.head_dim)
        found[_name(name, known)] = tensor
    return found


def _name(name: str, known: dict[str, str]) -> str:
    stem, _, part = name.rpartition(".")
    if stem.startswith("layers."):
        _, number, inner = stem.split(".", 2)
        return f"blk.{number}.{known[inner]}" + ("" if part == BARE else f".{part}")
    return f"{ENDS.get(stem, stem)}.{part}"


def neighbours(weight: Tensor, head_dim: int) -> Tensor:
    """Make rows i and i + head_dim / 2 of each head neighbours."""
    halves = weight.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2)


def _refuse_windows(source: ExportSource) -> str | None:
    """llama.cpp has fields for windows of block drafters. How many positions they count was not checked, so none is written."""
    if not any(windows(source)):
        return None
    return "its layers have sliding windows, which are not written to GGUF; train without drafter.layer.sliding_window"


def _refuse_states(source: ExportSource) -> str | None:
    kind = _text(source).model_type
    if kind not in CAPTURED:
        return f"llama.cpp captures no states of {kind} targets, only of {', '.join(CAPTURED)}"
    if getattr(source.layer_shape, "rope_scaling", None) is not None:
        return "its layers have rotary scaling, which is not written to GGUF; train without drafter.layer.rope_scaling"
    return tokens.refuse(source.opened.loaded.tokenizer)


def _text(source: ExportSource) -> Any:
    """The configuration of the target's text part."""
    return source.target.model.config.get_text_config()


def _window(config: Any) -> str:
    return "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
