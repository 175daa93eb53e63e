"""A target with trainable low-rank matrices on its linear maps (LoRA, arXiv 2106.09685), at all or at chosen positions.

The original's weights are never written. The trained and the merged target are other modules over the same memory. The trained
one adds only the matrices, the merged one only the weights that they change. Shapes: B rows, N positions, R logit rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from drafttrain.core.errors import UserError
from drafttrain.model.drafter import FrozenRef
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.lora import LoraOptions, LoraSpec
from drafttrain.model.low_rank import LowRank, Scale
from drafttrain.model.masks import Documents
from drafttrain.model.target import Taps, TargetOut
from drafttrain.targets.experts import find_experts
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
    """Raise UserError for a target that several processes share, or that is served with adapters."""
    original.check_no_adapters()
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


class PositionLora(nn.Module):
    """Low-rank matrices that a target's linear maps add at chosen positions of a pass alone.

    At all other positions, and for everything that runs the target itself, the target is unchanged. Its weights are used where
    they are; only the matrices are parameters.

    They have the names of the linear maps in transformers' model: `model.layers.0...lora_A.weight`. Raises UserError for
    options that do not fit the target, and for a target whose maps cannot be added to.
    """

    def __init__(self, target: HFTarget, options: LoraOptions) -> None:
        super().__init__()
        self.factor, self.scale, self.recomputes = options.alpha / options.rank, Scale(), False
        added: dict[str, LowRank] = {}
        for name, (inputs, outputs) in linear_maps(target, options.targets).items():
            added[name] = LowRank(inputs, outputs, options.rank, self.scale)
            register(self, name, added[name])
        self.kinds = sorted({name.rpartition(".")[2] for name in added})  # last parts of the maps' names
        self._view = FrozenRef(target.with_added(added))

    def run(
        self,
        token_BN: Tensor,
        kv: KVCache | None,
        ancestor_BNN: Documents | None,
        position_BN: Tensor,
        at_BN: Tensor,
        taps: Taps,
        row_BR: Tensor,
    ) -> TargetOut:
        """A pass of the target, with the matrices where `at_BN` is true; the other arguments as for a target."""
        dtype = next(self.parameters()).dtype
        self.scale.factor_BN1 = (at_BN.to(dtype) * self.factor)[..., None]
        self.scale.decodes = kv is not None
        return self._view.module(token_BN, kv, ancestor_BNN, position_BN, taps, row_BR)

    def refresh(self) -> None:
        """Make ready to decode with the current matrices."""
        self._view.module.refresh_added()

    def recompute(self) -> None:
        """From now on training stores each block's input alone and computes the rest again in the backward pass."""
        self.recomputes = True
        self._view.module.recompute()
        self.train(self.training)

    def train(self, mode: bool = True) -> PositionLora:
        super().train(mode)
        view = self._view.module
        if self.recomputes and view.hooked:
            # transformers' blocks compute again only in training mode; their parts stay in evaluation mode, without dropout
            for block in find_blocks(view.model, view.shape.blocks):
                block.training = mode
        return self


def linear_maps(target: HFTarget, kinds: list[str]) -> Mapping[str, tuple[int, int]]:
    """(input, output width) of the blocks' linear maps by their names in the model.

    kinds: last parts of names; none: all. Raises UserError for mixtures of experts, recurrent layers and unknown kinds.
    """
    name = type(target.model).__name__
    if find_experts(target.model):
        raise UserError(f"{name} has mixtures of experts, whose maps take no LoRA at single positions; choose another family")
    if target.recurrent:
        raise UserError(f"{name} has recurrent layers, which mix adapted positions into later ones; choose another family")
    block_module_ids = {id(module) for module in find_blocks(target.model, target.shape.blocks).modules()}
    linears: dict[str, nn.Module] = {
        n: m for n, m in target.model.named_modules() if id(m) in block_module_ids and isinstance(m, nn.Linear | Conv1D)
    }
    map_names = sorted({n.rpartition(".")[2] for n in linears})
    if not map_names:
        raise UserError(f"{name} has no linear maps to add matrices to: its weights are quantised; leave target.weights out")
    if unknown := [requested for requested in kinds if requested not in map_names]:
        raise UserError(f"drafter.lora_targets has {', '.join(unknown)}; the blocks' linear maps are {', '.join(map_names)}")
    return {n: _widths(m) for n, m in linears.items() if not kinds or n.rpartition(".")[2] in kinds}


def _widths(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    assert isinstance(module, nn.Linear)
    return module.in_features, module.out_features
