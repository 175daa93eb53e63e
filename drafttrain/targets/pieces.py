"""Loads a model in pieces: what is outside its blocks, or one block, without the memory of the others.

transformers fills each piece (`from_pretrained` with a state dict), so that its conversions of names and of experts, its dtypes
and its quantised modules are those of the whole model. Only the files that hold the piece's tensors are opened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig
from transformers.utils import cached_file

from drafttrain.core.errors import UserError
from drafttrain.targets.structure import find_blocks, shape_of
from drafttrain.targets.weights import INDEX, StoredTensors, check_known, filled, listed_weights, model_class

SINGLE = "model.safetensors"
NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.)")


@dataclass
class CheckpointFiles:
    """Which file of a directory or hub repository holds which tensor. A file of the hub is fetched when it is first read."""

    place: str
    revision: str | None  # of a hub repository: the commit
    names: dict[str, str]  # tensor -> name of its file
    read: set[str] = field(default_factory=set)  # tensors that were read

    @staticmethod
    def of(place: str, revision: str | None, origin: str) -> CheckpointFiles:
        """origin: the name that messages use. Raises UserError for damaged files, and files outside of a directory."""
        if Path(place).is_dir():
            stored = StoredTensors.of(Path(place), origin)
            return CheckpointFiles(place, None, {name: file.name for name, file in stored.files.items()})
        checkpoint_files = CheckpointFiles(place, revision, {})
        index = cached_file(place, INDEX, revision=revision, _raise_exceptions_for_missing_entries=False)
        if index is not None:
            checkpoint_files.names = listed_weights(Path(index), origin)
        else:
            with safe_open(checkpoint_files.path(SINGLE), "pt") as handle:
                checkpoint_files.names = dict.fromkeys(handle.keys(), SINGLE)
        return checkpoint_files

    def path(self, file: str) -> Path:
        """Where a file is on this machine."""
        if Path(self.place).is_dir():
            return Path(self.place) / file
        return Path(str(cached_file(self.place, file, revision=self.revision)))

    @property
    def identity(self) -> list[Any]:
        """Plain data that differs where the weights do: a commit of the hub, or the files' sizes and times."""
        if not Path(self.place).is_dir():
            return [self.place, self.revision]
        files = [self.path(file) for file in sorted(set(self.names.values()))]
        return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


class OpenFiles:
    """The files of one piece, opened when a tensor is read."""

    def __init__(self, files: CheckpointFiles) -> None:
        self.files, self._opened, self._lock, self._stack = files, dict[str, Any](), Lock(), ExitStack()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def slice(self, name: str) -> Any:
        """safetensors' slice."""
        with self._lock:  # transformers reads in threads
            file = self.files.names[name]
            if file not in self._opened:
                self._opened[file] = self._stack.enter_context(safe_open(self.files.path(file), "pt"))
            return self._opened[file].get_slice(name)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file, which transformers asks for when the piece has it."""

    name: str
    opened: OpenFiles

    def __getitem__(self, everything: Any) -> Tensor:
        tensor: Tensor = self.opened.slice(self.name)[...]
        self.opened.files.read.add(self.name)
        return tensor

    def get_shape(self) -> list[int]:
        return list(self.opened.slice(self.name).get_shape())

    def get_dtype(self) -> str:
        return str(self.opened.slice(self.name).get_dtype())


class Pieces:
    """The pieces of one model."""

    def __init__(self, place: str, origin: str, revision: str | None, trust_remote_code: bool, **settings: Any) -> None:
        """settings: further arguments of `from_pretrained`. Raises UserError for a model whose blocks share weights."""
        shared = {"revision": revision, "trust_remote_code": trust_remote_code}
        self.config: Any = AutoConfig.from_pretrained(place, **shared)
        quantization = getattr(self.config, "quantization_config", None)
        if isinstance(quantization, dict) and quantization.get("quant_method") == "fp8":
            quantization["dequantize"] = True  # a fingerprint is that of the weights that codes stand for
        self.origin, self.place, self.settings = origin, place, settings
        with torch.device("meta"):
            outline: Any = model_class(self.config).from_config(
                self.config, trust_remote_code=trust_remote_code, dtype=settings["dtype"]
            )
        self.kind, self.count = type(outline), shape_of(self.config.get_text_config()).blocks
        blocks = find_blocks(outline, self.count)
        self.prefix = next(name for name, module in outline.named_modules() if module is blocks)
        self.parameters = sum(p.numel() for p in outline.parameters())
        self.bytes = sum(p.numel() * p.element_size() for p in outline.parameters())
        block_param_ids = [id(p) for block in blocks for p in block.parameters()]
        outside_param_ids = {id(p) for name, p in outline.named_parameters() if not name.startswith(f"{self.prefix}.")}
        if len(set(block_param_ids)) < len(block_param_ids) or outside_param_ids & set(block_param_ids):
            raise UserError(f"{origin}: blocks of {self.kind.__name__} share weights, so they cannot be loaded one by one")
        commit = getattr(self.config, "_commit_hash", None) or revision
        self.files = CheckpointFiles.of(place, commit, origin)

    def outside(self, device: torch.device) -> Any:
        """The model with all weights outside of its blocks on this device. The blocks are on the `meta` device."""
        outline_blocks: list[nn.Module] = []

        def leave_out(model: Any) -> None:
            blocks = find_blocks(model, self.count)
            outline_blocks.extend(blocks)
            for number in range(self.count):
                blocks[number] = nn.Identity()

        model = self._load(leave_out, self.files.names).to(device)
        blocks = model.get_submodule(self.prefix)
        for number, block in enumerate(outline_blocks):
            blocks[number] = block
        model.config.name_or_path = self.place
        with suppress(OSError):  # many have none
            model.generation_config = GenerationConfig.from_pretrained(self.place, revision=self.files.revision or "main")
        return model

    def block(self, number: int) -> nn.Module:
        """One block with its weights."""

        def keep_one(model: Any) -> None:
            _keep_block(model, self.prefix, number)

        model = self._load(keep_one, [name for name in self.files.names if str(number) in NUMBER.findall(name)])
        block: nn.Module = model.get_submodule(f"{self.prefix}.{number}")
        return block

    def _load(self, reduce: Callable[[Any], None], names: Iterable[str]) -> Any:
        """Load what `reduce` leaves of a model without weights, from tensors among these."""
        model_cls: Any = self.kind

        def init(model: Any, *args: Any, **kwargs: Any) -> None:
            model_cls.__init__(model, *args, **kwargs)
            reduce(model)

        reduced_cls: Any = type(model_cls.__name__, (model_cls,), {"__init__": init, "__module__": model_cls.__module__})
        with OpenFiles(self.files) as open_files:
            tensors = {name: _Stored(name, open_files) for name in names}

            def read(path: None, **settings: Any) -> tuple[Any, Any]:
                model, loading_info = reduced_cls.from_pretrained(path, config=self.config, state_dict=tensors, **settings)
                loading_info = dict(loading_info if isinstance(loading_info, dict) else vars(loading_info)) | {
                    "unexpected_keys": ()
                }  # `check_read`
                loading_info["missing_keys"] = [name for name in loading_info["missing_keys"] if name not in _stubs(model)]
                return model, loading_info

            model = filled(read, None, self.origin, **self.settings)
        model.__class__ = model_cls
        return model.eval()

    def check_read(self, model: Any) -> None:
        """Raise UserError for tensors that no piece has read and the model does not know, once all pieces were loaded."""
        check_known(self.files.names.keys() - self.files.read, model, self.origin)


def _keep_block(model: Any, prefix: str, number: int) -> None:
    """Remove all modules and weights of the model but one block, which keeps its name.

    Stubs are in the places of embedding and output matrix: transformers asks for both, and its quantisers leave the last module
    as it is.
    """
    ends, module = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}, model
    for name in prefix.split("."):
        for child_name, child in list(module.named_children()):
            if id(child) in ends:
                module.add_module(child_name, _Stub(1, 1, bias=False, device="meta"))
            elif child_name != name:
                del module._modules[child_name]
        module._parameters.clear()
        module._buffers.clear()
        module._non_persistent_buffers_set.clear()
        module = module.get_submodule(name)
    module._modules = {str(number): module[number]}
    model.all_tied_weights_keys = {}


class _Stub(nn.Linear):
    """In the place of a module that a piece does not have."""


def _stubs(model: Any) -> set[str]:
    """Names of the stubs' weights, which no file has."""
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, _Stub)}
