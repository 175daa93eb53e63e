"""The state of any torch optimiser as a safetensors file: tensors as tensors, all else as JSON in the file's metadata.

A state is what `Optimizer.state_dict()` gives: dictionaries and lists of tensors, numbers, strings and None. Nothing is pickled
(decision 002).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.core.errors import UserError

TENSOR, KEYS, ITEMS = "tensor", "keys", "items"


def save_state(file: Path, state: dict[Any, Any]) -> None:
    """Write a state. Raises UserError for a value that is neither a tensor nor plain data."""
    tensors: dict[str, Tensor] = {}
    form = json.dumps(_packed(state, tensors))
    save_file(tensors, file, {"form": form})


def load_state(file: Path, device: torch.device) -> Any:
    """Read a state; its tensors are on this device. Raises UserError for a damaged file."""
    try:
        with safe_open(file, "pt", device=str(device)) as content:
            form = json.loads(content.metadata()["form"])
            return _unpacked(form, content)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}); delete it to go on without the optimiser's state") from error


def _packed(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Plain data in which `{"tensor": name}` stands for a tensor. Keys of dictionaries may be numbers, which JSON lacks."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().contiguous().clone()
        return {TENSOR: name}
    if isinstance(value, dict):
        return {KEYS: list(value), ITEMS: [_packed(item, tensors) for item in value.values()]}
    if isinstance(value, list | tuple):
        return [_packed(item, tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UserError(
        f"the optimiser's state holds a {type(value).__name__}, but only tensors, numbers and texts are saved; choose another "
        "optimiser"
    )


def _unpacked(form: Any, content: Any) -> Any:
    if isinstance(form, dict):
        if TENSOR in form:
            return content.get_tensor(form[TENSOR])
        return dict(zip(form[KEYS], (_unpacked(item, content) for item in form[ITEMS]), strict=True))
    return [_unpacked(item, content) for item in form] if isinstance(form, list) else form
