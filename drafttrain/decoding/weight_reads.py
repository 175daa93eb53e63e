"""Counts the bytes of weights that a decode step reads, product by product."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.matmul, aten.linear, aten._scaled_mm}


class WeightReads(TorchDispatchMode):
    """Counts what matrix products read of tensors that were there before: the weights, in their stored size.

    A weight counts once for each product, as the head of a drafter that drafts token by token does. An embedding table counts
    only as an output matrix, and an expert only where it is chosen. Work within this context runs as it does outside.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()  # storages of results: no weights
        self._reads: list[tuple[int, int]] = []  # (address, bytes) of each weight, product by product

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func.overloadpacket in PRODUCTS:
            self._reads += [(x.data_ptr(), x.numel() * x.element_size()) for x in inputs if _storage(x) not in self._made]
        input_storages = {_storage(x) for x in inputs}  # a view's storage may be a weight's
        self._made |= {_storage(x) for x in tree_leaves(out) if isinstance(x, Tensor)} - input_storages
        return out

    def bytes(self, cached: int = 0) -> int:
        """Bytes read in all. cached: bytes that stay on the chip between two reads; weights that fit there are read once."""
        times = Counter(self._reads)
        repeated_bytes = sum(size for (_, size), count in times.items() if count > 1)
        return sum(size if repeated_bytes <= cached else size * count for (_, size), count in times.items())


def _storage(x: Tensor) -> int:
    return id(x) if x.is_mkldnn else x.untyped_storage().data_ptr()
