"""What a format is: names of tensors in both directions, what is written, how it is read back, and the stacks that load it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from drafttrain.drafters.checkpoint import CheckpointMeta
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.files import ExportSource, Files
from drafttrain.export.layers import usual_layers
from drafttrain.model.target import Target

# reasons that several formats have why a stack does not load them
ENGINE_ENDED = "its engine backend, the only one with this family, ended with version 1.2"
NOT_STRICT = "its loader ignores tensor names that it does not know; nothing is written until it can be run"

PLACE = re.compile(r"\{(\w+)\}")
PIECES = {"rest": ".+", "path": ".+", "part": "weight|bias"}  # what a placeholder matches; any other one matches a number


def compiled(pattern: str) -> re.Pattern[str]:
    """The regular expression of a pattern with placeholders."""
    prefix, *tokens = PLACE.split(pattern)
    text = re.escape(prefix)
    for name, literal in zip(tokens[::2], tokens[1::2], strict=True):
        text += f"(?P<{name}>{PIECES.get(name, '[0-9]+')})" + re.escape(literal)
    return re.compile(text)


class Renames:
    """Our names of tensors and a format's, as pairs of patterns with placeholders as in `heads.{i}.output.weight`.

    The first pattern that fits counts, in either direction.
    """

    def __init__(self, pairs: Mapping[str, str]) -> None:
        self._out = [(compiled(our_pattern), format_pattern) for our_pattern, format_pattern in pairs.items()]
        self._back = [(compiled(format_pattern), our_pattern) for our_pattern, format_pattern in pairs.items()]

    def theirs(self, name: str) -> str | None:
        """Their name of our tensor; None where they have none."""
        return _renamed(name, self._out)

    def ours(self, name: str) -> str | None:
        """Our name of their tensor; None where we have none."""
        return _renamed(name, self._back)

    def named(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our tensors under their names; they have a name for each."""
        return {str(self.theirs(name)): tensor for name, tensor in tensors.items()}


def _renamed(name: str, pairs: list[tuple[re.Pattern[str], str]]) -> str | None:
    for pattern, template in pairs:
        if match := pattern.fullmatch(name):
            return template.format(**match.groupdict())
    return None


SAME = Renames({"{rest}": "{rest}"})


def wrapped(*heads: str) -> Renames:
    """The names of early files of SpecForge, whose heads are within a module `logit_head`."""
    return Renames({f"{head}.{{rest}}": f"logit_head.{head}.{{rest}}" for head in heads} | {"{rest}": "{rest}"})


@dataclass
class ConvertedDrafter:
    """A directory that is being converted."""

    found: ExternalCheckpoint
    target: Target
    options: dict[str, Any]  # our family's options that the directory determines
    tensors: dict[str, Tensor]  # under our names, as they were saved
    notes: list[str] = field(default_factory=list)  # for the user


def nothing(draft: ConvertedDrafter) -> None:
    """For formats that store every tensor in our form."""


def as_built(draft: ConvertedDrafter, own: Mapping[str, Tensor]) -> None:
    """For formats that contain every tensor of the drafter."""


@dataclass(frozen=True, slots=True)
class Importer:
    """How a directory of a format is read into a checkpoint. Exactly one importer must recognise a directory."""

    name: str  # of the format, as in the support matrix
    family: str
    knows: Callable[[ExternalCheckpoint], bool]  # recognises a directory by its configuration and tensor names
    options: Callable[[ExternalCheckpoint, Target], dict[str, Any]]  # our family's options, from the directory
    renames: Renames | Callable[[ExternalCheckpoint], Renames] = SAME  # their tensor names and ours
    shared: Mapping[str, str] = field(default_factory=dict)  # tensors that must equal the target's; they are not kept
    mend: Callable[[ConvertedDrafter], None] = nothing  # brings tensors into our form, under our names
    # those of the shared tensors that are not the target's, but the drafter's own
    own: Callable[[ExternalCheckpoint, Target], tuple[str, ...]] = lambda checkpoint, target: ()
    # adds tensors that come from elsewhere, given those of the built drafter
    complete: Callable[[ConvertedDrafter, Mapping[str, Tensor]], None] = as_built
    places: tuple[str, ...] = ()  # options that tell where weights are, not what they are
    # values of fields that change nothing where no importer asks for them; None: another library reads the whole configuration
    usual: Callable[[], Mapping[str, Any]] | None = usual_layers

    def names(self, found: ExternalCheckpoint) -> Renames:
        """The tensor names of this directory and ours."""
        return self.renames if isinstance(self.renames, Renames) else self.renames(found)

    def dtype(self, found: ExternalCheckpoint) -> str:
        """The dtype of the drafter's own weights."""
        return found.dtype(without=self.shared)


def never(source: ExportSource) -> str | None:
    """For formats that can hold every drafter of the family."""
    return None


def no_facts(source: ExportSource) -> dict[str, Any]:
    """For formats whose importer finds everything that drafts depend on in the tensors."""
    return {}


@contextmanager
def as_it_is(directory: Path) -> Iterator[Path]:
    """For formats whose files are read where they are."""
    yield directory


@dataclass(frozen=True, slots=True)
class ReadBack:
    """A drafter that was read back from exported files."""

    meta: CheckpointMeta
    tensors: dict[str, Tensor]  # under our names
    facts: dict[str, Any] = field(default_factory=dict)  # settings that the files have, in the terms of `golden.facts_of`


@dataclass(frozen=True, slots=True)
class Format:
    """A format of exported files."""

    name: str  # in the support matrix
    write: Callable[[ExportSource], Files]  # makes the files
    # reads the files back: the importer, or a function for files that are not imported
    read: Importer | Callable[[Path, ExportSource], ReadBack]
    refuse: Callable[[ExportSource], str | None] = never  # why one drafter of the family cannot be exported; None where it can
    facts: Callable[[ExportSource], dict[str, Any]] = no_facts  # settings that a drafter must have again when it is read back
    adapter: Format | None = None  # the format that replaces this one with adapter=true
    apart: bool = False  # it holds a drafter's LoRA next to the drafter (`export/drafter_adapter.py`)
    opened: Callable[[Path], AbstractContextManager[Path]] = as_it_is  # the directory that `read` reads


@dataclass(frozen=True, slots=True)
class StackRow:
    """A stack that loads a family's drafters."""

    format: Format
    method: str = ""  # the stack's name of this way of drafting, in its command (`serve.py`)
    settings: Mapping[str, Any] = field(default_factory=dict)  # further settings in its command
    note: str | None = None  # a remark below the command
    pictures: tuple[str, ...] = ()  # classes of targets that read images, for which the stack drafts
    quantised: bool = False  # whether it builds the layers of these files with their quantization_config
    sinks: bool = False  # whether it reads attention sinks in the layers of these files


Rows = dict[str, dict[str, StackRow | str]]  # by family and stack; a text is the reason why the stack does not load it
