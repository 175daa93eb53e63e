"""What readers share: the directory's files, and the target's side of an engine.

Shapes: c tokens of a text, K drafts, V vocabulary, D draft vocabulary, H hidden.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor


class MismatchError(Exception):
    """Something that a stack would load in another sense than it was meant, or not at all. name: what."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name, self.text = name, text


@dataclass(frozen=True, slots=True)
class Point:
    """One place to draft from: the text's tokens [c], the root behind them, and the drafts [K] to follow.

    states: by k, the input of the target's block k at the text's positions, [c, H]; of n blocks, n is the last one's output.
    final: its post-norm output, which `output_hidden_states` gives last.
    """

    text: Tensor
    root: Tensor
    drafts: Tensor
    states: dict[int, Tensor] = field(default_factory=dict)
    final: Tensor | None = None

    @property
    def shifted(self) -> Tensor:
        """[c] the token after each of the text's, the root last."""
        return torch.cat([self.text[1:], self.root[None]])

    def layer(self, k: int) -> Tensor:
        """[c, H] what an engine captures as the input of block k."""
        if k not in self.states:
            raise MismatchError("layer ids", f"the files ask for the input of block {k}, which is nowhere near what was tapped")
        return self.states[k]

    def last(self) -> Tensor:
        """[c, H] the post-norm output."""
        if self.final is None:
            raise MismatchError("layer ids", "the files ask for the target's last state, which was not tapped")
        return self.final


@dataclass(frozen=True, slots=True)
class Engine:
    """What a stack has beside the drafter's directory: the target's embedding and head [V, H], its number of blocks, its tokens
    by their pieces (None: no tokenizer), texts with the tokens that its tokenizer makes of them, and where the model lies that
    an adapter is of.
    """

    embed: Tensor
    head: Tensor
    blocks: int
    pieces: dict[str, int] | None = None
    texts: Sequence[tuple[str, list[int]]] = ()
    base: Path | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """logits: of every point, [K, V] in the target's ids, minus infinity where the drafter has no token. facts: by name, what
    the files say, in the terms of `golden.facts_of` and of a layout's own facts.
    """

    logits: list[Tensor]
    facts: dict[str, Any]


Loader = Callable[[Path, str], dict[str, Tensor]]
Spelling = Callable[[str], str]


class Config:
    """config.json, or an object inside it. Every field that is read must be there: stacks differ in what they take else."""

    def __init__(self, values: dict[str, Any], where: str = "config.json") -> None:
        self.values, self.where = values, where

    @staticmethod
    def of(directory: Path, file: str = "config.json") -> Config:
        try:
            return Config(json.loads((directory / file).read_text(encoding="utf-8")), file)
        except (OSError, ValueError) as error:
            raise MismatchError("config", f"{file} cannot be read ({error})") from error

    def get(self, key: str, name: str) -> Any:
        """name: of the failure where the field is not there."""
        if self.values.get(key) is None:
            raise MismatchError(name, f"{self.where} does not say {key}")
        return self.values[key]

    def inside(self, key: str, name: str) -> Config:
        return Config(self.get(key, name), f"{self.where}'s {key}")

    def expect(self, key: str, value: Any, name: str) -> None:
        got = self.values.get(key)
        if got != value:
            raise MismatchError(name, f"{self.where} has {key} {got!r}, {value!r} is needed")


class Tensors:
    """All tensors of a directory, floating ones in float32; each is to be taken once, in the shape that config.json gives.

    spelled: the names in the files of what readers call by the names of Llama; it differs in other containers.
    """

    def __init__(
        self, directory: Path, file: str = "model.safetensors", load: Loader | None = None, spelled: Spelling = str
    ) -> None:
        self.left, self.spelled = (load or _load)(directory, file), spelled

    def take(self, name: str, *shape: int, fails: str = "tensors") -> Tensor:
        """shape: -1 for what another tensor decides. fails: what a wrong shape points at."""
        name = self.spelled(name)
        if name not in self.left:
            raise MismatchError("tensors", f"{name} is missing")
        tensor = self.left.pop(name)
        if len(shape) != tensor.ndim or any(want not in (-1, got) for want, got in zip(shape, tensor.shape, strict=True)):
            raise MismatchError(fails, f"{name} is {list(tensor.shape)}, the configuration makes it {list(shape)}")
        return tensor

    def finish(self) -> None:
        if self.left:
            raise MismatchError("tensors", f"{', '.join(sorted(self.left)[:4])}: no stack knows of them")


def _load(directory: Path, file: str) -> dict[str, Tensor]:
    index = directory / f"{file}.index.json"
    try:
        files = [file]
        if index.is_file():
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        found: dict[str, Tensor] = {}
        for part in files:
            if Path(part).name != part:
                raise MismatchError("tensors", f"{index.name} names {part!r}; only files beside it are read")
            found |= load_file(directory / part)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise MismatchError("tensors", f"{file} cannot be read ({error})") from error
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in found.items()}


def over_target(logits_KD: Tensor, ids_D: Tensor, vocab: int) -> Tensor:
    """[K, V] logits of a vocabulary of the drafter's own. Raises MismatchError for ids that the target has not, or twice."""
    if bool(((ids_D < 0) | (ids_D >= vocab)).any()) or len(ids_D.unique()) != len(ids_D):
        raise MismatchError("d2t", "as offsets its values lead out of the target's vocabulary, or twice to one token")
    return logits_KD.new_full((len(logits_KD), vocab), -torch.inf).index_copy(-1, ids_D, logits_KD)


def each(points: Sequence[Point], draft: Any) -> list[Tensor]:
    """[K, V] of every point."""
    with torch.no_grad():
        return [draft(point) for point in points]
