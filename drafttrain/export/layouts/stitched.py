"""A module that a target came with, written back into a copy of the target's own directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.drafters.common.own_modules import LAYOUTS, OwnModule, Piece, pieces, stored_as
from drafttrain.export.files import DTYPES, Files, Source
from drafttrain.export.stitch import Base
from drafttrain.targets.stored import StoredTensors, directory_of

APPENDED = "model-mtp.safetensors"
PREFIX = "module."


def refuse(source: Source) -> str | None:
    """Why this module cannot be written into its target; None where it can."""
    model: Any = source.opened.loaded.target.model
    kind, directory = _model_type(source), directory_of(model)
    if kind not in LAYOUTS:
        return f"no stack reads a module from the files of a {kind}; such targets are {', '.join(LAYOUTS)}"
    if directory is None:
        return "the target was not loaded from a directory that is on this machine"
    if source.opened.meta.adapter is not None:
        return "the target was trained too: export it first, and then train the module for it"
    normed = LAYOUTS[kind].norm_output
    if source.options.get("norm_output") not in (None, normed):
        return f"stacks pass on {'the normed' if normed else 'the block'} output; train with drafter.norm_output=null"
    try:
        found = _stored(source, StoredTensors.of(directory, str(directory)), LAYOUTS[kind])
    except UserError as error:
        return str(error)
    return None if found is None else _refuse_dtype(source, *found)


def _refuse_dtype(source: Source, stored: StoredTensors, names: dict[str, list[Piece]]) -> str | None:
    """The parity check rounds all weights to one dtype."""
    trained = {PREFIX + name for name, _ in source.drafter.get_submodule(PREFIX[:-1]).named_parameters()}
    for name, found in names.items():
        if PREFIX + name not in trained:
            continue
        for piece in found:
            if (dtype := stored.dtype(piece.name)) != DTYPES[source.dtype]:
                kept = str(dtype).removeprefix("torch.")
                return f"{piece.name} is stored as {kept} and keeps its dtype; export with dtype={kept}"
    return None


def files(source: Source) -> Files:
    """The target's files with this module."""
    model: Any = source.opened.loaded.target.model
    layout, directory = LAYOUTS[_model_type(source)], directory_of(model)
    assert directory is not None, "refused above"
    found = _stored(source, StoredTensors.of(directory, str(directory)), layout)
    tensors: dict[str, Tensor] = {}
    for name, tensor in _own(source).items():
        row = pieces(layout, source.shape.blocks, name, tensor.shape, False) if found is None else found[1][name]
        for piece in row:
            dtype = _dtype(source, name) if found is None else found[0].dtype(piece.name)
            tensors[piece.name] = piece.of(tensor).to(dtype)
    return Files({}, tensors, into=Base(Path(directory), APPENDED, {layout.count_key: 1}))


def _own(source: Source) -> dict[str, Tensor]:
    """The module's tensors by their names in it."""
    return {name.removeprefix(PREFIX): tensor for name, tensor in source.opened.tensors.items()}


def _dtype(source: Source, name: str) -> torch.dtype:
    """Of an appended tensor; buffers are no weights and keep theirs."""
    buffers = dict(source.drafter.get_submodule(PREFIX[:-1]).named_buffers())
    return torch.float32 if name in buffers else DTYPES[source.dtype]


def _stored(source: Source, stored: StoredTensors, layout: OwnModule) -> tuple[StoredTensors, dict[str, list[Piece]]] | None:
    """The files, and the stored pieces of each tensor; None where the target has no module.

    Raises UserError for a target whose module lacks tensors.
    """
    own, layer = _own(source), source.shape.blocks
    first = pieces(layout, layer, "eh_proj.weight", own["eh_proj.weight"].shape, False)[0]
    return None if first.name not in stored else (stored, stored_as(stored, layout, layer, own))


def _model_type(source: Source) -> str:
    return str(source.opened.loaded.target.backbone.module.config.model_type)
