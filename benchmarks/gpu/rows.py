"""Operators on rows: norm, gated activation, rotary positions, top-k, sampling, the training loss.

Shapes: M rows, C predictions, H width, I inner width, V vocabulary, k choices, h heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.case import Case, Draw, Kept, Tensors, generator
from drafttrain.core.sampling import Lane, Sampling, uniform
from drafttrain.ops import divergence as divergence_op
from drafttrain.ops import fp8 as fp8_op
from drafttrain.ops import fp8_rows as fp8_rows_op
from drafttrain.ops import gated as gated_op
from drafttrain.ops import rms_norm as norm_op
from drafttrain.ops import rotary as rotary_op
from drafttrain.ops import sampling as sampling_op
from drafttrain.ops import top as top_op

EPS = 1e-5
TEMPERATURE = 0.7


@dataclass(frozen=True)
class RmsNorm(Case):
    op: ClassVar = "rms_norm"
    twins: ClassVar = ("drafttrain.ops.rms_norm.reference",)
    rows: int
    width: int
    added: bool = True

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Tensors:
        draw = generator(device, seed)
        shape = (self.rows, self.width)
        x_MH, delta_MH = (torch.randn(*shape, device=device, generator=draw).to(dtype) for _ in range(2))
        return {"x": x_MH, "delta": delta_MH, "weight": torch.randn(self.width, device=device, generator=draw).to(dtype)}

    def run(self, given: Tensors) -> Tensors:
        summed, out = norm_op.rms_norm(given["x"], given["delta"] if self.added else None, given["weight"], EPS)
        return {"summed": summed, "out": out}

    def exact(self, wide: Tensors) -> dict[str, Any]:
        summed = wide["x"] + wide["delta"] if self.added else wide["x"]
        return {"summed": summed, "out": summed * (summed.square().mean(-1, keepdim=True) + EPS).rsqrt() * wide["weight"]}

    def moved(self, dtype: torch.dtype) -> int:
        """x, with an addition delta and the sum, the norm, the weight once."""
        return dtype.itemsize * self.width * (self.rows * (4 if self.added else 2) + 1)


@dataclass(frozen=True)
class Gated(Case):
    op: ClassVar = "gated"
    twins: ClassVar = ("drafttrain.ops.gated.reference",)
    rows: int
    width: int

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Tensors:
        both = torch.randn(self.rows, 2 * self.width, device=device, generator=generator(device, seed)) * 4
        return {"both": both.to(dtype)}

    def run(self, given: Tensors) -> Tensors:
        return {"out": gated_op.gated(given["both"])}

    def exact(self, wide: Tensors) -> dict[str, Any]:
        gate, up = wide["both"].chunk(2, -1)
        return {"out": F.silu(gate) * up}

    def moved(self, dtype: torch.dtype) -> int:
        """Gate and up, their product."""
        return dtype.itemsize * 3 * self.rows * self.width


@dataclass(frozen=True)
class Rotary(Case):
    """Rows are the positions of one text, whose heads are a part of a joined projection; with the gradient."""

    op: ClassVar = "rotary"
    twins: ClassVar = ("drafttrain.ops.rotary.reference",)
    rows: int
    heads: int
    width: int

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Tensors:
        draw, shape = generator(device, seed), (1, self.rows, self.heads + 1, self.width)
        x, grad = (torch.randn(*shape, device=device, generator=draw).to(dtype) for _ in range(2))
        angle = torch.rand(1, self.rows, self.width // 2, device=device, generator=draw).repeat(1, 1, 2) * 6
        return {"x": x, "grad": grad, "cos": angle.cos().to(dtype), "sin": angle.sin().to(dtype)}

    def run(self, given: Tensors) -> Tensors:
        return self._both(rotary_op.rotate, given)

    def exact(self, wide: Tensors) -> dict[str, Any]:
        return self._both(rotated, wide)

    def _both(self, function: Callable[..., Tensor], given: Tensors) -> Tensors:
        with torch.enable_grad():
            x_BhND, grad_BhND = (given[name][:, :, :-1].transpose(1, 2) for name in ("x", "grad"))
            x_BhND = x_BhND.detach().requires_grad_()
            out_BhND = function(x_BhND, given["cos"], given["sin"])
            (to_x_BhND,) = torch.autograd.grad(out_BhND, x_BhND, grad_BhND)
        return {"out": out_BhND.detach(), "to_x": to_x_BhND}

    def moved(self, dtype: torch.dtype) -> int:
        """The heads and the angles, the result; the same of gradients."""
        return 2 * dtype.itemsize * self.rows * self.width * (2 * self.heads + 2)


def rotated(x_BhND: Tensor, cos_BND: Tensor, sin_BND: Tensor) -> Tensor:
    """Pairs as complex numbers, by the definition; both halves of the angles are the same."""
    half = x_BhND.shape[-1] // 2
    pair, turn = (torch.complex(a, b) for a, b in (x_BhND.split(half, -1), (cos_BND[..., :half], sin_BND[..., :half])))
    out = pair * turn[:, None]
    return torch.cat([out.real, out.imag], -1)


@dataclass(frozen=True)
class Fp8Rows(Case):
    op: ClassVar = "fp8_rows"
    twins: ClassVar = ("drafttrain.ops.fp8_rows.reference",)
    rows: int
    width: int
    groups: int = 1

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Tensors:
        return {"x": torch.randn(self.rows, self.width, device=device, generator=generator(device, seed)).to(dtype)}

    def run(self, given: Tensors) -> Tensors:
        code_MI, scale_MG = fp8_rows_op.fp8_rows(given["x"], self.groups)
        return {"code": code_MI.view(torch.uint8), "scale": scale_MG}

    def exact(self, wide: Tensors) -> dict[str, Any]:
        code_MI, scale_MG = _codes(wide["x"], self.groups)
        return {"code": code_MI.view(torch.uint8), "scale": scale_MG.double()}

    def moved(self, dtype: torch.dtype) -> int:
        """x; a byte for each number, and a scale for each group."""
        return self.rows * (self.width * (dtype.itemsize + 1) + 4 * self.groups)


@dataclass(frozen=True)
class Fp8(Case):
    op: ClassVar = "fp8"
    blocks: ClassVar = False
    dtypes: ClassVar = (torch.bfloat16,)  # in other dtypes the weights are widened
    twins: ClassVar = ("drafttrain.ops.fp8.reference", "drafttrain.ops.fp8_rows.reference")
    rows: int
    inputs_each: int
    outputs: int

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Tensors:
        draw = generator(device, seed)
        x_MI = torch.randn(self.rows, self.inputs_each, device=device, generator=draw).to(dtype)
        code_OI, scale_O1 = _codes(torch.randn(self.outputs, self.inputs_each, device=device, generator=draw))
        scale = scale_O1[:, 0].contiguous()
        if self.blocks:
            scale = torch.rand(self.outputs // 128, self.inputs_each // 128, device=device, generator=draw)
        return {"x": x_MI, "code": code_OI.view(torch.uint8), "scale": scale}

    def run(self, given: Tensors) -> Tensors:
        linear = fp8_op.Fp8Linear(given["code"].view(fp8_rows_op.E4M3), given["scale"])
        return {"out": linear(given["x"])}

    def exact(self, wide: Tensors) -> dict[str, Any]:
        code_MI, scale_MG = _codes(wide["x"], self.inputs_each // 128 if self.blocks else 1)
        scale = wide["scale"][:, None]
        if self.blocks:
            scale = wide["scale"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        weight_OI = wide["code"].view(fp8_rows_op.E4M3).double() * scale
        x_MI = code_MI.double() * scale_MG.repeat_interleave(self.inputs_each // scale_MG.shape[1], 1)
        return {"out": x_MI @ weight_OI.T}

    def moved(self, dtype: torch.dtype) -> int:
        """A byte for each weight, its scales, x, the result."""
        x, out = self.rows * self.inputs_each, self.rows * self.outputs
        return self.outputs * (self.inputs_each + 4) + dtype.itemsize * (x + out)

    def operations(self) -> float:
        """Those of bfloat16 take twice as long."""
        return self.rows * self.inputs_each * self.outputs


@dataclass(frozen=True)
class Fp8Blocks(Fp8):
    op: ClassVar = "fp8_blocks"
    blocks: ClassVar = True


def _codes(x_MI: Tensor, groups: int = 1) -> tuple[Tensor, Tensor]:
    """(codes, scales of each row's groups) by the definition, in float32 as the operator computes them."""
    x_MGI = x_MI.float().unflatten(-1, (groups, -1))
    most_MG = x_MGI.abs().amax(-1)
    scale_MG = (most_MG / torch.full_like(most_MG, fp8_rows_op.LARGEST)).masked_fill(most_MG == 0, 1.0)
    return (x_MGI / scale_MG[..., None]).to(fp8_rows_op.E4M3).flatten(1), scale_MG


@dataclass(frozen=True)
class Top(Case):
    op: ClassVar = "top"
    twins: ClassVar = ("drafttrain.ops.top.reference",)
    rows: int
    vocab: int
    k: int
    named: bool = False

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Tensors:
        draw = generator(device, seed)
        logits_MV = torch.randn(self.rows, self.vocab, device=device, generator=draw).to(dtype)
        return {"logits": logits_MV, "ids": torch.randperm(4 * self.vocab, device=device, generator=draw)[: self.vocab]}

    def run(self, given: Tensors) -> Tensors:
        value, index = top_op.top(given["logits"], self.k, given["ids"] if self.named else None)
        return {"value": value, "index": index}

    def exact(self, wide: Tensors) -> dict[str, Any]:
        value, index = wide["logits"].sort(dim=-1, descending=True, stable=True)
        index = index[:, : self.k]
        return {"value": value[:, : self.k], "index": wide["ids"][index] if self.named else index}

    def moved(self, dtype: torch.dtype) -> int:
        """The logits; values and indices."""
        return self.rows * (self.vocab * dtype.itemsize + self.k * 12)


@dataclass(frozen=True)
class TopLog(Top):
    op: ClassVar = "top_log"

    def run(self, given: Tensors) -> Tensors:
        value, index = top_op.top_log(given["logits"], self.k, given["ids"] if self.named else None)
        return {"value": value, "index": index}

    def exact(self, wide: Tensors) -> dict[str, Any]:
        found = super().exact(wide)
        return found | {"value": found["value"] - wide["logits"].logsumexp(-1, keepdim=True)}


@dataclass(frozen=True)
class Sample(Case):
    op: ClassVar = "sample"
    twins: ClassVar = ("drafttrain.ops.sampling.sample_reference",)
    rows: int
    vocab: int

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Tensors:
        draw = generator(device, seed)
        logits_MV = torch.randn(self.rows, self.vocab, device=device, generator=draw) * 3
        return {"logits": logits_MV.to(dtype)} | noise(self.rows, device, seed)

    def run(self, given: Tensors) -> Tensors:
        return {"token": sampling_op.sample(given["logits"], sampling(given), given["position"], Lane.TARGET)}

    def exact(self, wide: Tensors) -> dict[str, Any]:
        p_MV = (wide["logits"] / wide["temperature"][:, None]).softmax(-1)
        return {"token": Draw(p_MV, uniform(sampling(wide), wide["position"], Lane.TARGET))}

    def moved(self, dtype: torch.dtype) -> int:
        """The logits once; an operator with two passes reads them again."""
        return self.rows * self.vocab * dtype.itemsize


@dataclass(frozen=True)
class Shaped(Sample):
    op: ClassVar = "shaped"
    twins: ClassVar = ("drafttrain.ops.sampling.shaped_reference",)
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def _sampling(self, given: Tensors) -> Sampling:
        return replace(sampling(given), top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    def run(self, given: Tensors) -> Tensors:
        return {"shaped": sampling_op.shaped(given["logits"], self._sampling(given))}

    def exact(self, wide: Tensors) -> dict[str, Any]:
        return {"shaped": Kept.of(wide["logits"], self._sampling(wide))}

    def moved(self, dtype: torch.dtype) -> int:
        """The logits once, and what is left of them; the kernel reads them again, from the cache where they fit."""
        return 2 * self.rows * self.vocab * dtype.itemsize


@dataclass(frozen=True)
class Divergence(Case):
    op: ClassVar = "divergence"
    twins: ClassVar = ("drafttrain.ops.divergence.reference",)
    loss: str
    rows: int
    vocab: int

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Tensors:
        draw, shape = generator(device, seed), (self.rows, self.vocab)
        logits_CV, target_CV = ((torch.randn(*shape, device=device, generator=draw) * 3).to(dtype) for _ in range(2))
        return {
            "logits": logits_CV,
            "target": (0.7 * logits_CV + 0.5 * target_CV).to(dtype),
            "label": torch.randint(0, self.vocab, (self.rows,), device=device, generator=draw),
        }

    def run(self, given: Tensors) -> Tensors:
        found = divergence_op.scores(given["logits"], given["target"], given["label"], self.loss, want_grad=True)
        assert found.grad_logits_CV is not None
        return {"loss": found.loss_C, "hit": found.top1_C, "mass": found.acceptance_C, "gradient": found.grad_logits_CV}

    def exact(self, wide: Tensors) -> dict[str, Any]:
        with torch.enable_grad():
            logits_CV = wide["logits"].requires_grad_()
            loss_C, acceptance_C = defined(self.loss, logits_CV, wide["target"], wide["label"])
            (grad_logits_CV,) = torch.autograd.grad(loss_C.sum(), logits_CV)
        top1_C = lowest_of_greatest(logits_CV.detach()) == lowest_of_greatest(wide["target"])
        return {"loss": loss_C.detach(), "hit": top1_C, "mass": acceptance_C.detach(), "gradient": grad_logits_CV}

    def moved(self, dtype: torch.dtype) -> int:
        """Both models' logits; the gradient."""
        return 3 * self.rows * self.vocab * dtype.itemsize


def defined(name: str, logits_CV: Tensor, target_CV: Tensor, label_C: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, overlap) by their definitions."""
    q_CV, p_CV = logits_CV.softmax(-1), target_CV.softmax(-1)
    acceptance_C = torch.minimum(q_CV, p_CV).sum(-1)
    if name == "ce":
        return -logits_CV.log_softmax(-1).gather(1, label_C[:, None])[:, 0], acceptance_C
    if name == "kl":
        return (p_CV * (target_CV.log_softmax(-1) - logits_CV.log_softmax(-1))).sum(-1), acceptance_C
    return -acceptance_C.log() if name == "lk" else 1 - acceptance_C, acceptance_C


def lowest_of_greatest(logits_V: Tensor) -> Tensor:
    """[...]: the argmax, the lowest index among equals."""
    V = logits_V.shape[-1]
    greatest_V = logits_V == logits_V.amax(-1, keepdim=True)
    return torch.where(greatest_V, torch.arange(V, device=logits_V.device), V).amin(-1)


def noise(rows: int, device: torch.device, seed: int) -> Tensors:
    """The keys of the noise, and each row's temperature, on the device."""
    draw = generator(device, seed + 1000)
    return {
        "position": torch.randint(0, 5000, (rows,), device=device, generator=draw),
        "key": torch.randint(0, 1 << 40, (rows,), device=device, generator=draw),
        "seed": torch.randint(0, 1 << 40, (1,), device=device, generator=draw),
        "temperature": 0.5 + torch.rand(rows, device=device, generator=draw),
    }


def sampling(given: Tensors) -> Sampling:
    """The settings, with tensors for everything that a captured graph may not hold."""
    return Sampling(TEMPERATURE, key_B=given["key"], temperature_B=given["temperature"], seed_1=given["seed"])
