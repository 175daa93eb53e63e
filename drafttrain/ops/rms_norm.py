"""RMS norm (Zhang & Sennrich 2019) of a residual stream, with the addition before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.core.sequence_shard import is_part
from drafttrain.ops import jit, library

WIDEST = 16_384  # numbers of a row that one program of the kernel holds


def rms_norm(x_H: Tensor, delta_H: Tensor | None, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, its norm times the weight), both [..., H]. Without a delta the first is x itself."""
    if not (library.serves(x_H) and x_H.is_contiguous() and weight_H.dtype == x_H.dtype):
        return reference(x_H, delta_H, weight_H, eps)
    out_H = torch.empty_like(x_H)
    summed_H = x_H if delta_H is None else torch.empty_like(x_H)
    torch.ops.drafttrain.rms_norm(x_H, None if delta_H is None else delta_H.contiguous(), weight_H, eps, summed_H, out_H)
    return summed_H, out_H


def trained_norm(x_H: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """The norm of x times the weight, with gradients, in training. The input and one number per row are kept for the backward
    pass."""
    if torch.compiler.is_compiling():  # the compiler fuses the operators itself, and cannot look into our kernels
        wide_H = _wide(x_H)
        return (wide_H * torch.rsqrt(wide_H.square().mean(-1, keepdim=True) + eps)).to(x_H.dtype) * weight_H
    out_H: Tensor = _Norm.apply(x_H, weight_H, eps)  # type: ignore[no-untyped-call]
    return out_H


class _Norm(torch.autograd.Function):
    """On a GPU one kernel each way; elsewhere torch's operators. Computed in float32, or float64 where the input is."""

    @staticmethod
    def forward(ctx: Any, x_H: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        if not _kernels(x_H, weight_H):
            wide_H = _wide(x_H)
            scale_1 = torch.rsqrt(torch.linalg.vecdot(wide_H, wide_H)[..., None] / x_H.shape[-1] + eps)
            ctx.save_for_backward(x_H, weight_H, scale_1)
            return (wide_H * scale_1).to(x_H.dtype) * weight_H
        from drafttrain.kernels.triton import layer

        out_H, scale_1 = torch.empty_like(x_H), x_H.new_empty(*x_H.shape[:-1], 1, dtype=torch.float32)
        layer.norm(x_H, weight_H, eps, out_H, scale_1).run()
        ctx.save_for_backward(x_H, weight_H, scale_1)
        return out_H

    @staticmethod
    def backward(ctx: Any, grad_H: Tensor) -> tuple[Tensor, Tensor, None]:
        x_H, weight_H, scale_1 = ctx.saved_tensors
        if not _kernels(x_H, weight_H, grad_H):
            normed_H, slope_H = _wide(x_H) * scale_1, _wide(grad_H * weight_H)
            to_weight_H = (grad_H * normed_H.to(x_H.dtype)).reshape(-1, x_H.shape[-1]).sum(0)
            along_1 = torch.linalg.vecdot(slope_H, normed_H)[..., None] / x_H.shape[-1]
            return slope_H.addcmul(normed_H, along_1, value=-1.0).mul_(scale_1).to(x_H.dtype), to_weight_H, None
        from drafttrain.kernels.triton import layer

        to_x_H = torch.empty_like(x_H)
        to_weight_RH = layer.parts(x_H)
        layer.norm_backward(grad_H, x_H, weight_H, scale_1, to_x_H, to_weight_RH).run()
        return to_x_H, to_weight_RH.sum(0).to(weight_H.dtype), None


def _wide(x_H: Tensor) -> Tensor:
    return x_H if x_H.dtype == torch.float64 else x_H.float()


def _kernels(*inputs: Tensor) -> bool:
    same_layout = all(x.dtype in library.DTYPES and x.is_contiguous() and x.dtype == inputs[0].dtype for x in inputs)
    return same_layout and bool(inputs[0].numel()) and inputs[0].shape[-1] <= WIDEST and jit.serves(inputs[0])


class OtherNorm:
    """A transformers norm whose formula is not Llama's. `norm` takes it in place of a module."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, x_H: Tensor) -> Tensor:
        normed_H: Tensor = self.module(x_H)
        return normed_H

    def normed(self, x_H: Tensor, delta_H: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `norm`."""
        summed_H = x_H if delta_H is None else x_H + delta_H
        return summed_H, self(summed_H)


class OffsetNorm(OtherNorm):
    """RMS norm with the scale 1 + weight, in float32 (Gemma)."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.variance_epsilon: float = module.eps
        self._scale_H: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """The scale, in float32."""
        weight_H: Tensor = self.module.weight
        if weight_H.requires_grad:
            return 1.0 + weight_H.float()
        if self._scale_H is None or self._scale_H.device != weight_H.device:
            with torch.inference_mode(False), torch.no_grad():  # a frozen norm may decode first and pass gradients later
                self._scale_H = 1.0 + weight_H.float()
        return self._scale_H

    def normed(self, x_H: Tensor, delta_H: Tensor | None) -> tuple[Tensor, Tensor]:
        weight_H = self.module.weight
        if (weight_H.requires_grad and torch.is_grad_enabled()) or is_part(weight_H):
            return super().normed(x_H, delta_H)
        return rms_norm(x_H, delta_H, self.weight, self.variance_epsilon)


class CentredNorm(OtherNorm):
    """Layer norm in float32, without a bias (Cohere)."""

    def __call__(self, x_H: Tensor) -> Tensor:
        weight_H = self.module.weight.float()
        return F.layer_norm(x_H.float(), weight_H.shape, weight_H, None, self.module.variance_epsilon).to(x_H.dtype)


def norm(module: Any, x_H: Tensor, delta_H: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`rms_norm` with a transformers module's weight. A trainable or divided module runs its own forward."""
    if isinstance(module, OtherNorm):
        return module.normed(x_H, delta_H)
    if module.weight.requires_grad or is_part(module.weight):
        summed_H = x_H if delta_H is None else x_H + delta_H
        return summed_H, module(summed_H)
    return rms_norm(x_H, delta_H, module.weight, module.variance_epsilon)


def reference(x_H: Tensor, delta_H: Tensor | None, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The plain-torch twin of `rms_norm`. A weight in another dtype is applied in float32, before the result is rounded."""
    summed_H = x_H if delta_H is None else x_H + delta_H
    if weight_H.dtype != summed_H.dtype:
        return summed_H, F.rms_norm(summed_H.float(), (summed_H.shape[-1],), weight_H.float(), eps).to(summed_H.dtype)
    return summed_H, F.rms_norm(summed_H, (summed_H.shape[-1],), weight_H, eps)
