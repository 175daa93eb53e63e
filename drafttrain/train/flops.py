"""Counts the floating-point operations of a training step, from the operations that one micro-batch runs.

Shapes: B sequences, T positions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from drafttrain.model.batch import TrainBatch


class Flops:
    """Operations of target and drafter, forward and backward, for any micro-batch.

    The first micro-batch is counted by torch's formulas: 2 m n k for a matrix product; both products of attention over all
    T * T pairs, causal or not (the convention of PaLM, arXiv 2204.02311, appendix B); and the gradients that are computed:
    2 products for a trained matrix, 1 for a frozen one. From these counts, any micro-batch takes

        flops = per_position * B T + per_pair * B T^2

    The second term is attention. Padding to the longest row counts. Recomputation to save memory does not count, and neither do
    products inside our own kernels (attention over trees; training uses torch's attention). With sequence parallelism the count
    is that of this process, expressed in the whole length T.
    """

    def __init__(self) -> None:
        self.per_position: float | None = None
        self.per_pair = 0.0

    @contextmanager
    def counting(self, batch: TrainBatch) -> Iterator[None]:
        """Wraps one whole micro-batch; counts the first one."""
        if self.per_position is not None:
            yield
            return
        B, T = len(batch.token_BT), batch.length
        with _Counter() as counter:
            yield
        self.per_position, self.per_pair = counter.products / (B * T), counter.attention / (B * T * T)

    def of(self, batch: TrainBatch) -> float:
        """Operations of this micro-batch, without those of padding that all its rows have."""
        B, T = len(batch.token_BT), batch.longest
        return (self.per_position or 0.0) * B * T + self.per_pair * B * T * T


def _forward(q_BhTD: Tensor, k_BgSD: Tensor, v_BgSD: Tensor, *_: Any) -> int:
    B, h, T, D = q_BhTD.shape
    return 2 * B * h * T * k_BgSD.shape[2] * (D + v_BgSD.shape[3])


def _backward(_out: Tensor, q_BhTD: Tensor, k_BgSD: Tensor, v_BgSD: Tensor, *_: Any) -> int:
    """As torch counts it: the scores once more, and four products for the gradients."""
    B, h, T, D = q_BhTD.shape
    return 2 * B * h * T * k_BgSD.shape[2] * (3 * D + 2 * v_BgSD.shape[3])


KERNELS = ("efficient", "flash", "cudnn")
# torch 2.11's own formulas take no keys that several query heads share
ATTENTION: dict[str, Callable[..., int]] = {f"aten::_scaled_dot_product_{name}_attention": _forward for name in KERNELS}
ATTENTION |= {f"aten::_scaled_dot_product_{name}_attention_backward": _backward for name in KERNELS}


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.products = self.attention = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry and not self._again():
            own = ATTENTION.get(packet._qualified_op_name)
            flops = own(*args) if own else flop_registry[packet](*args, **(kwargs or {}), out_val=out)
            if "attention" in str(packet):
                self.attention += flops
            else:
                self.products += flops
        return out

    @staticmethod
    def _again() -> bool:
        """Whether activation checkpointing is recomputing a forward pass, during the backward pass.

        Grad mode cannot tell: it may be off there too, as inside a `Function`.
        """
        if torch._C._current_graph_task_id() == -1:
            return False
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
            frame = frame.f_back  # type: ignore[assignment]
        return frame is not None
