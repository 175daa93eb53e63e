"""GGUF files as llama.cpp's loaders read them: language models, `eagle3`, and `dflash` for all block drafters.

The layer ids are k, blocks whose inputs are read, for both. Of n blocks few targets can give number n, the last output; Llama
and Qwen3 cannot. EAGLE-3 takes exactly three layers. d2t holds the target's ids. Queries and keys of Llama and EAGLE-3 are
rotated by neighbouring values. llama.cpp has defaults for missing fields (`rope.freq_base` 10000, the head width from the
model's, token 11 as the end token); here every field must be written.

Vectors and kernels of three dimensions must be float32, the only type that it adds and multiplies element by element. It takes
the rows of the target's embedding as they are: a factor that the target applies to them, and a soft cap of its logits, are
fields of a block drafter. EAGLE-3 has no such field, but may have an embedding of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafttrain.export.gguf_file import GgufFile
from drafttrain.export.gguf_tokenizer import check_tokenizer  # which tries a tokenizer by expressions of its own
from tests.export_oracles import causal_lm, dflash, dflash2, dspark, eagle3
from tests.export_oracles.layer import LayerDimensions
from tests.export_oracles.parts import Config, MismatchError, Point, Reading, TargetParts, Tensors, scaled

MODELS = ("llama", "qwen2", "qwen3")
PAIRED = ("llama", "eagle3")
PARTIAL = ("minimax-m2",)  # models that rotate a part of each head
BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "attn_norm_2": "hidden_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_conv_proj": "mlp_conv.kernel_projection",
}
SPELLED = {llama: own for own, llama in BLOCK.items()}
ENDS = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
HEADS = {
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "candidate_selector.hidden_projection": "selector_hidden",
}
BARE = {  # names without `weight` in the authors' files, or here
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "mlp_conv.base_kernel": "ffn_conv_base",
}
FACTOR = "dflash.embedding_scale"  # of the target's embedding
CONTEXT = ("fc", "enc.output_norm")  # of a block drafter


def model(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """A draft model of any architecture that llama.cpp runs, with the target's tokenizer."""
    return language_model(directory, "draft.gguf", target, points)


def language_model(directory: Path, file: str, target: TargetParts, points: Sequence[Point]) -> Reading:
    """A language model in this file."""
    config, tensors, kind = _opened(directory, file, MODELS, target)
    shape = shape_of(config, kind, tensors)
    plan = causal_lm.LayerPlan(shape, own_field(config, kind, "block_count", "config"), kind == "qwen2", kind == "qwen3")
    return causal_lm.reading(plan, tensors, target, points, tied="output.weight" not in tensors.left)


def eagle3_draft(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """An EAGLE-3 drafter."""
    config, tensors, kind = _opened(directory, "draft.gguf", ("eagle3",), target)
    shape, (vocab, target_width) = shape_of(config, kind, tensors), target.embed.shape
    config.expect("eagle3.block_count", 1, "config")
    config.expect("eagle3.target_hidden_size", target_width, "config")
    layers = _layers(config, kind, target)
    if len(layers) != 3:
        raise MismatchError("layer ids", f"eagle3.target_layers has {len(layers)} numbers, but llama.cpp takes three")
    if own_field(config, kind, "norm_before_fc", "norm flags"):
        raise MismatchError(
            "norm flags", "eagle3.norm_before_fc is true: one norm over all fused states, which no drafter here has"
        )
    ids = tensors.left.pop("d2t", torch.arange(vocab))
    if ids.dtype != torch.int64:
        raise MismatchError("d2t", f"it is {ids.dtype}, but llama.cpp takes int64")
    before = bool(own_field(config, kind, "norm_before_residual", "norm flags"))
    if "token_embd.weight" in tensors.left:
        target = replace(target, embed=tensors.take("embed_tokens.weight", vocab, target_width, fails="vocabulary"))
    head = eagle3.load_head(tensors, "layers.0", shape, target_width, ids, layers, 0, before, output=False)
    tensors.finish()
    return eagle3.reading(head, target, points)


def dflash_draft(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """A block drafter without a head of its own. Slots are in place: llama.cpp ignores another flag."""
    config, tensors, block = _block(directory, target)
    target = scaled(target, config.values.get(FACTOR))
    return _capped(config, dflash.reading(block, tensors, CONTEXT, target, points))


def dspark_draft(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """A block drafter with a Markov head, whose rank is that of the tensors. A confidence head needs its weights."""
    config, tensors, block = _block(directory, target)
    first = 0 if config.get("dflash.sample_from_anchor", "config") else 1
    config.expect("dflash.has_confidence_head", True, "config")
    target = scaled(target, config.values.get(FACTOR))
    return _capped(config, dspark.reading(replace(block, first=first), tensors, CONTEXT, -1, target, points))


def dflash2_draft(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """A block drafter with convolutions and a selector. A slot's pairs of candidates must fit a state."""
    config, tensors, block = _block(directory, target)
    config.expect("dflash.conv_kernel_size", 2, "config")
    block = replace(block, group=config.get("dflash.conv_group_size", "config"))
    rank, candidates = (config.get(f"dflash.selector_{key}", "config") for key in ("rank", "top_k"))
    if candidates * (candidates + 1) > block.shape.width:
        raise MismatchError("config", f"dflash.selector_top_k is {candidates}, too many for states of {block.shape.width}")
    target = scaled(target, config.values.get(FACTOR))
    return _capped(config, dflash2.reading(block, tensors, CONTEXT, rank, candidates, target, points))


def _block(directory: Path, target: TargetParts) -> tuple[Config, Tensors, dflash.DraftBlockShape]:
    """One flag says whether slots of all layers see no later slot."""
    config, tensors, kind = _opened(directory, "draft.gguf", ("dflash",), target)
    block = dflash.DraftBlockShape(
        shape_of(config, kind, tensors),
        own_field(config, kind, "block_count", "config"),
        _layers(config, kind, target),
        own_field(config, kind, "block_size", "block size"),
        config.get("tokenizer.ggml.mask_token_id", "mask token"),
        causal=bool(own_field(config, kind, "attention.causal", "config")),
    )
    return config, tensors, block


def _capped(config: Config, reading: Reading) -> Reading:
    """With the soft cap of the head's logits as a fact. The golden drafts are made without one."""
    return replace(reading, facts=reading.facts | {"soft cap": config.values.get("dflash.final_logit_softcapping")})


def _opened(directory: Path, file: str, kinds: tuple[str, ...], target: TargetParts) -> tuple[Config, Tensors, str]:
    config, kind = checked(directory, file, kinds, target)
    return config, Tensors(directory, file, _tensors, _spelled), kind


def checked(directory: Path, file: str, kinds: Sequence[str], target: TargetParts) -> tuple[Config, str]:
    """The fields and the architecture, one of these kinds, with the tokenizer checked."""
    config = fields_of(directory, file)
    kind = config.get("general.architecture", "architecture")
    if kind not in kinds:
        raise MismatchError("architecture", f"general.architecture is {kind!r}; {' or '.join(kinds)} is needed")
    config.expect(f"{kind}.vocab_size", len(target.embed), "vocabulary")
    check_tokenizer(GgufFile(directory / file, config.values), len(target.embed), target.pieces or {}, target.texts)
    return config, kind


def own_field(config: Config, kind: str, key: str, name: str) -> Any:
    """A field of this architecture. name: of the failure where it is missing."""
    return config.get(f"{kind}.{key}", name)


def _layers(config: Config, kind: str, target: TargetParts) -> list[int]:
    layers: list[int] = own_field(config, kind, "target_layers", "layer ids")
    if max(layers) >= target.blocks:
        raise MismatchError(
            "layer ids", f"{kind}.target_layers has {max(layers)}, but targets can give only the inputs of their blocks"
        )
    return layers


def shape_of(config: Config, kind: str, tensors: Tensors | None) -> LayerDimensions:
    """The dimensions of the layers. tensors: those with factors of rotary positions, if any."""

    def own(key: str, name: str) -> Any:
        return own_field(config, kind, key, name)

    head_dim = own("attention.key_length", "head_dim")
    for key in ("attention.value_length",) if kind in PARTIAL else ("attention.value_length", "rope.dimension_count"):
        config.expect(f"{kind}.{key}", head_dim, "head_dim")
    kv_heads = own("attention.head_count_kv", "heads")
    scaling: dict[str, Any] = {}
    if tensors is not None and "rope_freqs.weight" in tensors.left:
        if kind not in PAIRED:
            raise MismatchError("rope scaling", f"llama.cpp does not read rope_freqs.weight in {kind} models")
        scaling = {"rope_type": "llama3", "factors": tensors.left.pop("rope_freqs.weight")}
    elif f"{kind}.rope.scaling.type" in config.values:
        scaling = {"rope_type": own("rope.scaling.type", "rope scaling"), "factor": own("rope.scaling.factor", "rope scaling")}
    return LayerDimensions(
        own("embedding_length", "config"),
        own("feed_forward_length", "config"),
        own("attention.head_count", "heads"),
        max(kv_heads) if isinstance(kv_heads, list) else kv_heads,
        head_dim,
        own("rope.freq_base", "rope"),
        own("attention.layer_norm_rms_epsilon", "norm"),
        own("context_length", "max positions"),
        scaling,
        paired=kind in PAIRED,
    )


def _spelled(name: str) -> str:
    """llama.cpp's name for a name of Llama's, or of a block drafter's authors."""
    name = name.removeprefix("model.")
    if name.startswith("layers."):
        _, number, inner = name.split(".", 2)
        stem, _, part = inner.rpartition(".")
        return f"blk.{number}." + (BARE.get(inner) or f"{SPELLED[stem]}.{part}")
    stem, _, part = name.rpartition(".")
    return BARE.get(name) or f"{(ENDS | HEADS).get(stem, stem)}.{part}"


def read(directory: Path, file: str, what: str, of: Callable[[Any], Any]) -> Any:
    """What `of` takes from a file. what: the name of the failure for one that cannot be read."""
    from gguf import GGUFReader

    try:
        return of(GGUFReader(directory / file))
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise MismatchError(what, f"{file} cannot be read ({error})") from error


def fields_of(directory: Path, file: str) -> Config:
    """All fields of a file."""
    return Config(read(directory, file, "config", lambda r: {key: _value(field) for key, field in r.fields.items()}), file)


def _tensors(directory: Path, file: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = read(directory, file, "tensors", lambda r: {x.name: tensor_of(x) for x in r.tensors})
    return found


def _value(field: Any) -> Any:
    """A field's value. float32 numbers become the decimals that they were written from."""
    value = field.contents()
    return float(str(np.float32(value))) if isinstance(value, float) else value


def tensor_of(stored: Any) -> Tensor:
    """A stored tensor, floats in float32. Raises MismatchError for a type that llama.cpp does not take there."""
    kind, array = stored.tensor_type.name, np.array(stored.data)
    if kind not in ("F32", "F16", "BF16", "I64"):
        raise MismatchError("tensors", f"{stored.name} is {kind}, which the reader does not know")
    if kind not in ("F32", "I64") and array.ndim != 2 and not stored.name.endswith("_exps.weight"):
        raise MismatchError("tensors", f"{stored.name} has {array.ndim} dimensions and is {kind}, but llama.cpp takes float32")
    tensor = torch.from_numpy(array)
    return tensor if kind == "I64" else (tensor.view(torch.bfloat16) if kind == "BF16" else tensor).float()
