"""What an exported directory is made of, and writing it: configuration, weights in shards, tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.export.ggufs import SUFFIX, cast, write_gguf
from drafttrain.export.layouts.renames import Renames
from drafttrain.export.opened import Opened
from drafttrain.model.drafter import Drafter
from drafttrain.model.target import TargetShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint on its way to a stack. dtype: of the exported weights. merged: where a target that was trained too lies;
    adapter: where its matrices lie instead, to be merged into there. place: where the directory will lie.
    """

    opened: Opened
    stack: str
    dtype: str
    merged: str | None = None
    adapter: str | None = None
    place: str = ""

    @property
    def options(self) -> dict[str, Any]:
        return self.opened.meta.options

    @property
    def drafter(self) -> Drafter:
        return self.opened.drafter

    @property
    def tensors(self) -> dict[str, Tensor]:
        """A copy of the drafter's own, by their names in its checkpoint."""
        return dict(self.opened.tensors)

    def named(self, renames: Renames) -> dict[str, Tensor]:
        """The same by the names of a layout, which has one for each."""
        return {str(renames.theirs(name)): tensor for name, tensor in self.opened.tensors.items()}

    @property
    def embedding(self) -> Tensor:
        """[V, H] the target's, in its own dtype."""
        model: Any = self.opened.loaded.target.model
        weight: Tensor = model.get_input_embeddings().weight
        return weight

    @property
    def shape(self) -> TargetShape:
        return self.opened.loaded.target.shape

    @property
    def layer_shape(self) -> TargetShape:
        """Of the drafter's own decoder layers."""
        return self.drafter.layer_shape or self.shape

    @property
    def layer_inputs(self) -> list[int]:
        """The tapped blocks' outputs as k, the number of the block that reads them."""
        return [block + 1 for block in self.drafter.taps.blocks]

    @property
    def target_name(self) -> str:
        """Directory or hub id of the target to serve."""
        return self.merged or self.opened.loaded.path

    @property
    def target_architecture(self) -> str:
        return str(self.opened.loaded.description["architecture"])


@dataclass(frozen=True, slots=True)
class Files:
    """config: config.json. weights: the file that tensors go to; `model.safetensors` alone may come in shards, the others are
    read as one; a GGUF file holds its configuration itself. tokenizer: the target's goes with them. base: the model's
    directory, where these are an adapter of it; beside: directories inside this one. as_is: tensors of the target, whose dtype
    is their own.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    weights: str = WEIGHTS
    tokenizer: bool = False
    facts: dict[str, Any] = field(default_factory=dict)  # further ones that the reader must find, as `golden.facts_of`
    config_file: str = "config.json"
    base: Path | None = None
    beside: dict[str, Files] = field(default_factory=dict)
    as_is: tuple[str, ...] = ()


def write(directory: Path, files: Files, source: Source, max_shard_size: str) -> None:
    """Raises UserError for weights that the dtype cannot hold."""
    if files.weights.endswith(SUFFIX):
        return write_gguf(directory / files.weights, files.config, files.tensors, DTYPES[source.dtype])
    write_config(directory / files.config_file, files.config)
    dtypes = {name: files.tensors[name].dtype for name in files.as_is}
    tensors = {name: cast(name, tensor, dtypes.get(name, DTYPES[source.dtype])) for name, tensor in files.tensors.items()}
    if files.weights == WEIGHTS:
        _write_shards(directory, tensors, max_shard_size)
    else:
        save_file(tensors, directory / files.weights, {"format": "pt"})
    if files.tokenizer:
        source.opened.loaded.tokenizer.save_pretrained(directory)
    for name, others in files.beside.items():
        (directory / name).mkdir()
        write(directory / name, others, source, max_shard_size)


def write_config(file: Path, config: dict[str, Any]) -> None:
    file.write_text(json.dumps(config, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _write_shards(directory: Path, tensors: dict[str, Tensor], max_shard_size: str) -> None:
    """As transformers names them: one file, or numbered ones with an index."""
    try:
        split = split_torch_state_dict_into_shards(
            tensors, max_shard_size=max_shard_size, filename_pattern="model{suffix}.safetensors"
        )
    except ValueError as error:
        raise UserError(f"max_shard_size is {max_shard_size!r}; write a size such as 5GB or 500MB") from error
    for file, names in split.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, directory / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / f"{WEIGHTS}.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
