"""Draft models: an ordinary directory of transformers, with the target's tokenizer; adapters are merged."""

from __future__ import annotations

import json
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import Tensor

from drafttrain.export.files import Files, Source
from drafttrain.export.layouts.renames import Renames
from drafttrain.export.readers.causal_lm import MODEL_TYPES

LAYER = ".base_layer"
ADAPTER = "default"
RENAMES = Renames({"lm.model.{rest}": "{rest}"})
ADAPTED = Renames({f"lm.model.{{path}}.lora_{x}.{ADAPTER}.weight": f"base_model.model.{{path}}.lora_{x}.weight" for x in "AB"})


def refuse(source: Source) -> str | None:
    """Why this drafter cannot be exported; None where it can."""
    if source.drafter.language_model() is None:
        return "its tokens are not the target's and nothing of it was trained; give the stack drafter.path itself"
    config = _model(source).config
    if config.model_type not in MODEL_TYPES:
        return f"its architecture is {config.model_type}, and what is exported is checked for {', '.join(MODEL_TYPES)} alone"
    if getattr(config, "mlp_bias", False) or getattr(config, "attention_bias", False):
        return "its linear maps have biases, and what is exported is checked without them alone"
    return None


def files(source: Source) -> Files:
    model = _model(source)
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    config |= {"architectures": [type(model).__name__], "torch_dtype": source.dtype}
    config.pop("dtype", None)
    config["vocab_size"] = source.shape.vocab_size
    return Files(config, _merged(model), tokenizer=source.opened.loaded.tokenizer is not None)


def _model(source: Source) -> Any:
    lm: Any = source.drafter.language_model()
    return lm.model


def _merged(model: Any) -> dict[str, Tensor]:
    """All weights by transformers' names, products of adapters added in float32; none twice that is tied."""
    tensors: dict[str, Tensor] = {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, tensor in model.state_dict().items():
        owner = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        if owner is None:
            tensors[name] = tensor
        elif name == f"{owner}{LAYER}.weight":
            module: Any = layers[owner]
            tensors[f"{owner}.weight"] = tensor.float() + module.get_delta_weight(ADAPTER).float()
        elif name.startswith(f"{owner}{LAYER}."):
            tensors[name.replace(LAYER, "")] = tensor
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return tensors
