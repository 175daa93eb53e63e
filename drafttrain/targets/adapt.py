"""A target with trainable low-rank matrices on its linear maps (LoRA, arXiv 2106.09685), and the merged target that decodes.

The original's weights are never written. The trained and the merged target are other modules over the same memory. The trained
one adds only the matrices, the merged one only the weights that they change.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from drafttrain.core.errors import UserError
from drafttrain.model.frozen_ref import FrozenRef
from drafttrain.model.low_rank import LoraSpec
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.load import LoadedTarget
from drafttrain.targets.shallow import weight_sharing_copy
from drafttrain.targets.structure import find_blocks, register

NAME = "default"  # peft's name for a single adapter


class Adapter(nn.Module):
    """The low-rank matrices of one target, named as peft names them without the adapter's name: `...q_proj.lora_A.weight`.

    A fresh adapter changes nothing, because B is zero. Raises UserError for a specification that does not fit the target.
    """

    def __init__(self, original: HFTarget, spec: LoraSpec) -> None:
        from peft import LoraConfig, inject_adapter_in_model  # takes seconds, and few runs need it

        super().__init__()
        check_whole(original)
        self.spec, model = spec, weight_sharing_copy(original.model)
        config = LoraConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=_modules(model, original.shape.blocks, spec))  # type: ignore[arg-type]
        with warnings.catch_warnings():  # peft warns that GPT-2's weights are transposed
            warnings.simplefilter("ignore")
            inject_adapter_in_model(config, model, NAME)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
                register(self, name.replace(f".{NAME}.", "."), parameter)
        self._original = FrozenRef(original)
        self._target = FrozenRef(HFTarget(model.eval(), original.stop_ids, frozen=False))

    @property
    def target(self) -> HFTarget:
        """The target with the matrices, run by transformers' modules. Gradients reach only the matrices."""
        return self._target.module

    @torch.no_grad()
    def merged(self) -> HFTarget:
        """A frozen target of the original's runner with the matrices' products added to its weights, in float32."""
        from peft.tuners.lora import LoraLayer

        original = self._original.module
        model = weight_sharing_copy(original.model)
        layers: list[tuple[str, Any]] = [(n, m) for n, m in self.target.model.named_modules() if isinstance(m, LoraLayer)]
        for name, layer in layers:
            linear: Any = model.get_submodule(name)
            weight = linear.weight.float() + layer.get_delta_weight(NAME).float()
            linear.weight = nn.Parameter(weight.to(linear.weight.dtype), requires_grad=False)
        return type(original)(model, original.stop_ids)


def check_whole(original: HFTarget) -> None:
    """Raise UserError for a target that several processes share."""
    if original.part.size > 1:
        raise UserError(
            "a drafter that comes with an adapter of its target needs the whole target, "
            f"{original.shared_by} is {original.part.size}; leave it out"
        )


def adapted(loaded: LoadedTarget, adapter: Adapter) -> LoadedTarget:
    """The same with the merged target. The description stays the original's."""
    return replace(loaded, target=adapter.merged())


def own_bytes(target: HFTarget, original: HFTarget) -> int:
    """Bytes of the target's weights that are not in the original's memory."""
    shared = {p.untyped_storage().data_ptr() for p in original.model.parameters()}
    sizes = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in target.model.parameters()}
    return sum(size for address, size in sizes.items() if address not in shared)


def _modules(model: nn.Module, blocks: int, spec: LoraSpec) -> list[str]:
    """Last name components of the blocks' linear maps that get an adapter."""
    block_modules = find_blocks(model, blocks).named_modules()
    map_names = sorted({name.rsplit(".", 1)[-1] for name, module in block_modules if isinstance(module, nn.Linear | Conv1D)})
    unknown = [name for name in spec.modules if name not in map_names]
    if unknown or not map_names:
        raise UserError(
            f"drafter.adapter.modules has {', '.join(unknown) or 'nothing to adapt'}; "
            f"the blocks' linear maps are {', '.join(map_names) or 'none'}"
        )
    return list(spec.modules) or map_names
