"""GGUF files as llama.cpp's loaders read them: language models, `eagle3` and `dflash`.

The numbers of the layers are k, the block whose input they are, for both; of n blocks few targets give out number n, their last
output, and Llama and Qwen3 are not among them. EAGLE-3 takes three, no more or fewer. d2t holds the target's ids. Queries and
keys of Llama and EAGLE-3 are rotated by neighbouring values. What a file does not say llama.cpp fills in by itself
(`rope.freq_base` 10000, the width of heads from that of the model, token 11 for the end of a text): here it has to be said.

Vectors must be float32: its norms and biases take nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafttrain.export.readers import causal_lm, dflash, eagle3
from drafttrain.export.readers.gguf_tokenizer import check_tokenizer
from drafttrain.export.readers.layer import Layer, Shape
from drafttrain.export.readers.parts import Config, Engine, MismatchError, Point, Reading, Tensors

MODELS = ("llama", "qwen2", "qwen3")
PAIRED = ("llama", "eagle3")
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
}
SPELLED = {llama: own for own, llama in BLOCK.items()}
ENDS = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def model(directory: Path, engine: Engine, points: Sequence[Point]) -> Reading:
    """A draft model: any that llama.cpp decodes, with the target's tokenizer."""
    return language_model(directory, "draft.gguf", engine, points)


def language_model(directory: Path, file: str, engine: Engine, points: Sequence[Point]) -> Reading:
    config, tensors, kind = _opened(directory, file, MODELS, engine)
    shape = _shape(config, kind, tensors)
    plan = causal_lm.Plan(shape, _own(config, kind, "block_count", "config"), kind == "qwen2", kind == "qwen3")
    return causal_lm.reading(plan, tensors, engine, points, tied="output.weight" not in tensors.left)


def eagle3_draft(directory: Path, engine: Engine, points: Sequence[Point]) -> Reading:
    config, tensors, kind = _opened(directory, "draft.gguf", ("eagle3",), engine)
    shape, (vocab, target_width) = _shape(config, kind, tensors), engine.embed.shape
    config.expect("eagle3.block_count", 1, "config")
    config.expect("eagle3.target_hidden_size", target_width, "config")
    layers = _layers(config, kind, engine)
    if len(layers) != 3:
        raise MismatchError("layer ids", f"eagle3.target_layers has {len(layers)} numbers, and llama.cpp takes three")
    if _own(config, kind, "norm_before_fc", "norm flags"):
        raise MismatchError(
            "norm flags", "eagle3.norm_before_fc is true: one norm over all fused states, which nothing here has"
        )
    ids = tensors.left.pop("d2t", torch.arange(vocab))
    if ids.dtype != torch.int64:
        raise MismatchError("d2t", f"it is {ids.dtype}, llama.cpp takes int64")
    width, spoken = shape.width, len(ids)
    head = eagle3.Head(
        shape,
        Layer(tensors, "layers.0", shape, 2 * width),
        tensors.take("fc.weight", width, len(layers) * target_width, fails="layer ids"),
        [],
        tensors.take("layers.0.input_layernorm.weight", width),
        tensors.take("layers.0.hidden_norm.weight", width),
        tensors.take("norm.weight", width),
        tensors.take("lm_head.weight", spoken, width, fails="vocabulary"),
        ids,
        layers,
        bool(_own(config, kind, "norm_before_residual", "norm flags")),
        output=False,
    )
    tensors.finish()
    return eagle3.reading(head, engine, points)


def dflash_draft(directory: Path, engine: Engine, points: Sequence[Point]) -> Reading:
    config, tensors, kind = _opened(directory, "draft.gguf", ("dflash",), engine)
    config.expect("dflash.attention.causal", False, "config")
    block = dflash.Block(
        _shape(config, kind, tensors),
        _own(config, kind, "block_count", "config"),
        _layers(config, kind, engine),
        _own(config, kind, "block_size", "block size"),
        config.get("tokenizer.ggml.mask_token_id", "mask token"),
    )
    return dflash.reading(block, tensors, ("fc", "enc.output_norm"), engine, points)


def facts(directory: Path, file: str, engine: Engine) -> dict[str, Any]:
    """Of a language model, by its fields alone, its tokenizer checked."""
    config, kind = _checked(directory, file, MODELS, engine)
    own = {"layers": _own(config, kind, "block_count", "config"), "vocabulary": len(engine.embed)}
    return _shape(config, kind, None).facts() | own


def weights(directory: Path, file: str) -> Iterator[tuple[str, Tensor]]:
    """A language model's, one by one, in float32, by the names of Llama, rows of queries and keys as there."""
    config = _fields(directory, file)
    kind = config.get("general.architecture", "architecture")
    head_dim = _own(config, kind, "attention.key_length", "head_dim")
    for stored in _read(directory, file, "tensors", lambda reader: reader.tensors):
        (stem, _, part), tensor = stored.name.rpartition("."), _tensor(stored)
        if kind in PAIRED and stem.endswith(("attn_q", "attn_k")):
            tensor = tensor.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        if stem.startswith("blk."):
            _, number, own = stem.split(".")
            yield f"model.layers.{number}.{BLOCK[own]}.{part}", tensor
        elif stem == "output":
            yield f"lm_head.{part}", tensor
        elif stem != "rope_freqs":
            yield f"model.{next(llama for llama, own in ENDS.items() if own == stem)}.{part}", tensor


def _opened(directory: Path, file: str, kinds: tuple[str, ...], engine: Engine) -> tuple[Config, Tensors, str]:
    config, kind = _checked(directory, file, kinds, engine)
    return config, Tensors(directory, file, _tensors, _spelled), kind


def _checked(directory: Path, file: str, kinds: tuple[str, ...], engine: Engine) -> tuple[Config, str]:
    config = _fields(directory, file)
    kind = config.get("general.architecture", "architecture")
    if kind not in kinds:
        raise MismatchError("architecture", f"general.architecture is {kind!r}; {' or '.join(kinds)} is needed")
    if _own(config, kind, "vocab_size", "vocabulary") != len(engine.embed):
        got = config.values[f"{kind}.vocab_size"]
        raise MismatchError("vocabulary", f"{kind}.vocab_size is {got}, the target's is {len(engine.embed)}")
    check_tokenizer(config, engine)
    return config, kind


def _own(config: Config, kind: str, key: str, name: str) -> Any:
    return config.get(f"{kind}.{key}", name)


def _layers(config: Config, kind: str, engine: Engine) -> list[int]:
    layers: list[int] = _own(config, kind, "target_layers", "layer ids")
    if max(layers) >= engine.blocks:
        raise MismatchError(
            "layer ids", f"{kind}.target_layers asks for {max(layers)}, targets give out inputs of their blocks"
        )
    return layers


def _shape(config: Config, kind: str, tensors: Tensors | None) -> Shape:
    def own(key: str, name: str) -> Any:
        return _own(config, kind, key, name)

    head_dim = own("attention.key_length", "head_dim")
    for key in ("attention.value_length", "rope.dimension_count"):
        config.expect(f"{kind}.{key}", head_dim, "head_dim")
    scaling: dict[str, Any] = {}
    if tensors is not None and "rope_freqs.weight" in tensors.left:
        if kind not in PAIRED:
            raise MismatchError("rope scaling", f"rope_freqs.weight is not read in models of {kind}")
        scaling = {"rope_type": "llama3", "factors": tensors.left.pop("rope_freqs.weight")}
    elif f"{kind}.rope.scaling.type" in config.values:
        scaling = {"rope_type": own("rope.scaling.type", "rope scaling"), "factor": own("rope.scaling.factor", "rope scaling")}
    return Shape(
        own("embedding_length", "config"),
        own("feed_forward_length", "config"),
        own("attention.head_count", "heads"),
        own("attention.head_count_kv", "heads"),
        head_dim,
        own("rope.freq_base", "rope"),
        own("attention.layer_norm_rms_epsilon", "norm"),
        own("context_length", "max positions"),
        scaling,
        paired=kind in PAIRED,
    )


def _spelled(name: str) -> str:
    """llama.cpp's name of what Llama calls so."""
    stem, _, part = name.removeprefix("model.").rpartition(".")
    if stem.startswith("layers."):
        _, number, inner = stem.split(".", 2)
        return f"blk.{number}.{SPELLED[inner]}.{part}"
    return f"{ENDS.get(stem, stem)}.{part}"


def _read(directory: Path, file: str, what: str, of: Callable[[Any], Any]) -> Any:
    from gguf import GGUFReader

    try:
        return of(GGUFReader(directory / file))
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise MismatchError(what, f"{file} cannot be read ({error})") from error


def _fields(directory: Path, file: str) -> Config:
    return Config(_read(directory, file, "config", lambda r: {key: _value(field) for key, field in r.fields.items()}), file)


def _tensors(directory: Path, file: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = _read(directory, file, "tensors", lambda r: {x.name: _tensor(x) for x in r.tensors})
    return found


def _value(field: Any) -> Any:
    """float32 numbers as the decimals that they were written for."""
    value = field.contents()
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _tensor(stored: Any) -> Tensor:
    kind, array = stored.tensor_type.name, np.array(stored.data)
    if kind not in ("F32", "F16", "BF16", "I64"):
        raise MismatchError("tensors", f"{stored.name} is {kind}, which the reader does not know")
    if array.ndim == 1 and kind not in ("F32", "I64"):
        raise MismatchError("tensors", f"{stored.name} is a vector in {kind}, llama.cpp takes float32")
    tensor = torch.from_numpy(array)
    return tensor if kind == "I64" else (tensor.view(torch.bfloat16) if kind == "BF16" else tensor).float()
