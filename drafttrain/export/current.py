"""The weights of a drafter in memory, in the layout of a serving stack. No checkpoint is written, and nothing is compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.drafters.checkpoint import CheckpointMeta
from drafttrain.export.files import DTYPES, ExportSource, Files, write
from drafttrain.export.opened import Float32Target, Opened
from drafttrain.export.table import layout, stacks_for
from drafttrain.model.drafter import Drafter
from drafttrain.targets.load import LoadedTarget


class CurrentDrafter:
    """A drafter as one stack reads it.

    Raises UserError for a stack that does not load this drafter, and for a dtype that is unknown.
    """

    def __init__(self, drafter: Drafter, meta: CheckpointMeta, loaded: LoadedTarget, stack: str, dtype: str) -> None:
        (stack,) = stacks_for(meta.family, stack) if stack != "all" else ("all",)
        if stack == "all":
            raise UserError("layout is 'all'; name one serving stack")
        if dtype not in DTYPES:
            raise UserError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
        tensors = {name: tensor.detach() for name, tensor in drafter.state_dict().items()}
        opened = Opened(Path("a drafter in memory"), meta, loaded, Float32Target(loaded.target), drafter, tensors)
        self.source, to = ExportSource(opened, stack, dtype), layout(meta.family, stack)
        if (why := to.refuse(self.source)) is not None:
            raise UserError(f"this {meta.family} drafter cannot be given to {stack}: {why}")
        self.files: Files = to.write(self.source)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors as in the files of an export, on the drafter's device. They may share memory with the drafter."""
        for name, tensor in self.files.tensors.items():
            keeps = name in self.files.as_is or not tensor.is_floating_point()
            yield name, tensor.detach() if keeps else tensor.detach().to(DTYPES[self.source.dtype])

    def write(self, directory: Path) -> None:
        """Write the files of an export, without a model card, into an existing directory."""
        write(directory, self.files, self.source, "5GB")
