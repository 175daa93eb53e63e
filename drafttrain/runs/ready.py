"""What a caller of the Python API has in memory already, and a command then does not load again."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from drafttrain.data.records import Records
from drafttrain.model.drafter import Drafter
from drafttrain.runs.placement import Placement
from drafttrain.targets.estimate import Need
from drafttrain.targets.load import LoadedTarget


@dataclass(frozen=True, slots=True)
class Ready:
    """A whole target in this process, a drafter for it, and the conversations to train on."""

    loaded: LoadedTarget
    drafter: Drafter
    start: dict[str, Tensor] | None = None  # weights to begin with after the family has prepared itself from the data
    records: Records | None = None  # conversations; None: those that the options name
    quiet: bool = False  # print nothing

    @property
    def place(self) -> Placement:
        """The target is there already: nothing is estimated."""
        return Placement("replicated", 1, Need(0, 0, 0, 0, 0), 0, self.loaded.target.shape)
