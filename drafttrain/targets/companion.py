"""Language models that draft for a target: the target's architecture with fresh weights, or a model loaded from elsewhere."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from drafttrain.core.errors import UserError, hub_reason
from drafttrain.model.target import Target
from drafttrain.targets.fast import FastTarget, why_not
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.probe import probe
from drafttrain.targets.structure import set_depth, shape_of
from drafttrain.targets.weights import check_settings, load_model, one_line

SIZES = ("intermediate_size", "ffn_dim", "n_inner", "word_embed_proj_dim")  # config fields that scale with the width


@dataclass(frozen=True, slots=True)
class Companion:
    """A loaded causal LM, float32 and trainable, on the target's device."""

    model: HFTarget
    tokenizer: Any  # its own tokenizer; None where the directory has none
    same_tokens: bool  # whether its token ids mean the same as the target's
    missing: str | None  # why its weights are absent (all NaN then); None when they are there


def from_scratch(target: Target, blocks: int, width: int | None) -> HFTarget:
    """The target's architecture with this many blocks, freshly initialised. width: hidden size; heads and MLP scale with it.

    Raises UserError for a depth or width that the architecture cannot have.
    """
    original = _hf(target)
    config = copy.deepcopy(original.model.config)
    text = set_depth(config, blocks)
    if width is not None:
        _narrow(text, original, width)
    return _runner(type(original.model)(config), original)


def companion(given: Target, path: str, revision: str | None) -> Companion:
    """The causal LM at a directory or hub id, from safetensors only. Code that comes with the model is never run.

    If its tokens are the target's, its vocabulary is resized to the target's size, since models that share a tokenizer are
    often padded to different sizes. Raises UserError for a path without a usable model, and for a vocabulary that neither
    matches nor can be translated.
    """
    source = readable(path)
    try:
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except Exception as error:  # libraries raise errors of every kind for damaged files
        _check_hub(error, source, revision)
        raise UserError(
            f"drafter.path {path!r} has no usable config.json, which checkpoints need too: {one_line(error, 160)}"
        ) from error
    target = _hf(given)
    if target.outline:
        return Companion(target.outline_of(AutoModelForCausalLM.from_config(config)), None, True, None)
    tokenizer = _tokenizer(source, revision)
    model, missing = _load(source, revision, config)
    if tokenizer is None or target.tokenizer is None:  # only the sizes can be compared
        same_tokens = shape_of(config.get_text_config()).vocab_size == target.shape.vocab_size
        if not same_tokens:
            raise UserError(
                f"drafter.path {path!r} has {model.config.get_text_config().vocab_size} tokens, the target "
                f"{target.shape.vocab_size}, and without both tokenizers neither can be translated; add the tokenizer's files"
            )
    else:
        same_tokens = vocabulary(tokenizer) == vocabulary(target.tokenizer)
    if same_tokens:
        resize(model, target.shape.vocab_size)
    lm = _runner(model, target)
    lm.tokenizer = tokenizer
    if missing is None:
        _check(lm, path)
    return Companion(lm, tokenizer, same_tokens, missing)


def _hf(target: Target) -> HFTarget:
    """Every target that drafters are built for is a transformers model, or has the attributes of one."""
    return cast(HFTarget, target)


def vocabulary(tokenizer: Any) -> dict[str, int]:
    """Token ids by piece, without special tokens, which are not text."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {piece: i for piece, i in tokenizer.get_vocab().items() if i not in special}


@torch.no_grad()
def resize(model: Any, size: int) -> None:
    """Resize a model's vocabulary. Removes padding rows, or adds rows equal to the mean row, which are never likely."""
    old_size = model.get_input_embeddings().weight.shape[0]
    if size == old_size:
        return
    model.resize_token_embeddings(size, mean_resizing=False)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        layer.weight[old_size:] = layer.weight[:old_size].mean(0)


def _narrow(text: Any, target: HFTarget, width: int) -> None:
    """Set the width of a text configuration: hidden size, heads, KV heads and the sizes that scale with it."""
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


def _load(source: str, revision: str | None, config: PreTrainedConfig) -> tuple[Any, str | None]:
    """(model, why its weights are missing). A checkpoint of ours has its own weights and needs only the configuration."""
    try:
        return load_model(
            source, f"drafter.path {source!r}", revision=revision, trust_remote_code=False, dtype=torch.float32
        ), None
    except UserError:
        raise
    except Exception as error:
        _check_hub(error, source, revision)
        if not isinstance(error, OSError | ValueError | ImportError):
            raise
        reason = one_line(error, 160)
    try:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise UserError(f"drafter.path {source!r} is no causal LM that transformers knows: {one_line(error, 160)}") from error
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    return model, reason


def _check(lm: HFTarget, path: str) -> None:
    """Raise UserError unless the model decodes exactly with our KV cache."""
    try:
        lm.eval()
        lm.chains_reason = probe(lm)
        lm.trees = lm.chains_reason is None
        lm.train()
    except Exception as error:  # a model may raise anything when it does not support this cache
        raise UserError(f"drafter.path {path!r} cannot draft with a KV cache of ours: {one_line(error, 160)}") from error


def _tokenizer(source: str, revision: str | None) -> Any:
    try:
        return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exceptions
        _check_hub(error, source, revision)
        if (Path(source) / "tokenizer.json").is_file():
            raise UserError(
                f"drafter.path {source!r} has a tokenizer.json that cannot be read: {one_line(error, 160)}"
            ) from error
        return None


def _check_hub(error: Exception, source: str, revision: str | None) -> None:
    """Raise UserError if the hub is the cause, which a missing file must not be confused with."""
    if not Path(source).exists() and (hub_failure := hub_reason(error, source, revision=revision)) is not None:
        raise UserError(f"drafter.path {source!r}: {hub_failure}") from error


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
