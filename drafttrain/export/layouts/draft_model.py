"""Draft models: an ordinary transformers directory with the target's tokenizer; adapters merged or separate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.utils import cached_file

from drafttrain.export.files import ExportSource, Files
from drafttrain.export.layouts.adapter import CONFIG, WEIGHTS, config_of
from drafttrain.export.layouts.renames import Renames
from drafttrain.export.readers.causal_lm import MODEL_TYPES

LAYER = ".base_layer"
ADAPTER = "default"
BASE = "base"  # folder of an adapter's base model, in the adapter's directory
RENAMES = Renames({"lm.model.{rest}": "{rest}"})
ADAPTED = Renames({f"lm.model.{{path}}.lora_{x}.{ADAPTER}.weight": f"base_model.model.{{path}}.lora_{x}.weight" for x in "AB"})


def refuse(source: ExportSource) -> str | None:
    """Why this drafter cannot be exported; None where it can."""
    if source.drafter.language_model() is None:
        return "its tokens are not the target's, and it was not trained; give the stack drafter.path itself"
    config = _model(source).config
    if config.model_type not in MODEL_TYPES:
        return f"its architecture is {config.model_type}, but exports can be checked only for {', '.join(MODEL_TYPES)}"
    if getattr(config, "mlp_bias", False) or getattr(config, "attention_bias", False):
        return "its linear maps have biases, but exports can be checked only without them"
    return None


def refuse_adapter(source: ExportSource) -> str | None:
    """Why its matrices cannot be exported as an adapter; None where they can."""
    if source.dtype != "float32":
        return f"dtype is {source.dtype}, but adapters are written in float32; leave dtype out"
    return refuse(source)


def adapter(source: ExportSource) -> Files:
    """The matrices, with a copy of their model in a folder unless that has a directory of its own."""
    tensors = {theirs: x for name, x in source.tensors.items() if (theirs := ADAPTED.theirs(name)) is not None}
    elsewhere = _elsewhere(source)
    base = str(Path(source.place, BASE).absolute()) if elsewhere is None else str(source.options["path"])
    config = config_of(tensors, source.options["lora_rank"], source.options["lora_alpha"], base)
    folders = {BASE: Files(_config(source), _own(_model(source)))} if elsewhere is None else {}
    tokenizer = source.opened.loaded.tokenizer is not None
    return Files(config, tensors, WEIGHTS, tokenizer, config_file=CONFIG, base=elsewhere, folders=folders)


def _elsewhere(source: ExportSource) -> Path | None:
    """The base model's directory. None where it is a part of the target, or was resized to the target's vocabulary."""
    if source.options["source"] != "hf":
        return None
    path, revision = Path(source.options["path"]).expanduser(), source.options["revision"]
    if not path.is_dir():
        path = Path(str(cached_file(source.options["path"], "config.json", revision=revision))).parent
    size = json.loads((path / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    return path if size == source.shape.vocab_size and any(path.glob("*.safetensors")) else None


def files(source: ExportSource) -> Files:
    """A transformers directory with adapters merged."""
    return Files(_config(source), merged(_model(source)), tokenizer=source.opened.loaded.tokenizer is not None)


def _config(source: ExportSource) -> dict[str, Any]:
    model = _model(source)
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    config |= {"architectures": [type(model).__name__], "torch_dtype": source.dtype}
    config.pop("dtype", None)
    config["vocab_size"] = source.shape.vocab_size
    return config


def _model(source: ExportSource) -> Any:
    lm: Any = source.drafter.language_model()
    return lm.model


def merged(model: Any) -> dict[str, Tensor]:
    """All weights under transformers' names, with adapters added in float32; tied weights once."""
    from peft.tuners.lora import LoraLayer  # takes seconds, and few runs need it

    tensors = _own(model)
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            layer: Any = module
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"].float() + layer.get_delta_weight(ADAPTER).float()
    return tensors


def _own(model: Any) -> dict[str, Tensor]:
    """All weights without the adapters."""
    from peft.tuners.lora import LoraLayer

    tensors: dict[str, Tensor] = {}
    layers = [name for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    for name, tensor in model.state_dict().items():
        owner = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        if owner is None:
            tensors[name] = tensor
        elif name.startswith(f"{owner}{LAYER}."):
            tensors[name.replace(LAYER, "")] = tensor
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return tensors
