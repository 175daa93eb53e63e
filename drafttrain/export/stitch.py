"""Writes tensors into a copy of a model's directory. All other bytes of its weights stay as they are, which is checked.

A tensor that the files have is replaced at its place, in its stored dtype. Others are appended as a further file, with entries
in the index. Shapes: R bytes of a tensor.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.core.errors import ParityError

WEIGHTS, INDEX, CONFIG, CARD = "model.safetensors", "model.safetensors.index.json", "config.json", "README.md"
OWN_CARD = "README.target.md"  # the model's own, next to the export's
LENGTH = 8  # bytes at the start of a safetensors file that give its header's length
CHUNK = 2**24  # bytes that are compared at a time


@dataclass(frozen=True, slots=True)
class Base:
    """A model's directory, into a copy of which tensors are written."""

    directory: Path
    appended: str  # name of the file of tensors that the model does not have
    settings: Mapping[str, Any]  # of config.json, next to `num_hidden_layers`


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A stored tensor's bytes in its file."""

    first: int
    last: int  # excluded
    dtype: str
    shape: tuple[int, ...]


def places(file: Path) -> dict[str, TensorPlace]:
    """The tensors of a safetensors file."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(LENGTH), "little")
        header = json.loads(opened.read(length))
    start = LENGTH + length
    return {
        name: TensorPlace(
            start + about["data_offsets"][0], start + about["data_offsets"][1], about["dtype"], tuple(about["shape"])
        )
        for name, about in header.items()
        if name != "__metadata__"
    }


def stitch(directory: Path, base: Base, tensors: Mapping[str, Tensor]) -> None:
    """Copy the model, and write these tensors, already in their stored dtypes. Raises ParityError if other bytes change."""
    shutil.copytree(base.directory, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
    if (directory / CARD).is_file():
        (directory / CARD).rename(directory / OWN_CARD)
    written: dict[Path, list[TensorPlace]] = {}
    left = dict(tensors)
    for file in sorted(directory.glob("*.safetensors")):
        found = {name: place for name, place in places(file).items() if name in left}
        if found:
            file.chmod(0o644)  # a cache's files may be read-only
            _replace(file, found, left)
            written[file] = sorted(found.values(), key=lambda place: place.first)
    if left:
        _append(directory, base, left)
    _set(directory / CONFIG, base.settings)
    _check_untouched(directory, base, written)


def _replace(file: Path, found: Mapping[str, TensorPlace], left: dict[str, Tensor]) -> None:
    """Write tensors at their places, and take them out of `left`."""
    with file.open("r+b") as opened:
        for name, place in found.items():
            tensor = left.pop(name)
            content_R = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            if tuple(tensor.shape) != place.shape or content_R.numel() != place.last - place.first:
                raise ParityError("target", f"{name} is {list(tensor.shape)}, {file.name} has {list(place.shape)}")
            opened.seek(place.first)
            opened.write(content_R.numpy().data)


def _append(directory: Path, base: Base, tensors: Mapping[str, Tensor]) -> None:
    """Write a further file and its entries in the index, which is made for a model of one file."""
    file = directory / base.appended
    index: dict[str, Any]
    if (directory / INDEX).is_file():
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    else:
        own = places(directory / WEIGHTS)
        size = sum(place.last - place.first for place in own.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(own, WEIGHTS)}
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, file, {"format": "pt"})
    index["weight_map"] |= dict.fromkeys(tensors, file.name)
    if "total_size" in (index.get("metadata") or {}):
        index["metadata"]["total_size"] += sum(x.numel() * x.element_size() for x in tensors.values())
    (directory / INDEX).unlink(missing_ok=True)  # it may be read-only
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _set(file: Path, settings: Mapping[str, Any]) -> None:
    """Change settings of the text model where they differ."""
    config = json.loads(file.read_text(encoding="utf-8"))
    text = config["text_config"] if "num_hidden_layers" not in config and "text_config" in config else config
    if all(text.get(name) == value for name, value in settings.items()):
        return
    text |= settings
    file.unlink()
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _check_untouched(directory: Path, base: Base, written: Mapping[Path, list[TensorPlace]]) -> None:
    """Raise ParityError unless the weights' files equal the model's, but for the bytes that were written."""
    for file in sorted(base.directory.glob("*.safetensors")):
        copy = directory / file.name
        at, ends = 0, [*written.get(copy, []), None]
        with file.open("rb") as before, copy.open("rb") as after:
            for place in ends:
                last = file.stat().st_size if place is None else place.first
                while at < last:
                    size = min(CHUNK, last - at)
                    if before.read(size) != after.read(size):
                        raise ParityError("target", f"{file.name} differs from the target's where nothing was written")
                    at += size
                if place is not None:
                    at = place.last
                    before.seek(at)
                    after.seek(at)
        if copy.stat().st_size != file.stat().st_size:
            raise ParityError("target", f"{file.name} has another length than the target's")
