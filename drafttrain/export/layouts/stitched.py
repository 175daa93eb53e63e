"""The modules that a target came with, written back into a copy of the target's own directory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.drafters.common.own_modules import LAYOUTS, Numbered, OwnModule, StoredPiece, count_of
from drafttrain.export.files import DTYPES, ExportSource, Files
from drafttrain.export.stitch import Base
from drafttrain.targets.stored import StoredTensors, directory_of

APPENDED = "model-mtp.safetensors"
MODULES = "depths"


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
        kind, directory = str(source.opened.loaded.target.backbone.module.config.model_type), directory_of(model)
        if kind not in LAYOUTS:
            return f"no stack reads a module from the files of a {kind}; such targets are {', '.join(LAYOUTS)}"
        if directory is None:
            return "the target was not loaded from a directory that is on this machine"
        try:
            return StitchedTarget(LAYOUTS[kind], StoredTensors.of(directory, str(directory)), source.shape.blocks)
        except UserError as error:
            return str(error)

    @property
    def modules(self) -> int:
        """How many the files have."""
        first = Numbered(self.layout, self.blocks).projection
        return count_of(self.layout, self.blocks, self.stored) if first in self.stored else 0

    def pieces(self, number: int, tensors: dict[str, Tensor]) -> dict[str, list[StoredPiece]]:
        """The pieces of a module's tensors, as they are stored, or as they will be."""
        one = Numbered(self.layout, self.blocks, number)
        if number < self.modules:
            return one.stored_as(self.stored, tensors)
        return {name: one.pieces(name, tensor.shape) for name, tensor in tensors.items()}


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
    for number, tensors in enumerate(_own(source)):
        trained = dict(source.drafter.get_submodule(f"{MODULES}.{number}").named_parameters())
        for name, row in target.pieces(number, tensors).items():
            for piece in row:
                dtype = target.stored.dtype(piece.name) if piece.name in target.stored else DTYPES[source.dtype]
                if name in trained and dtype != DTYPES[source.dtype]:
                    kept = str(dtype).removeprefix("torch.")
                    return f"{piece.name} is stored as {kept} and keeps its dtype; export with dtype={kept}"
    return None


def files(source: ExportSource) -> Files:
    """The target's files with these modules."""
    target, written = StitchedTarget.of(source), dict[str, Tensor]()
    assert not isinstance(target, str), "refused above"
    own = _own(source)
    for number, tensors in enumerate(own):
        buffers = dict(source.drafter.get_submodule(f"{MODULES}.{number}").named_buffers())
        for name, row in target.pieces(number, tensors).items():
            new = torch.float32 if name in buffers else DTYPES[source.dtype]  # buffers are no weights
            for piece in row:
                dtype = target.stored.dtype(piece.name) if piece.name in target.stored else new
                written[piece.name] = piece.of(tensors[name]).to(dtype)
    return Files({}, written, into=Base(target.stored.directory, APPENDED, {target.layout.count_key: len(own)}))


def _own(source: ExportSource) -> list[dict[str, Tensor]]:
    """Each module's tensors by their names in it."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in source.opened.tensors.items():
        _, number, rest = name.split(".", 2)
        found.setdefault(int(number), {})[rest] = tensor
    return [found[number] for number in sorted(found)]
