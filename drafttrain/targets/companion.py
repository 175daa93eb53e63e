"""Language models that draft beside a target: of its architecture with fresh weights, or loaded from elsewhere."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from drafttrain.core.errors import UserError
from drafttrain.model.target import Target
from drafttrain.targets.fast import FastTarget, why_not
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.probe import probe
from drafttrain.targets.structure import shape_of
from drafttrain.targets.weights import check_settings, load_model

SIZES = ("intermediate_size", "ffn_dim", "n_inner", "word_embed_proj_dim")  # that go with the width, where a config has them


@dataclass(frozen=True, slots=True)
class Companion:
    """A loaded causal LM, float32 and trainable, on the target's device.

    tokenizer: its own; None where the directory has none. same_tokens: its token ids mean what the target's do.
    missing: why the weights are not there, all NaN; None when they are.
    """

    model: HFTarget
    tokenizer: Any
    same_tokens: bool
    missing: str | None


def scratch(given: Target, blocks: int, width: int | None) -> HFTarget:
    """The target's architecture with so many blocks, freshly initialised. width: hidden size, heads and MLP in proportion.

    Raises UserError for a depth or width that the architecture cannot have.
    """
    target = _hf(given)
    config = copy.deepcopy(target.model.config)
    if blocks < 1:
        raise UserError(f"drafter.blocks is {blocks}; set it to 1 or more")
    text = config.get_text_config()
    text.num_hidden_layers = blocks
    if kinds := getattr(text, "layer_types", None):
        text.layer_types = [kinds[i % len(kinds)] for i in range(blocks)]
    if width is not None:
        _narrow(text, target, width)
    return _runner(type(target.model)(config), target)


def companion(given: Target, path: str, revision: str | None) -> Companion:
    """The causal LM at a directory or hub id, from safetensors only; code that comes with it is not run.

    Where its tokens are the target's, its vocabulary is brought to the target's size: models of one tokenizer are often
    padded to different sizes. Raises UserError for a path without a usable model, or a vocabulary that fits neither way.
    """
    where = readable(path)
    try:
        config = AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=False)
    except Exception as error:  # libraries end in errors of every kind where it is damaged
        raise UserError(
            f"drafter.path {path!r} has no usable config.json, which checkpoints need too: {_short(error)}"
        ) from error
    target = _hf(given)
    if target.outline:
        return Companion(target.outline_of(AutoModelForCausalLM.from_config(config)), None, True, None)
    tokenizer = _tokenizer(where, revision)
    model, missing = _load(where, revision, config)
    if tokenizer is None or target.tokenizer is None:  # nothing to compare but the sizes
        same = shape_of(config.get_text_config()).vocab_size == target.shape.vocab_size
        if not same:
            raise UserError(
                f"drafter.path {path!r} has {model.config.get_text_config().vocab_size} tokens, the target "
                f"{target.shape.vocab_size}, and without both tokenizers neither can be translated; add the tokenizer's files"
            )
    else:
        same = vocabulary(tokenizer) == vocabulary(target.tokenizer)
    if same:
        resize(model, target.shape.vocab_size)
    lm = _runner(model, target)
    lm.tokenizer = tokenizer
    if missing is None:
        _check(lm, path)
    return Companion(lm, tokenizer, same, missing)


def _hf(target: Target) -> HFTarget:
    """Every target that drafters are built for is a transformers model, or stands before one and has its attributes."""
    return cast(HFTarget, target)


def vocabulary(tokenizer: Any) -> dict[str, int]:
    """Pieces and their ids; special tokens, which are no text, left out."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {piece: i for piece, i in tokenizer.get_vocab().items() if i not in special}


@torch.no_grad()
def resize(model: Any, size: int) -> None:
    """Bring a model's vocabulary to `size`: padding is cut off, or added as mean rows, which are never likely."""
    known = model.get_input_embeddings().weight.shape[0]
    if size == known:
        return
    model.resize_token_embeddings(size, mean_resizing=False)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        layer.weight[known:] = layer.weight[:known].mean(0)


def _narrow(text: Any, target: HFTarget, width: int) -> None:
    shape = target.shape
    heads = width // shape.head_dim
    if width < shape.head_dim or width % shape.head_dim:
        raise UserError(
            f"drafter.hidden_size is {width}; the target's heads are {shape.head_dim} wide, choose a multiple of that"
        )
    kv_heads = max(n for n in range(1, min(shape.kv_heads, heads) + 1) if heads % n == 0)
    for name in SIZES:
        if getattr(text, name, None) is not None:
            setattr(text, name, max(1, getattr(text, name) * width // shape.hidden_size))
    if getattr(text, "num_key_value_heads", None) is not None:
        text.num_key_value_heads = kv_heads
    text.num_attention_heads, text.hidden_size = heads, width


def _runner(model: Any, target: HFTarget) -> HFTarget:
    runner = HFTarget if why_not(model) else FastTarget
    return runner(model.to(target.device, torch.float32), target.stop_ids, frozen=False)


def _load(where: str, revision: str | None, config: PreTrainedConfig) -> tuple[Any, str | None]:
    """(model, why its weights are missing): a checkpoint of ours brings weights of its own, and needs the config alone."""
    try:
        return load_model(
            where, f"drafter.path {where!r}", revision=revision, trust_remote_code=False, dtype=torch.float32
        ), None
    except UserError:
        raise
    except (OSError, ValueError, ImportError) as error:
        reason = _short(error)
    try:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise UserError(f"drafter.path {where!r} is no causal LM that transformers knows: {_short(error)}") from error
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    return model, reason


def _check(lm: HFTarget, path: str) -> None:
    try:
        lm.eval()
        lm.trees = probe(lm)
        lm.train()
    except Exception as error:  # whatever a model raises that does not know this cache
        raise UserError(f"drafter.path {path!r} cannot draft with a KV cache of ours: {_short(error)}") from error


def _tokenizer(where: str, revision: str | None) -> Any:
    try:
        return AutoTokenizer.from_pretrained(where, revision=revision, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain ones
        if (Path(where) / "tokenizer.json").is_file():
            raise UserError(f"drafter.path {where!r} has a tokenizer.json that cannot be read: {_short(error)}") from error
        return None


def readable(path: str) -> str:
    """The directory or hub id to load from. Raises UserError where there is none."""
    folder = Path(path).expanduser()
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise UserError(f"drafter.path {path!r} has no config.json; set it to a transformers model directory")
        check_settings(str(folder))
        return str(folder)
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise UserError(f"drafter.path {path!r} does not exist; set it to a model directory or a hub id")
    return path


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160]
