"""The files of an exported directory (configuration, weights in shards, tokenizer), and writing them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn

from drafttrain.core.errors import UserError
from drafttrain.export.gguf_file import SUFFIX, cast, write_gguf
from drafttrain.export.opened import Opened
from drafttrain.model.drafter import Drafter
from drafttrain.model.shapes import TargetShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHTS = "model.safetensors"

Reads = frozenset[str]  # what a stack is known to read of a family, beyond a drafter of the default options
NOTHING: Reads = frozenset()


@dataclass(frozen=True, slots=True)
class ExportSource:
    """A checkpoint that is exported to one stack."""

    opened: Opened
    stack: str
    dtype: str  # of the exported weights
    merged: str | None = None  # place of the trained target, if it was trained too
    adapter: str | None = None  # place of the target's adapter, if it is still to be merged
    place: str = ""  # final place of the directory
    quantize: str | None = None  # fp8, int8 or int4

    @property
    def options(self) -> dict[str, Any]:
        """The drafter's options."""
        return self.opened.meta.options

    @property
    def drafter(self) -> Drafter:
        """The drafter in float32."""
        return self.opened.drafter

    @property
    def tensors(self) -> dict[str, Tensor]:
        """A copy of the drafter's tensors, under their names in the checkpoint."""
        return dict(self.opened.tensors)

    @property
    def target(self) -> Any:
        """The target, in its own dtype."""
        return self.opened.loaded.target

    @property
    def embedding(self) -> Tensor:
        """[V, H] the target's embedding, in its own dtype."""
        weight: Tensor = self.target.model.get_input_embeddings().weight
        return weight

    @property
    def embedded(self) -> Tensor:
        """[V, H] all tokens as the target embeds them, with its factor if it has one, in its own dtype."""
        target = self.target
        if type(target.model.get_input_embeddings()) is nn.Embedding:
            return self.embedding
        embeddings: Tensor = target.embed(torch.arange(target.shape.vocab_size, device=target.device))
        return embeddings

    @property
    def shape(self) -> TargetShape:
        """The target's dimensions."""
        return self.opened.loaded.target.shape

    @property
    def layer_shape(self) -> TargetShape:
        """The dimensions of the drafter's own decoder layers."""
        return self.drafter.layer_shape or self.shape

    @property
    def sinks(self) -> bool:
        """Whether the drafter's own layers have attention sinks."""
        return bool(getattr(self.layer_shape, "attention_sinks", False))

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
        """The class of the target in transformers."""
        return str(self.opened.loaded.description["architecture"])


@dataclass(frozen=True, slots=True)
class Files:
    """The content of a directory."""

    config: dict[str, Any]  # config.json; the fields of a GGUF file
    tensors: dict[str, Tensor]
    weights: str = WEIGHTS  # name of the weights' file; only `model.safetensors` may be split into shards
    tokenizer: bool = False  # whether to write the target's tokenizer
    config_file: str = "config.json"
    folders: dict[str, Files] = field(default_factory=dict)  # folders inside this directory
    as_is: tuple[str, ...] = ()  # tensors that keep their dtype: the target's, and those of quantised weights
    put: Callable[[Path], None] | None = None  # writes the directory, where it is no new one but a copy with other tensors


def write(directory: Path, files: Files, source: ExportSource, max_shard_size: str) -> None:
    """Write the files. Raises UserError for weights that the dtype cannot hold."""
    if files.put is not None:
        return files.put(directory)
    if files.weights.endswith(SUFFIX):
        return write_gguf(directory / files.weights, files.config, files.tensors, DTYPES[source.dtype], files.as_is)
    write_config(directory / files.config_file, files.config)
    dtypes = {name: files.tensors[name].dtype for name in files.as_is}
    tensors = {name: cast(name, tensor, dtypes.get(name, DTYPES[source.dtype])) for name, tensor in files.tensors.items()}
    if files.weights == WEIGHTS:
        _write_shards(directory, tensors, max_shard_size)
    else:
        save_file(tensors, directory / files.weights, {"format": "pt"})
    if files.tokenizer:
        source.opened.loaded.tokenizer.save_pretrained(directory)
    for name, folder_files in files.folders.items():
        (directory / name).mkdir()
        write(directory / name, folder_files, source, max_shard_size)


def write_config(file: Path, config: dict[str, Any]) -> None:
    """Write a configuration as indented JSON."""
    file.write_text(json.dumps(config, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _write_shards(directory: Path, tensors: dict[str, Tensor], max_shard_size: str) -> None:
    """Write the weights as transformers does: one file, or numbered ones with an index."""
    try:
        state_dict_split = split_torch_state_dict_into_shards(
            tensors, max_shard_size=max_shard_size, filename_pattern="model{suffix}.safetensors"
        )
    except ValueError as error:
        raise UserError(f"max_shard_size is {max_shard_size!r}; write a size such as 5GB or 500MB") from error
    for file, names in state_dict_split.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, directory / file, {"format": "pt"})
    if state_dict_split.is_sharded:
        index = {"metadata": state_dict_split.metadata, "weight_map": state_dict_split.tensor_to_filename}
        (directory / f"{WEIGHTS}.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
