"""Operators of drafting: links of a tree, the best nodes of many candidates, parallel heads.

Shapes: B rows, N nodes, M candidates, K heads, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.gpu.case import Case, Ranks, Tensors, generator, random_parents
from drafttrain.ops import build_tree as tree_op
from drafttrain.ops import residual_heads as heads_op
from drafttrain.ops.tree_bits import words_for, words_of


@dataclass(frozen=True)
class TreeLinks(Case):
    op: ClassVar = "tree_links"
    twins: ClassVar = ("drafttrain.ops.build_tree.links_reference",)
    dtypes: ClassVar = (torch.float32,)
    rows: int
    nodes: int

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Tensors:
        return {"parent": random_parents(self.rows, self.nodes, device, seed)}

    def run(self, given: Tensors) -> Tensors:
        return dict(zip(("depth", "bits"), tree_op.tree_links(given["parent"]), strict=True))

    def exact(self, wide: Tensors) -> dict[str, Any]:
        found = [links(parent) for parent in wide["parent"].tolist()]
        return {name: torch.tensor([row[i] for row in found], device=wide["parent"].device) for i, name in enumerate(_LINKS)}

    def moved(self, dtype: torch.dtype) -> int:
        """Parents; depths and bits."""
        return 8 * (2 + words_for(self.nodes)) * self.rows * self.nodes


_LINKS = ("depth", "bits")


def links(parent: list[int]) -> tuple[list[int], list[list[int]]]:
    """(depth, ancestors as the bits of signed integers), node by node."""
    depth, bits = [0], [1]
    for node, above in enumerate(parent[1:], 1):
        depth.append(depth[above] + 1)
        bits.append(bits[above] | 1 << node)
    return depth, [words_of(b, words_for(len(parent))) for b in bits]


@dataclass(frozen=True)
class BuildTree(Case):
    op: ClassVar = "build_tree"
    twins: ClassVar = (
        "drafttrain.ops.build_tree.build_reference",
        "drafttrain.ops.build_tree.links_reference",
        "drafttrain.ops.top.reference",
    )
    dtypes: ClassVar = (torch.float32,)
    rows: int
    candidates: int
    nodes: int

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Tensors:
        parent_BM = random_parents(self.rows, self.candidates, device, seed)
        # steps of a quarter, so that many scores are equal and the lower index must win
        step_BM = torch.rand(parent_BM.shape, device=device, generator=generator(device, seed)).mul_(8).floor_().div_(4)
        score_BM = torch.zeros_like(step_BM)
        for i in range(1, self.candidates):
            score_BM[:, i] = score_BM.gather(1, parent_BM[:, i : i + 1])[:, 0] - step_BM[:, i]
        return {"parent": parent_BM, "score": score_BM}

    def run(self, given: Tensors) -> Tensors:
        return _fields(tree_op.build_tree(given["parent"], given["score"], self.nodes))

    def exact(self, wide: Tensors) -> dict[str, Any]:
        return _fields(tree_op.build_reference(wide["parent"], wide["score"], self.nodes))

    def moved(self, dtype: torch.dtype) -> int:
        """Parents and scores; five numbers per node, and its bits."""
        return self.rows * (12 * self.candidates + 8 * (5 + words_for(self.nodes)) * self.nodes)


@dataclass(frozen=True)
class GrowTree(Case):
    """A generation of `width` nodes with as many choices each; states of `hidden` numbers."""

    op: ClassVar = "grow_tree"
    twins: ClassVar = ("drafttrain.ops.build_tree.grow_reference", "drafttrain.ops.top.reference")
    dtypes: ClassVar = (torch.bfloat16,)  # states are copied as bytes
    rows: int
    width: int
    hidden: int

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Tensors:
        B, W, random = self.rows, self.width, generator(device, seed)
        # steps of a quarter, so that many scores are equal and the lower index must win
        score, gain = (torch.randint(0, 8, size, device=device, generator=random) / -4 for size in ((B, W), (B, W, W)))
        token, bits = (torch.randint(0, 2**31, (B, W, n), device=device, generator=random) for n in (W, 1))
        own = torch.ones(W, 1, dtype=torch.long, device=device) << torch.arange(W, device=device)[:, None] % 63
        state = torch.randn(B, W, self.hidden, device=device, generator=random).to(dtype)
        return {"score": score, "gain": gain, "token": token, "state": state, "bits": bits, "own": own}

    def run(self, given: Tensors) -> Tensors:
        return _fields(tree_op.grow_tree(*given.values()))

    def exact(self, wide: Tensors) -> dict[str, Any]:
        return _fields(tree_op.grow_reference(*wide.values()))

    def moved(self, dtype: torch.dtype) -> int:
        """Gains and tokens, and totals and tokens; the states of the parents, and of the nodes."""
        return self.rows * (24 * self.width**2 + 2 * self.width * self.hidden * dtype.itemsize)


def _fields(found: tree_op.Built | tree_op.Grown) -> Tensors:
    return {field.name: getattr(found, field.name) for field in fields(found)}


@dataclass(frozen=True)
class Heads(Case):
    """Parallel heads of one residual block each: batched products by cuBLAS, then `top`."""

    op: ClassVar = "residual_heads"
    twins: ClassVar = ("drafttrain.ops.top.reference",)
    modules: ClassVar = (heads_op.__name__,)  # type: ignore[assignment]
    rows: int
    heads: int
    width: int
    vocab: int
    ranks: int

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Tensors:
        draw, K, H = generator(device, seed), self.heads, self.width

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, generator=draw).to(dtype)

        output_KVH = torch.stack([random(self.vocab, H) for _ in range(K)])  # one at a time, because float32 copies are large
        return {"weight": random(K, H, H) / H**0.5, "bias": random(K, H), "output": output_KVH, "state": random(self.rows, H)}

    def run(self, given: Tensors) -> Tensors:
        stack = heads_op.ResidualHeads([(given["weight"], given["bias"])], given["output"])
        return {"index": stack.top(given["state"], self.heads, self.ranks)}

    def exact(self, wide: Tensors) -> dict[str, Any]:
        inner_KBH = torch.einsum("khi,bi->kbh", wide["weight"], wide["state"]) + wide["bias"][:, None]
        state_KBH = wide["state"] + inner_KBH * inner_KBH.sigmoid()
        logits_KBV = torch.einsum("kbh,kvh->kbv", state_KBH, wide["output"])
        return {"index": Ranks(logits_KBV.flatten(0, 1), 2e-2)}

    def moved(self, dtype: torch.dtype) -> int:
        """All weights once."""
        return dtype.itemsize * self.heads * self.width * (self.width + 1 + self.vocab)
