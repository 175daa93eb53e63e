"""Tensors of a checkpoint by name, read from its safetensors files: also those that transformers leaves out of its models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file

from drafttrain.core.errors import UserError
from drafttrain.targets.weights import INDEX, check_files

DTYPES = {  # by safetensors' names
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The tensors in a directory. No tensor is read before it is asked for."""

    directory: Path
    files: dict[str, Path]  # by name

    @staticmethod
    def of(directory: Path, origin: str) -> StoredTensors:
        """origin: the name that messages use for it. Raises UserError for damaged files, and files outside the directory."""
        weight_files = check_files(directory, origin)
        if not weight_files:
            raise UserError(
                f"{origin}: no safetensors files are in {directory}, which are read here piece by piece; save the model again "
                "with save_pretrained(), or load it whole (target.placement=replicated)"
            )
        if (directory / INDEX).is_file():
            weight_map = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
            return StoredTensors(directory, {name: directory / file for name, file in weight_map.items()})
        files: dict[str, Path] = {}
        for file in weight_files:
            with safe_open(file, "pt") as handle:
                files |= dict.fromkeys(handle.keys(), file)
        return StoredTensors(directory, files)

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def read(self, name: str) -> Tensor:
        with safe_open(self.files[name], "pt") as handle:
            tensor: Tensor = handle.get_tensor(name)
        return tensor

    def dtype(self, name: str) -> torch.dtype:
        with safe_open(self.files[name], "pt") as handle:
            return DTYPES[handle.get_slice(name).get_dtype()]


def directory_of(model: Any) -> Path | None:
    """The directory that a transformers model was loaded from; None for one that was made in memory."""
    name = str(getattr(model.config, "name_or_path", None) or "")
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    try:
        file = cached_file(name, "config.json", revision=getattr(model.config, "_commit_hash", None), local_files_only=True)
    except OSError:
        return None
    return None if file is None else Path(file).parent
