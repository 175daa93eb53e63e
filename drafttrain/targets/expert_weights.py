"""Loads a mixture of experts of which this process reads its share of the experts alone, and the rest whole.

Checkpoints hold experts in two ways: as tensors of their own (`experts.7.down_proj.weight`), of which the others' are left out,
or one after another in a tensor (`experts.down_proj`), of which this process's are read.
"""

from __future__ import annotations

import re
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from drafttrain.targets.experts import check_experts, experts_of, find_experts, keep_share
from drafttrain.targets.parallel import Part
from drafttrain.targets.weights import check_files, model_class

NUMBERED = re.compile(r"\bexperts\.(\d+)\.")
STACKED = re.compile(r"\bexperts\.\D")
FILES = ["model*.safetensors*", "*.json"]  # of a model on the hub


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Some rows of a tensor in a file, which are read when transformers asks for the tensor."""

    tensor: Any  # safetensors' slice
    first: int
    end: int

    def __getitem__(self, everything: Any) -> Tensor:
        rows: Tensor = self.tensor[self.first : self.end]
        return rows.clone()  # a view would keep all rows

    def get_shape(self) -> list[int]:
        return [self.end - self.first, *self.tensor.get_shape()[1:]]

    def get_dtype(self) -> str:
        return str(self.tensor.get_dtype())


def load_share(path: str, part: Part, **settings: Any) -> tuple[Any, Any]:
    """(model, transformers' report on its tensors), with this process's share of the experts.

    settings: arguments of `from_pretrained`. Raises UserError for a dense model, and a number of experts that the processes do
    not divide, before weights are read.
    """
    shared = {name: settings[name] for name in ("revision", "trust_remote_code") if name in settings}
    config = AutoConfig.from_pretrained(path, **shared)
    with torch.device("meta"):
        bare = model_class(config).from_config(config, trust_remote_code=shared.get("trust_remote_code", False))
    check_experts(bare, part.size)
    local_experts, expert_params = (
        experts_of(bare) // part.size,
        [p for m in find_experts(bare) for p in m.parameters(recurse=False)],
    )
    directory = Path(path)
    if not directory.is_dir():
        directory = Path(snapshot_download(path, revision=shared.get("revision"), allow_patterns=FILES))
    share_cls = _kind_of_share(type(bare), part)
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, "pt")) for file in check_files(directory, path)]
        tensors = {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118
        share_tensors = _share_of(
            tensors, {tuple(p.shape) for p in expert_params}, part.rank * local_experts, (part.rank + 1) * local_experts
        )
        loaded = share_cls.from_pretrained(None, config=config, state_dict=share_tensors, **settings)
    model: Any = loaded[0]
    model.__class__ = type(bare)
    with suppress(OSError):  # many have none
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model, loaded[1]


def _kind_of_share(model_cls: Any, part: Part) -> Any:
    """The model's class, whose models are made with this process's share of the experts."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        model_cls.__init__(self, *args, **kwargs)
        keep_share(self, part)

    return type(model_cls.__name__, (model_cls,), {"__init__": init, "__module__": model_cls.__module__})


def _share_of(tensors: dict[str, Any], shapes: set[tuple[int, ...]], first: int, end: int) -> dict[str, Any]:
    """The tensors of a checkpoint, of each block's experts only those within first and end. shapes: of experts' parameters."""
    share_tensors: dict[str, Any] = {}
    for name, tensor in tensors.items():
        numbered = NUMBERED.search(name)
        if numbered is None:
            share_tensors[name] = (
                TensorRows(tensor, first, end) if _is_stacked(name, tuple(tensor.get_shape()), shapes) else tensor
            )
        elif first <= int(numbered[1]) < end:
            share_tensors[name] = tensor
    return share_tensors


def _is_stacked(name: str, shape: tuple[int, ...], shapes: set[tuple[int, ...]]) -> bool:
    """Whether a tensor holds all experts of a block. The name tells, or else the shape, if it is that of matrices."""
    if STACKED.search(name):
        return any(shape[:1] == expert_shape[:1] for expert_shape in shapes)
    return len(shape) == 3 and shape in shapes
