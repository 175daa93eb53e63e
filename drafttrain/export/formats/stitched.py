"""The modules that a target came with, written back into a copy of the target's own directory.

A tensor that the files have is replaced at its place, in its stored dtype. Others are appended as a further file, with entries
in the index. All other bytes of the weights stay as they are, which is checked. Shapes: R bytes of a tensor.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.core.errors import ParityError, UserError
from drafttrain.drafters.common.own_modules import LAYOUTS, Numbered, OwnModule, StoredPiece, count_of
from drafttrain.export.files import DTYPES, ExportSource, Files
from drafttrain.export.format import Format, ReadBack, Rows, StackRow
from drafttrain.targets.weights import StoredTensors, directory_of

APPENDED = "model-mtp.safetensors"
MODULES = "depths"
WEIGHTS, INDEX, CONFIG, CARD = "model.safetensors", "model.safetensors.index.json", "config.json", "README.md"
OWN_CARD = "README.target.md"  # the model's own, next to the export's
LENGTH = 8  # bytes at the start of a safetensors file that give its header's length
CHUNK = 2**24  # bytes that are compared at a time
COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # of the target's ends, with which some stacks draft
STITCHED = "it reads the module from the target's own files; format=stitched writes those"


@dataclass(frozen=True, slots=True)
class StitchedTarget:
    """The target's files, and the layout of its modules."""

    layout: OwnModule
    stored: StoredTensors
    blocks: int

    @staticmethod
    def of(source: ExportSource) -> StitchedTarget | str:
        """Or why there are none."""
        model: Any = source.target.model
        model_type, directory = str(source.opened.loaded.target.backbone.module.config.model_type), directory_of(model)
        if model_type not in LAYOUTS:
            return f"no stack reads a module from the files of a {model_type}; such targets are {', '.join(LAYOUTS)}"
        if directory is None:
            return "the target was not loaded from a directory that is on this machine"
        try:
            return StitchedTarget(LAYOUTS[model_type], StoredTensors.of(directory, str(directory)), source.shape.blocks)
        except UserError as error:
            return str(error)

    @property
    def modules(self) -> int:
        """How many the files have."""
        projection_name = Numbered(self.layout, self.blocks).projection
        return count_of(self.layout, self.blocks, self.stored) if projection_name in self.stored else 0

    def pieces(self, number: int, tensors: dict[str, Tensor]) -> dict[str, list[StoredPiece]]:
        """The pieces of a module's tensors, as they are stored, or as they will be."""
        module = Numbered(self.layout, self.blocks, number)
        if number < self.modules:
            return module.stored_as(self.stored, tensors)
        return {name: module.pieces(name, tensor.shape) for name, tensor in tensors.items()}


def refuse(source: ExportSource) -> str | None:
    """Why these modules cannot be written into their target; None where they can."""
    target = StitchedTarget.of(source)
    if isinstance(target, str):
        return target
    if source.opened.meta.adapter is not None:
        return "the target was trained too: export it first, and then train the module for it"
    normed, count = target.layout.norm_output, len(_own(source))
    if source.options.get("norm_output") not in (None, normed):
        return f"stacks pass on {'the normed' if normed else 'the block'} output; train with drafter.norm_output=null"
    if target.modules not in (0, count):
        return (
            f"the target has {target.modules} modules, {count} trained; stacks would use all of them: set drafter.modules=null"
        )
    if count > 1 and not target.layout.several:
        return f"the files of this architecture hold one module, not {count}; train with drafter.modules=1"
    try:
        return _refuse_dtype(source, target)
    except UserError as error:
        return str(error)


def _refuse_dtype(source: ExportSource, target: StitchedTarget) -> str | None:
    """The parity check rounds all weights to one dtype."""
    for number, module_tensors in enumerate(_own(source)):
        trained = dict(source.drafter.get_submodule(f"{MODULES}.{number}").named_parameters())
        for name, pieces in target.pieces(number, module_tensors).items():
            for piece in pieces:
                dtype = target.stored.dtype(piece.name) if piece.name in target.stored else DTYPES[source.dtype]
                if name in trained and dtype != DTYPES[source.dtype]:
                    stored_dtype = str(dtype).removeprefix("torch.")
                    return f"{piece.name} is stored as {stored_dtype} and keeps its dtype; export with dtype={stored_dtype}"
    return None


def files(source: ExportSource) -> Files:
    """The target's files with these modules."""
    target, written_tensors = StitchedTarget.of(source), dict[str, Tensor]()
    assert not isinstance(target, str), "refused above"
    modules = _own(source)
    for number, module_tensors in enumerate(modules):
        buffers = dict(source.drafter.get_submodule(f"{MODULES}.{number}").named_buffers())
        for name, pieces in target.pieces(number, module_tensors).items():
            new_dtype = torch.float32 if name in buffers else DTYPES[source.dtype]  # buffers are no weights
            for piece in pieces:
                dtype = target.stored.dtype(piece.name) if piece.name in target.stored else new_dtype
                written_tensors[piece.name] = piece.of(module_tensors[name]).to(dtype)
    base = Base(target.stored.directory, APPENDED, {target.layout.count_key: len(modules)})
    return Files({}, written_tensors, put=partial(stitch, base=base, tensors=written_tensors))


def _own(source: ExportSource) -> list[dict[str, Tensor]]:
    """Each module's tensors by their names in it."""
    modules: dict[int, dict[str, Tensor]] = {}
    for name, tensor in source.opened.tensors.items():
        _, number, rest = name.split(".", 2)
        modules.setdefault(int(number), {})[rest] = tensor
    return [modules[number] for number in sorted(modules)]


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
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH), "little")
        header = json.loads(stream.read(length))
    start = LENGTH + length
    return {
        name: TensorPlace(
            start + entry["data_offsets"][0], start + entry["data_offsets"][1], entry["dtype"], tuple(entry["shape"])
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def stitch(directory: Path, base: Base, tensors: Mapping[str, Tensor]) -> None:
    """Copy the model, and write these tensors, already in their stored dtypes. Raises ParityError if other bytes change."""
    shutil.copytree(base.directory, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
    if (directory / CARD).is_file():
        (directory / CARD).rename(directory / OWN_CARD)
    ranges_by_file: dict[Path, list[TensorPlace]] = {}
    remaining = dict(tensors)
    for file in sorted(directory.glob("*.safetensors")):
        byte_ranges = {name: byte_range for name, byte_range in places(file).items() if name in remaining}
        if byte_ranges:
            file.chmod(0o644)  # a cache's files may be read-only
            _replace(file, byte_ranges, remaining)
            ranges_by_file[file] = sorted(byte_ranges.values(), key=lambda byte_range: byte_range.first)
    if remaining:
        _append(directory, base, remaining)
    _set(directory / CONFIG, base.settings)
    _check_untouched(directory, base, ranges_by_file)


def _replace(file: Path, byte_ranges: Mapping[str, TensorPlace], left: dict[str, Tensor]) -> None:
    """Write tensors at their places, and take them out of `left`."""
    with file.open("r+b") as stream:
        for name, byte_range in byte_ranges.items():
            tensor = left.pop(name)
            content_R = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            if tuple(tensor.shape) != byte_range.shape or content_R.numel() != byte_range.last - byte_range.first:
                raise ParityError("target", f"{name} is {list(tensor.shape)}, {file.name} has {list(byte_range.shape)}")
            stream.seek(byte_range.first)
            stream.write(content_R.numpy().data)


def _append(directory: Path, base: Base, tensors: Mapping[str, Tensor]) -> None:
    """Write a further file and its entries in the index, which is made for a model of one file."""
    file = directory / base.appended
    index: dict[str, Any]
    if (directory / INDEX).is_file():
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    else:
        byte_ranges = places(directory / WEIGHTS)
        size = sum(byte_range.last - byte_range.first for byte_range in byte_ranges.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(byte_ranges, WEIGHTS)}
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, file, {"format": "pt"})
    index["weight_map"] |= dict.fromkeys(tensors, file.name)
    if "total_size" in (index.get("metadata") or {}):
        index["metadata"]["total_size"] += sum(x.numel() * x.element_size() for x in tensors.values())
    (directory / INDEX).unlink(missing_ok=True)  # it may be read-only
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _set(file: Path, settings: Mapping[str, Any]) -> None:
    """Change settings of the text model where they differ."""
    config = json.loads(file.read_text(encoding="utf-8"))
    text_config = _text_of(config)
    if all(text_config.get(name) == value for name, value in settings.items()):
        return
    text_config |= settings
    file.unlink()
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _text_of(config: dict[str, Any]) -> dict[str, Any]:
    """The text model's settings."""
    text_config: dict[str, Any] = (
        config["text_config"] if "num_hidden_layers" not in config and "text_config" in config else config
    )
    return text_config


def _check_untouched(directory: Path, base: Base, ranges_by_file: Mapping[Path, list[TensorPlace]]) -> None:
    """Raise ParityError unless the weights' files equal the model's, but for the bytes that were written."""
    for file in sorted(base.directory.glob("*.safetensors")):
        copy = directory / file.name
        offset, byte_ranges = 0, [*ranges_by_file.get(copy, []), None]
        with file.open("rb") as original, copy.open("rb") as stitched:
            for byte_range in byte_ranges:
                end = file.stat().st_size if byte_range is None else byte_range.first
                while offset < end:
                    size = min(CHUNK, end - offset)
                    if original.read(size) != stitched.read(size):
                        raise ParityError("target", f"{file.name} differs from the target's where nothing was written")
                    offset += size
                if byte_range is not None:
                    offset = byte_range.last
                    original.seek(offset)
                    stitched.seek(offset)
        if copy.stat().st_size != file.stat().st_size:
            raise ParityError("target", f"{file.name} has another length than the target's")


def read(directory: Path, source: ExportSource) -> ReadBack:
    """The modules in the written files, in float32. Raises ParityError for files that hold others than the drafter's."""
    target = StitchedTarget.of(source)
    assert not isinstance(target, str), "refused above"
    modules = _own(source)
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    if (count := _text_of(config).get(target.layout.count_key)) != len(modules):
        raise ParityError("config", f"{CONFIG} has {target.layout.count_key} {count!r}, the drafter has {len(modules)} modules")
    stored, tensors = StoredTensors.of(directory, str(directory)), dict[str, Tensor]()
    for number, expected in enumerate(modules):
        module = Numbered(target.layout, target.blocks, number)
        for name, pieces in module.stored_as(stored, expected).items():
            full_tensor = torch.full_like(expected[name], torch.nan, dtype=torch.float32)
            for piece in pieces:
                piece.of(full_tensor).copy_(stored.read(piece.name))
            tensors[f"{MODULES}.{number}.{name}"] = full_tensor
        _check_copies(module, stored, source)
    return ReadBack(source.opened.meta, tensors)


def _check_copies(module: Numbered, stored: StoredTensors, source: ExportSource) -> None:
    """Raise ParityError for a copy of the target's embedding or head that is not the target's."""
    for name, shared in zip(COPIES, (source.embedding, source.target.head_weight), strict=True):
        stored_name = module.prefix(module.layout.block) + name
        if stored_name in stored and not torch.equal(stored.read(stored_name).float(), shared.detach().float().cpu()):
            raise ParityError("tensors", f"{stored_name} is not the target's, which the module was trained with")


ROWS: Rows = {
    "mtp_native": {
        **dict.fromkeys(("vllm", "sglang", "trtllm", "llamacpp", "transformers", "official"), STITCHED),
        "speculators": "its trainer has a form for such modules, which it merges into the target itself; use format=stitched",
        "stitched": StackRow(Format("stitched", files, read, refuse)),
    }
}
