"""A checkpoint opened for export, with its drafter in float32 for any dtype of the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.core.errors import UserError
from drafttrain.drafters.checkpoint import (
    ADAPTER,
    CheckpointMeta,
    check_target,
    filled,
    load_checkpoint,
    read_meta,
    read_weights,
)
from drafttrain.drafters.common.drafter_lora import merged
from drafttrain.model.drafter import Drafter
from drafttrain.model.low_rank import LowRank
from drafttrain.model.shapes import LayerOptions, TargetShape, check_scaling
from drafttrain.model.target import TargetOut
from drafttrain.targets.load import LoadedTarget
from drafttrain.targets.shallow import weight_sharing_copy


class Float32Target:
    """A target whose embedding and head compute in float32, so that golden drafts do not depend on its rounding.

    A factor on its logits, or a soft cap, is left out. Neither changes their order. Where a drafter adds to them, its export is
    refused, except where the stack applies them too (`export/target_ends.py`).
    """

    dtype = torch.float32

    def __init__(self, target: Any) -> None:
        self._narrow = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._narrow, name)

    def __call__(self, *args: Any, **kwargs: Any) -> TargetOut:
        out: TargetOut = self._narrow(*args, **kwargs)
        return out

    def embed(self, token: Tensor) -> Tensor:
        """[..., H]: the embedding of these tokens."""
        embedded_H: Tensor = self._narrow.embed(token)
        return embedded_H.float()

    def with_added(self, added: Mapping[str, LowRank]) -> Any:
        """A target of float32 weights, which are copies where the target's own are narrower."""
        target = self._narrow
        if target.dtype == torch.float32:
            return target.with_added(added)
        return target._view(weight_sharing_copy(target.model).float()).with_added(added)

    @cached_property
    def head_weight(self) -> Tensor:
        """[V, H]: the output matrix."""
        weight: Tensor = self._narrow.head_weight
        return weight.detach().float()

    def head(self, hidden_H: Tensor) -> Tensor:
        """[..., V]: the logits of these states."""
        bias = getattr(self._narrow.model.get_output_embeddings(), "bias", None)
        return F.linear(hidden_H.float(), self.head_weight, None if bias is None else bias.float())


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint opened for export."""

    directory: Path
    meta: CheckpointMeta
    loaded: LoadedTarget
    target: Any  # the target in float32, the adapted one if it was trained too
    drafter: Drafter  # in float32, for `target`
    tensors: dict[str, Tensor]  # the drafter's tensors as they were saved, its LoRA merged
    matrices: dict[str, Tensor] = field(default_factory=dict)  # tensors of the target's adapter, under their names in it
    apart: dict[str, Tensor] = field(default_factory=dict)  # of a drafter trained by LoRA: its weights and matrices

    @staticmethod
    def of(directory: Path, loaded: LoadedTarget, scaling: Mapping[str, Any] | None = None) -> Opened:
        """Open a checkpoint. Raises UserError as `load_checkpoint` does, and for NaN or infinite weights.

        scaling: of the rotary positions of the drafter's layers, in place of none.
        """
        meta = read_meta(directory)
        if scaling is not None:
            meta = _scaled(directory, meta, scaling)
        if meta.adapter is not None:
            loaded = load_checkpoint(directory, loaded).loaded
        else:
            check_target(directory, meta.target, loaded.target)
        tensors = read_weights(directory)
        names = [] if meta.adapter is None else [name for name in tensors if name.startswith(ADAPTER)]
        matrices = {name.removeprefix(ADAPTER): tensors.pop(name) for name in names}
        for name, x in tensors.items():
            if x.is_floating_point() and not bool(x.isfinite().all()):
                raise UserError(f"{directory}: {name} holds NaN or infinity: training diverged; use an earlier checkpoint")
        unmerged, tensors = tensors, merged(tensors, meta.lora)
        target = Float32Target(loaded.target)
        drafter = filled(directory, meta, target, tensors).requires_grad_(False)
        return Opened(directory, meta, loaded, target, drafter, tensors, matrices, unmerged if meta.lora else {})

    @staticmethod
    def in_memory(meta: CheckpointMeta, drafter: Drafter, loaded: LoadedTarget) -> Opened:
        """A drafter that has no checkpoint. Its tensors share memory with it."""
        tensors = {name: tensor.detach() for name, tensor in drafter.state_dict().items()}
        return Opened(Path("a drafter in memory"), meta, loaded, Float32Target(loaded.target), drafter, tensors)

    @property
    def shape(self) -> TargetShape:
        """The dimensions of the drafting model, of the drafter's own decoder layers, or else of the target."""
        model = self.drafter.language_model()
        return (self.drafter.layer_shape or self.loaded.target.shape) if model is None else model.shape


def _scaled(directory: Path, meta: CheckpointMeta, scaling: Mapping[str, Any]) -> CheckpointMeta:
    """The checkpoint with scaled rotary positions, for contexts longer than it was trained on."""
    if "layer" not in meta.options:
        raise UserError(
            f"export.rope_scaling is set, but {meta.family} drafters have no rotary layers of their own; leave it out"
        )
    layer = LayerOptions.of(meta.options["layer"])
    if layer.rope_scaling is not None:
        raise UserError(
            f"export.rope_scaling is set, but {directory} was trained with {dict(layer.rope_scaling)}; leave it out"
        )
    check_scaling(scaling)
    return replace(meta, options=meta.options | {"layer": asdict(replace(layer, rope_scaling=dict(scaling)))})
