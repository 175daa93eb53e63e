"""Shared by the readers: the directory's files, and the target's part of a stack.

Shapes: c tokens of a text, K drafts, V vocabulary, D draft vocabulary, H hidden.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor


class MismatchError(Exception):
    """A stack would not load this part, or would read it in another sense. name: of the part."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name, self.text = name, text


@dataclass(frozen=True, slots=True)
class Point:
    """A place to draft from."""

    text: Tensor  # tokens [c]
    root: Tensor  # the token after them
    drafts: Tensor  # [K] the drafts to follow
    # [c, H] by k, the input of the target's block k (n of n blocks: the last output)
    states: dict[int, Tensor] = field(default_factory=dict)
    final: Tensor | None = None  # [c, H] the target's post-norm output

    @property
    def shifted(self) -> Tensor:
        """[c] the token after each token of the text; the last is the root."""
        return torch.cat([self.text[1:], self.root[None]])

    def layer(self, k: int) -> Tensor:
        """[c, H]: the captured input of block k."""
        if k not in self.states:
            raise MismatchError("layer ids", f"the files ask for the input of block {k}, which is far from the tapped ones")
        return self.states[k]

    def last(self) -> Tensor:
        """[c, H]: the post-norm output."""
        if self.final is None:
            raise MismatchError("layer ids", "the files ask for the target's last state, which was not tapped")
        return self.final


@dataclass(frozen=True, slots=True)
class TargetParts:
    """The parts of a stack that come from the target."""

    embed: Tensor  # [V, H]
    head: Tensor  # [V, H]
    blocks: int  # number of blocks
    pieces: dict[str, int] | None = None  # token ids by piece; None: no tokenizer
    texts: Sequence[tuple[str, list[int]]] = ()  # texts with their tokens
    base: Path | None = None  # directory of an adapter's base model
    model: Callable[[], tuple[Config, Tensors]] | None = None  # gives the whole target, for readers of what is added to it
    dtype: torch.dtype = torch.float32  # in which the target computes
    # gives all embeddings as the target has them, with a factor, and the bias of its head, for stacks that use its own modules
    modules: Callable[[], tuple[Tensor, Tensor | None]] | None = None
    bias: Tensor | None = None  # [V] of the head, where the stack adds it


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of reading a directory."""

    logits: list[Tensor]  # [K, V] of every point in target ids, minus infinity for tokens outside the draft vocabulary
    facts: dict[str, Any]  # the files' settings, in the terms of `golden.facts_of` and of the layout's own facts


Linear = tuple[Tensor, Tensor]  # weight, bias
Loader = Callable[[Path, str], dict[str, Tensor]]
Spelling = Callable[[str], str]


class Config:
    """config.json, or an object inside it. Every field that is read must be there, because stacks have different defaults."""

    def __init__(self, values: dict[str, Any], where: str = "config.json") -> None:
        self.values, self.where = values, where

    @staticmethod
    def of(directory: Path, file: str = "config.json") -> Config:
        """The configuration in this directory."""
        try:
            return Config(json.loads((directory / file).read_text(encoding="utf-8")), file)
        except (OSError, ValueError) as error:
            raise MismatchError("config", f"{file} cannot be read ({error})") from error

    def get(self, key: str, name: str) -> Any:
        """A field's value. name: of the failure where it is missing."""
        if self.values.get(key) is None:
            raise MismatchError(name, f"{self.where} does not say {key}")
        return self.values[key]

    def inside(self, key: str, name: str) -> Config:
        """An object inside this one."""
        return Config(self.get(key, name), f"{self.where}'s {key}")

    def expect(self, key: str, value: Any, name: str) -> None:
        """Raises MismatchError unless a field has this value."""
        got = self.values.get(key)
        if got != value:
            raise MismatchError(name, f"{self.where} has {key} {got!r}, {value!r} is needed")


class Tensors:
    """All tensors of a directory, floats in float32. Each is taken once, with the shape that config.json gives.

    spelled: maps Llama's names to those in the files, for other containers.
    """

    def __init__(
        self, directory: Path, file: str = "model.safetensors", load: Loader | None = None, spelled: Spelling = str
    ) -> None:
        self.left, self.spelled = (load or _load)(directory, file), spelled

    def take(self, name: str, *shape: int, fails: str = "tensors") -> Tensor:
        """One tensor. shape: with -1 for sizes that another tensor decides. fails: name of the failure for a wrong shape."""
        name = self.spelled(name)
        if name not in self.left:
            raise MismatchError("tensors", f"{name} is missing")
        tensor = self.left.pop(name)
        if len(shape) != tensor.ndim or any(want not in (-1, got) for want, got in zip(shape, tensor.shape, strict=True)):
            raise MismatchError(fails, f"{name} is {list(tensor.shape)}, the configuration gives {list(shape)}")
        return tensor

    def linear(self, name: str, out: int, into: int) -> Linear:
        """The weight and bias of a linear map."""
        return self.take(f"{name}.weight", out, into), self.take(f"{name}.bias", out)

    def finish(self) -> None:
        """Raises MismatchError for tensors that were not taken."""
        if self.left:
            raise MismatchError("tensors", f"{', '.join(sorted(self.left)[:4])}: no stack reads them")


def _load(directory: Path, file: str) -> dict[str, Tensor]:
    index = directory / f"{file}.index.json"
    try:
        files = [file]
        if index.is_file():
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        found: dict[str, Tensor] = {}
        for part in files:
            if Path(part).name != part:
                raise MismatchError("tensors", f"{index.name} names {part!r}; only files in its own folder are read")
            found |= load_file(directory / part)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise MismatchError("tensors", f"{file} cannot be read ({error})") from error
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in found.items()}


def speculators_layers(config: Config, algorithm: str, architecture: str, model_type: str) -> Config:
    """The layers' own configuration in one of speculators'. Raises MismatchError unless it is of this algorithm."""
    config.expect("architectures", [architecture], "architecture")
    config.expect("speculators_model_type", algorithm, "architecture")
    config.expect("model_type", None, "architecture")
    config.get("speculators_version", "architecture")
    proposal = config.inside("speculators_config", "architecture")
    proposal.expect("algorithm", algorithm, "architecture")
    proposal.inside("verifier", "architecture").get("name_or_path", "architecture")
    inner = config.inside("transformer_layer_config", "config")
    inner.expect("model_type", model_type, "architecture")
    return inner


def over_target(logits_KD: Tensor, ids_D: Tensor, vocab: int) -> Tensor:
    """[K, V]: logits of a draft vocabulary in target ids. Raises MismatchError for ids that are not the target's, or not
    unique.
    """
    if bool(((ids_D < 0) | (ids_D >= vocab)).any()) or len(ids_D.unique()) != len(ids_D):
        raise MismatchError("d2t", "as offsets its values give ids outside the target's vocabulary, or one id twice")
    return logits_KD.new_full((len(logits_KD), vocab), -torch.inf).index_copy(-1, ids_D, logits_KD)


def scaled(target: TargetParts, scale: float | None) -> TargetParts:
    """The target's embedding as a drafter uses it whose files have this factor. Stacks may multiply in float32, the target in
    its own dtype, which a check must follow.
    """
    return target if scale is None else replace(target, embed=(target.embed.to(target.dtype) * scale).float())


def each(points: Sequence[Point], draft: Any) -> list[Tensor]:
    """[K, V] of every point."""
    with torch.no_grad():
        return [draft(point) for point in points]
