"""Low-rank matrices that a target's linear maps add at chosen positions of a pass alone (LoRA, arXiv 2106.09685).

At all other positions, and for everything that runs the target itself, the target is unchanged. Its weights are used where they
are; only the matrices are parameters.

Shapes: B rows, N positions of one pass, R logit rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from drafttrain.core.errors import UserError
from drafttrain.model.frozen_ref import FrozenRef
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.low_rank import LoraOptions, LowRank, Scale
from drafttrain.model.masks import Documents
from drafttrain.model.target import Taps, TargetOut
from drafttrain.targets.experts import find_experts
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.structure import find_blocks, register


class PositionLora(nn.Module):
    """The matrices of a target, under the names of the linear maps in transformers' model: `model.layers.0...lora_A.weight`.

    Raises UserError for options that do not fit the target, and for a target whose maps cannot be added to.
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
