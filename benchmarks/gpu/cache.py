"""Operators on the paged KV cache: append, tree attention, compaction.

Shapes: B rows, N nodes, P positions, h query heads, k KV heads, g query heads per KV head, D head width, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.gpu.case import Case, Tensors, generator, paged, ragged, random_parents
from drafttrain.core.tree import ancestors
from drafttrain.model.kv_storage import ARRIVALS, PAGE
from drafttrain.ops import kv_cache as cache_op
from drafttrain.ops import tree_attention as attention_op
from drafttrain.ops.tree_bits import ancestors_of, bits_of

EPS = 1e-6
FARTHEST = 64  # rotary positions beyond the longest prefix


@dataclass(frozen=True)
class Append(Case):
    op: ClassVar = "append"
    twins: ClassVar = ("drafttrain.ops.kv_cache.append_reference",)
    rows: int
    nodes: int
    heads: int
    kv_heads: int
    width: int
    context: int = 100
    normed: bool = False
    earlier: int | None = None  # nodes of the tree that are in the cache already; None: none

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Tensors:
        draw, D = generator(device, seed), self.width
        pages, table_BQ = paged(self.rows, self.context + (self.earlier or 0) + self.nodes, PAGE, device, seed)
        angle = torch.arange(self.context + FARTHEST, device=device)[:, None] * 1e4 ** -(
            torch.arange(0, D, 2, device=device) / D
        )
        length_B = ragged(self.rows, self.context, device, seed)
        given = {
            "qkv": torch.randn(self.rows, self.nodes, (self.heads + 2 * self.kv_heads) * D, device=device, generator=draw),
            "cos": torch.cat([angle.cos()] * 2, -1),
            "sin": torch.cat([-angle.sin(), angle.sin()], -1),
            "q_weight": torch.randn(D, device=device, generator=draw),
            "k_weight": torch.randn(D, device=device, generator=draw),
            "keys": torch.randn(pages, PAGE, self.kv_heads, D, device=device, generator=draw),
            "values": torch.randn(pages, PAGE, self.kv_heads, D, device=device, generator=draw),
        }
        depth_BN = torch.randint(0, FARTHEST, (self.rows, self.nodes), device=device, generator=draw)
        whole = {"table": table_BQ, "length": length_B, "position": length_B[:, None] + depth_BN}
        return {name: x.to(dtype) for name, x in given.items()} | whole

    def run(self, given: Tensors) -> Tensors:
        q_weight, k_weight = (given["q_weight"], given["k_weight"]) if self.normed else (None, None)
        at = (given["position"], given["table"], given["length"], given["keys"], given["values"])
        query = cache_op.append(
            given["qkv"], given["cos"], given["sin"], q_weight, k_weight, EPS, *at, self.heads, self.earlier or 0
        )
        return ({"query": query} if self.heads else {}) | {"keys": given["keys"], "values": given["values"]}

    def exact(self, wide: Tensors) -> dict[str, Any]:
        B, N, D = self.rows, self.nodes, self.width
        q, k, v = wide["qkv"].view(B, N, -1, D).split([self.heads, self.kv_heads, self.kv_heads], 2)
        cos, sin = (wide[name][wide["position"]][:, :, None] for name in ("cos", "sin"))

        def turned(x: Tensor, weight: Tensor) -> Tensor:
            if self.normed:
                x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight
            return x * cos + torch.cat([x[..., D // 2 :], x[..., : D // 2]], -1) * sin

        at = wide["length"][:, None] + (self.earlier or 0) + torch.arange(N, device=q.device)
        page, place = wide["table"].gather(1, at // PAGE), at % PAGE
        wide["keys"][page, place], wide["values"][page, place] = turned(k, wide["k_weight"]), v
        query = {"query": turned(q, wide["q_weight"])} if self.heads else {}
        return query | {"keys": wide["keys"], "values": wide["values"]}

    def moved(self, dtype: torch.dtype) -> int:
        """The projection, read and written once, and a cosine and a sine for each node."""
        return dtype.itemsize * self.rows * self.nodes * self.width * (2 * (self.heads + 2 * self.kv_heads) + 2)


@dataclass(frozen=True)
class TreeAttention(Case):
    op: ClassVar = "tree_attention"
    twins: ClassVar = ("drafttrain.ops.tree_attention.reference",)
    rows: int
    nodes: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    window: int | None = None
    uneven: bool = False  # rows of all lengths up to the context
    earlier: int | None = None  # of the nodes, the first ones: they have keys and values alone; None: none
    cap: float | None = None  # of the scores
    sinks: bool = False  # scores that share the softmax
    rest: int | None = None  # numbers of a key after the first `width` ones, which are its value; None: values are apart

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Tensors:
        draw, pages_for = generator(device, seed), self.context + self.nodes
        pages, table_BQ = paged(self.rows, pages_for, PAGE, device, seed)
        length_B = torch.full((self.rows,), self.context, device=device)
        if self.uneven:
            length_B = ragged(self.rows, self.context, device, seed)
        ancestor_BNN = ancestors(random_parents(self.rows, self.nodes, device, seed))
        width = self.width + (self.rest or 0)
        keys, values = torch.randn(2, pages, PAGE, self.kv_heads, width, device=device, generator=draw, dtype=dtype)
        q_BNhD = torch.randn(self.rows, self.queries, self.heads, width, device=device, generator=draw)
        return {
            "q": q_BNhD if self.rest else q_BNhD.to(dtype),
            "keys": keys,
            **({} if self.rest else {"values": values}),
            "table": table_BQ,
            "length": length_B,
            "bits": bits_of(ancestor_BNN)[:, self.earlier or 0 :],
            "position": (length_B[:, None] + ancestor_BNN.sum(-1) - 1)[:, self.earlier or 0 :],
            "arrived": torch.zeros(ARRIVALS, dtype=torch.int32, device=device),
        } | ({"sinks": (4 * torch.randn(self.heads, device=device, generator=draw)).to(dtype)} if self.sinks else {})

    @property
    def queries(self) -> int:
        return self.nodes - (self.earlier or 0)

    def run(self, given: Tensors) -> Tensors:
        keys = given["keys"]
        cache = (keys, keys[..., : self.width] if self.rest else given["values"], given["table"], given["length"])
        tree, bound = (given["bits"], given["position"]), self.context + self.nodes
        more = (self.scale, self.window, bound, self.earlier or 0, given["arrived"], self.cap, given.get("sinks"))
        return {"out": attention_op.tree_attention(given["q"], *cache, *tree, *more).to(keys.dtype)}

    @property
    def scale(self) -> float:
        return (self.width + (self.rest or 0)) ** -0.5

    def exact(self, wide: Tensors) -> dict[str, Any]:
        return {"out": torch.stack([self._row(wide, row) for row in range(self.rows)])}

    def _row(self, wide: Tensors, row: int) -> Tensor:
        """[queries, h D]: one row's attention by its definition."""
        N, length, groups = self.nodes, int(wide["length"][row]), self.heads // self.kv_heads
        pools = (wide["keys"], wide["keys"][..., : self.width] if self.rest else wide["values"])
        keys, values = (pool[wide["table"][row]].flatten(0, 1)[: length + N] for pool in pools)
        position_N = wide["position"][row]
        node_NN = ancestors_of(wide["bits"][row], N)
        seen_NP = torch.cat([torch.ones_like(node_NN[:, :1]).expand(-1, length), node_NN], 1)
        if self.window is not None:  # there are no earlier nodes then
            place_P = torch.cat([torch.arange(length, device=position_N.device), position_N])
            seen_NP = seen_NP & (position_N[:, None] - place_P < self.window)
        keys, values = (x.repeat_interleave(groups, 1).transpose(0, 1) for x in (keys, values))
        score_hNP = wide["q"][row].transpose(0, 1) @ keys.transpose(1, 2) * self.scale
        if self.cap is not None:
            score_hNP = self.cap * torch.tanh(score_hNP / self.cap)
        score_hNP = score_hNP.masked_fill(~seen_NP, -torch.inf)
        if self.sinks:
            score_hNP = torch.cat([score_hNP, wide["sinks"][:, None, None].expand(-1, len(position_N), 1)], -1)
        weight_hNP = score_hNP.softmax(-1)[..., : length + N]
        return (weight_hNP @ values).transpose(0, 1).flatten(1)

    def operations(self) -> float:
        """Of scores and weighted values, over all keys within the window."""
        keys = self.context + self.nodes if self.window is None else min(self.context, self.window) + self.nodes
        return 2.0 * self.rows * self.queries * self.heads * (2 * self.width + (self.rest or 0)) * keys

    def moved(self, dtype: torch.dtype) -> int:
        """Keys and values that some node sees, the queries, the output."""
        seen = min(self.context, self.window or self.context) + self.nodes
        rest, both = self.rest or 0, 2 * self.width
        key_and_value = both if self.rest is None else self.width + rest
        per_row = seen * self.kv_heads * key_and_value + self.queries * self.heads * (both + rest)
        return dtype.itemsize * self.rows * per_row


@dataclass(frozen=True)
class KvKeep(Case):
    op: ClassVar = "kv_keep"
    twins: ClassVar = ("drafttrain.ops.kv_cache.keep_reference",)
    rows: int
    layers: int
    context: int
    nodes: int
    accepted: int
    kv_heads: int = 8
    width: int = 128
    uneven: bool = False  # rows that accept any number of drafts, zero too

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> Tensors:
        draw = generator(device, seed)
        pages, table_BQ = paged(self.rows, self.context + self.nodes, PAGE, device, seed)
        shape = (self.layers, 2, pages, PAGE, self.kv_heads, self.width)
        count_B = torch.full((self.rows,), self.accepted, device=device)
        if self.uneven:
            count_B = torch.randint(0, self.accepted + 1, (self.rows,), device=device, generator=draw)
        drafts_BN = torch.rand(self.rows, self.nodes - 1, device=device, generator=draw).argsort(-1) + 1
        path_BA = torch.cat([torch.zeros_like(table_BQ[:, :1]), drafts_BN[:, : self.accepted - 1].sort(-1).values], 1)
        place_A = torch.arange(self.accepted, device=device)
        # the walk writes zeros after the accepted nodes
        path_BN = torch.zeros(self.rows, self.nodes, dtype=torch.long, device=device)
        path_BN[:, : self.accepted] = torch.where(place_A < count_B[:, None], path_BA, 0)
        length_B = ragged(self.rows, self.context, device, seed)
        store = torch.randn(*shape, device=device, generator=draw, dtype=dtype)
        return {"store": store, "table": table_BQ, "length": length_B, "path": path_BN, "count": count_B}

    def run(self, given: Tensors) -> Tensors:
        cache_op.kv_keep(given["store"], given["table"], given["length"], given["path"], given["count"])
        return {"store": given["store"]}

    def exact(self, wide: Tensors) -> dict[str, Any]:
        store = wide["store"]
        for row in range(self.rows):
            length, count = int(wide["length"][row]), int(wide["count"][row])
            source, target = length + wide["path"][row, :count], length + torch.arange(count, device=store.device)
            pages = wide["table"][row]
            store[:, :, pages[target // PAGE], target % PAGE] = store[:, :, pages[source // PAGE], source % PAGE].clone()
        return {"store": store}

    def moved(self, dtype: torch.dtype) -> int:
        """Keys and values of the accepted drafts in all layers, read and written. The root is already in its place."""
        return dtype.itemsize * self.rows * (self.accepted - 1) * self.layers * 2 * self.kv_heads * self.width * 2
