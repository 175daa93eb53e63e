"""The weights that decoding computes with: linear maps joined into one product, merged with adapters, or quantised.

Shapes: H input width, O output width, I input width of a weight.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.model.low_rank import JointLowRank, LowRank
from drafttrain.ops.fp8 import Fp8Linear
from drafttrain.ops.linear import linear, pack
from drafttrain.ops.quantised import Quantised

PACKED_BYTES = 2**31  # largest weights that are packed: packing doubles them


@torch.no_grad()
def merged(linear: Any) -> Tensor:
    """A linear map's weight plus the product of its adapter, if it has one."""
    weight: Tensor = linear.weight.detach()
    delta = getattr(linear, "get_delta_weight", None)
    return weight if delta is None else weight + delta("default").to(weight.dtype)


class Joint:
    """Linear maps with one input, computed as one product and packed where that is faster.

    Until `join`, each map is computed separately, as training needs. order_O: output rows of the joined map, reordered;
    None: as they are. matrix: others read the weight too, so it is neither packed nor quantised.
    """

    def __init__(self, parts: Sequence[nn.Linear | Fp8Linear], order_O: Tensor | None = None, matrix: bool = False) -> None:
        self.parts, self.order_O, self.matrix = parts, order_O, matrix
        self.split()

    def split(self) -> None:
        """Compute the maps separately again."""
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.packed: Tensor | None = None
        self.quantised: Quantised | Fp8Linear | None = None

    def __call__(self, x_H: Tensor) -> Tensor:
        if self.quantised is not None:
            return self.quantised(x_H) if self.bias is None else self.quantised(x_H) + self.bias
        if self.weight is None:
            out_O = (
                self.parts[0](x_H) if len(self.parts) == 1 else torch.cat([projection(x_H) for projection in self.parts], -1)
            )
            return out_O if self.order_O is None else out_O[..., self.order_O.to(out_O.device)]
        return linear(x_H, self.weight, self.bias, self.packed)

    def with_added(self, of: Mapping[int, LowRank]) -> Joint:
        """A map over the same weights that adds to its parts' outputs. of: by the parts' identities."""
        added = [of.get(id(projection)) for projection in self.parts]
        return self if all(low_rank is None for low_rank in added) else Extended(self, added)

    def join(self, share: bool, packed: bool, bits: int | None = None) -> bool:
        """Join the parts' current weights. Returns whether they differ from those joined before.

        Unchanged weights stay in place and changed ones are written to the same memory, since a captured CUDA graph refers to
        that memory. share: the parts become views of the joined weight, so that it takes no extra memory. bits: quantise the
        joined weight. Parts in FP8 never change. They stay separate where others are not in FP8, and where blocks share the
        scales of rows that have another order.
        """
        packed, bits = packed and not self.matrix, None if self.matrix else bits
        # decoding may join first, in inference mode, and the joined tensors may have to be written later
        with torch.inference_mode(torch.is_inference_mode_enabled() and share), torch.no_grad():
            if any(isinstance(projection, Fp8Linear) for projection in self.parts):
                return self._join_fp8()
            return self._joined(share, packed, bits)

    def _join_fp8(self) -> bool:
        fp8_projections = [projection for projection in self.parts if isinstance(projection, Fp8Linear)]
        blocks = any(projection.blocks for projection in fp8_projections)
        if self.quantised is not None or len(fp8_projections) < len(self.parts) or (blocks and self.order_O is not None):
            return False
        order_O = None if self.order_O is None else self.order_O.to(fp8_projections[0].scale.device)
        self.quantised = Fp8Linear.joined(fp8_projections, order_O)
        return True

    def _joined(self, share: bool, packed: bool, bits: int | None) -> bool:
        weights = [merged(projection) for projection in self.parts]
        biases = _biases(self.parts)
        if self.order_O is not None:  # the parts keep their own order
            share, order_O = False, self.order_O.to(weights[0].device)
            weights, biases = [torch.cat(weights)[order_O]], [torch.cat(biases)[order_O]] if biases else []
        changed = _update(self, "bias", biases)
        if bits is not None:
            return self._quantise(torch.cat(weights), bits) or changed
        if packed and not share and self.weight is None and weights[0].device.type == "cpu":
            weights[0] = weights[0].clone()  # a view would always equal the parameter, and its packed copy would become stale
        changed = _update(self, "weight", weights) or changed
        assert self.weight is not None
        if share and len(weights) > 1:
            for projection, rows in zip(self.parts, self.weight.split([p.out_features for p in self.parts]), strict=True):
                projection.weight.data = rows
        if packed and changed:
            self.packed = pack(self.weight)
        return changed

    def _quantise(self, weight_OI: Tensor, bits: int) -> bool:
        quantised = Quantised(weight_OI, bits)
        if isinstance(self.quantised, Quantised):
            return self.quantised.take(quantised)
        self.quantised = quantised
        return True


class Extended(Joint):
    """A joint map of other weights, which adds low-rank matrices. It is neither joined nor split itself."""

    def __init__(self, joint: Joint, added: Sequence[LowRank | None]) -> None:
        """added: for each part; None: nothing."""
        super().__init__(joint.parts, joint.order_O, joint.matrix)
        self.joint, self.added = (
            joint,
            JointLowRank(added, [projection.out_features for projection in joint.parts], joint.order_O),
        )

    def __call__(self, x_H: Tensor) -> Tensor:
        return self.added.add_to(self.joint(x_H), x_H)


def _biases(projections: Sequence[Any]) -> list[Tensor]:
    """The parts' biases, zeros for one that has none; empty if none has one."""
    if all(projection.bias is None for projection in projections):
        return []
    zeros = [projection.weight.new_zeros(projection.out_features) for projection in projections]
    return [
        zero if projection.bias is None else projection.bias.detach()
        for projection, zero in zip(projections, zeros, strict=True)
    ]


def _update(joint: Joint, name: str, tensors: list[Tensor]) -> bool:
    """Set the joint's tensor `name` to the concatenated parts. Returns whether it changed."""
    joined: Tensor | None = getattr(joint, name)
    if not tensors:
        return False
    if joined is None or (joined.dtype, joined.device) != (tensors[0].dtype, tensors[0].device):
        setattr(joint, name, tensors[0] if len(tensors) == 1 else torch.cat(tensors))
        return True
    rows = joined.split([len(tensor) for tensor in tensors])
    if all(torch.equal(current, updated) for current, updated in zip(rows, tensors, strict=True)):
        return False
    torch.cat(tensors, out=joined)
    return True


class QuantisedForward:
    """A linear map's forward with quantised weights."""

    def __init__(self, layer: Any, base: nn.Linear, bits: int) -> None:
        self.bits, self.bias, self.product = bits, base.bias, Quantised(merged(layer), bits)

    def take(self, layer: Any) -> None:
        self.product.take(Quantised(merged(layer), self.bits))

    def __call__(self, x_I: Tensor) -> Tensor:
        return self.product(x_I) if self.bias is None else self.product(x_I) + self.bias


class MergedForward:
    """The forward of a layer with peft's adapter, with merged weights."""

    def __init__(self, layer: Any, base: nn.Module) -> None:
        self.copied: Any = copy.deepcopy(base)
        self.copied.weight = nn.Parameter(merged(layer), requires_grad=False)

    def take(self, layer: Any) -> None:
        self.copied.weight.copy_(merged(layer))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.copied(*args, **kwargs)


@torch.no_grad()
def substitute(model: nn.Module, bits: int | None = None) -> None:
    """Until `restore`, adapted layers compute with merged weights and, with `bits`, all linear maps with quantised ones.

    The parameters do not change. A later call writes the current weights to the same memory: captured steps refer to it.
    """
    with torch.inference_mode(False):
        for layer in _layers(model):
            base = getattr(layer, "base_layer", layer)
            quantises = bits is not None and isinstance(base, nn.Linear)
            if base is layer and not quantises:
                continue
            installed = layer.__dict__.get("forward")
            if (
                isinstance(installed, QuantisedForward if quantises else MergedForward)
                and getattr(installed, "bits", bits) == bits
            ):
                installed.take(layer)
            else:
                layer.forward = QuantisedForward(layer, base, bits or 0) if quantises else MergedForward(layer, base)


def restore(model: nn.Module) -> None:
    """Undo `substitute`."""
    for layer in _layers(model):
        layer.__dict__.pop("forward", None)


def _layers(model: nn.Module) -> list[Any]:
    """Linear maps; one with an adapter counts as a single layer."""
    layers, adapted = [], ""
    for name, module in model.named_modules():
        if adapted and name.startswith(adapted):
            continue
        if hasattr(module, "get_delta_weight"):
            adapted = f"{name}."
        if adapted == f"{name}." or isinstance(module, nn.Linear):
            layers.append(module)
    return layers
