"""Floor 1: the backbone of block drafters, which draft a whole block in one pass (arXiv 2602.06036).

Shapes: B rows, T positions, A anchors of a row or staged positions, C of them at once, S slots of a block, h heads, D head
width, H hidden.

A block begins with the root, its anchor, behind which stand mask tokens. Every slot sees the whole block and, in every layer,
the context: the target's tapped states strictly before the anchor. With S = 4 and the root r behind the text `p q`:

    slot                   0     1     2     3
    token                  r     mask  mask  mask
    rotary position        2     3     4     5
    in_place predicts      -     3     4     5       3 drafts
    shifted predicts       3     4     5     6       4 drafts

What is made of the slots' states (a head, its loss, how drafts are chosen) is the family's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.batch import Anchors, Context, Pairs, TrainBatch
from drafttrain.drafter import Commit
from drafttrain.errors import UserError
from drafttrain.kv import KVCache
from drafttrain.layers import Attention, AttentionShape, GatedMLP, LayerOptions, RMSNorm, recomputed
from drafttrain.ops.blockwise import blockwise_attention
from drafttrain.ops.tree_attention import MOST_NODES
from drafttrain.span import Span
from drafttrain.staged import CachedDrafter, OwnCache, Staged
from drafttrain.target import Taps, Target, TargetShape

EVALUATED = 8192  # slots that go through a layer at once where no gradient is kept
CONVENTIONS = {"in_place": 1, "shifted": 0}  # name -> the slot of the first draft


@dataclass(frozen=True, slots=True)
class BlockShape:
    """size: slots of a block, the anchor's included. slots: which token a slot predicts, see above. anchors: blocks of a
    sequence in training at most. Raises UserError for what no block can be.
    """

    size: int
    layers: int
    taps: tuple[int, ...]
    mask_token: int
    slots: str = "in_place"
    anchors: int = 512
    layer: LayerOptions = field(default_factory=LayerOptions)

    def __post_init__(self) -> None:
        if self.slots not in CONVENTIONS:
            raise UserError(f"drafter.slots is {self.slots!r}; choose {' or '.join(CONVENTIONS)}")
        if not 2 <= self.size <= MOST_NODES:
            raise UserError(f"drafter.block_size is {self.size}; choose 2..{MOST_NODES}")
        if self.layers < 1 or self.anchors < 1 or not self.taps:
            raise UserError(
                f"drafter.layers is {self.layers}, drafter.anchors {self.anchors}, drafter.taps {list(self.taps)}; "
                "each needs at least one"
            )

    @property
    def first(self) -> int:
        """The slot of the first draft."""
        return CONVENTIONS[self.slots]

    @property
    def drafts(self) -> int:
        return self.size - self.first


class BlockLayer(nn.Module):
    """A decoder layer whose keys and values are those of the context and of the block, by one projection."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(AttentionShape.of(shape, width, qk_norm=True))
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(width, shape.intermediate_size)

    def rest(self, x_H: Tensor, attended_H: Tensor) -> Tensor:
        x_H = x_H + attended_H
        return x_H + self.mlp(self.post_attention_layernorm(x_H))

    def cached(self, x_BSH: Tensor, position_BS: Tensor, kv: KVCache, number: int) -> Tensor:
        """One block a row, behind the context that the cache holds."""
        B, S, _ = x_BSH.shape
        whole_BSS = torch.ones(B, S, S, dtype=torch.bool, device=x_BSH.device)
        return self.rest(x_BSH, self.self_attn.cached(self.input_layernorm(x_BSH), position_BS, kv, number, whole_BSS))

    def beside(
        self, x_BASH: Tensor, position_BAS: Tensor, context: tuple[Tensor, Tensor], seen: Context, span: Span | None = None
    ) -> Tensor:
        """Many blocks a row, each with its own part of one context, whose keys and values [B, h_kv, T, D] are given.

        seen: where the rows are held together (`span`), by the blocks of all processes.
        """
        B, A, S, _ = x_BASH.shape
        own = self.self_attn.qkv(self.input_layernorm(x_BASH).flatten(1, 2), position_BAS.flatten(1))
        if span is None:
            q_BhASD, k_BhASD, v_BhASD = (x.unflatten(2, (A, S)) for x in own)
            mixed_BhXD = blockwise_attention(q_BhASD, k_BhASD, v_BhASD, *context, seen).flatten(2, 3)
        else:
            q_BhASD, k_BhASD, v_BhASD = (span.heads(x).unflatten(2, (-1, S)) for x in own)
            all_keys, all_values = (span.gather(x) for x in context)
            mixed_BhASD = blockwise_attention(q_BhASD, k_BhASD, v_BhASD, all_keys, all_values, seen)
            mixed_BhXD = span.positions(mixed_BhASD.flatten(2, 3))
        return self.rest(x_BASH, self.self_attn.out(mixed_BhXD).unflatten(1, (A, S)))


class BlockDrafter(CachedDrafter):
    """fc, hidden_norm, layers and norm are named as in the official code. The embedding and the head are the target's."""

    def __init__(self, shape: BlockShape, target: Target) -> None:
        super().__init__()
        of = shape.layer.shape(target.shape)
        self.layer_shape = of
        self.shape, self.taps, self.draft_length = shape, Taps(shape.taps), shape.drafts
        self.taps.check(of.blocks)
        if not 0 <= shape.mask_token < of.vocab_size:
            raise UserError(f"drafter.mask_token is {shape.mask_token}; the target embeds 0..{of.vocab_size - 1}")
        if self.draft_length + 2 > of.max_positions:
            raise UserError(f"drafter.block_size is {shape.size}; the target has {of.max_positions} positions: lower it")
        self.fc = nn.Linear(len(shape.taps) * of.hidden_size, of.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(of.hidden_size, of.norm_eps)
        self.layers = nn.ModuleList(BlockLayer(of) for _ in range(shape.layers))
        self.norm = RMSNorm(of.hidden_size, of.norm_eps)
        self._target = [target]  # in a list: read, never trained or saved with the drafter

    def settled(self) -> dict[str, Any]:
        own = LayerOptions.between(self.layer_shape, self._target[0].shape)
        return {"taps": list(self.shape.taps), "mask_token": self.shape.mask_token, "layer": asdict(own)}

    def fed(self, length: int) -> int:
        return length + min(length, self.shape.anchors) * self.shape.size

    def head(self, state_H: Tensor) -> Tensor:
        """[..., V] logits by the target's own head, which works in the target's dtype."""
        target = self._target[0]
        return target.head(state_H.to(target.head_weight.dtype))

    def states(self, batch: TrainBatch, anchors: Anchors) -> Tensor:
        """[B, A, S, H] every slot's final state, for training and for expected acceptance."""
        context_BTH, sees = self._context(batch.hidden), batch.context(anchors)
        x_BASH, position_BAS = self._block(anchors.token_BA), self._positions(anchors.position_BA)
        whole = torch.is_grad_enabled() or batch.span is not None
        at_once = sees.last_BA.shape[1] if whole else max(1, EVALUATED // self.shape.size)
        for layer in self._layers():
            context = layer.self_attn.kv(context_BTH, batch.position_BT)
            parts = zip(x_BASH.split(at_once, 1), position_BAS.split(at_once, 1), sees.split(at_once), strict=True)
            done = [recomputed(self.recomputes, layer.beside, x, p, context, seen, batch.span) for x, p, seen in parts]
            x_BASH = torch.cat(done, 1)
        state_BASH: Tensor = self.norm(x_BASH)
        return state_BASH

    def steps(self, batch: TrainBatch, anchors: Anchors) -> Iterator[tuple[int, Tensor, Pairs]]:
        """(slot, place_M, pairs) of each draft in turn: the slot that makes it, for which anchors, and its labels."""
        for step in range(self.draft_length):
            yield self.shape.first + step, *batch.ahead(anchors, 2 + step)

    def open(self, slots: int, max_len: int) -> OwnCache:
        """The block lies behind the context, however few of its drafts become nodes."""
        kv = KVCache(self.shape.layers, slots, max_len + self.shape.size, self.fc.weight.device)
        return OwnCache(kv, Staged(slots, self.draft_length, kv.length_S.device))

    def consume(self, state: OwnCache, commit: Commit, slot_B: Tensor) -> None:
        """The context's keys and values of every layer, and nothing else: no layer changes the context."""
        kv = state.kv
        kv.rows(slot_B)
        column_A = torch.arange(commit.token_BA.shape[1], device=slot_B.device)
        context_BAH, position_BA = self._context(commit.hidden), kv.length_B[:, None] + column_A
        for number, layer in enumerate(self._layers()):
            kv.put(number, *layer.self_attn.kv(context_BAH, position_BA))
        kv.keep(column_A.expand_as(commit.token_BA), commit.count_B)

    def block(self, state: OwnCache, slot_B: Tensor) -> tuple[Tensor, Tensor]:
        """(root_B, state_BSH): consumes what is staged, then every slot's final state, behind which nothing is kept."""
        staged = self.staged(state, slot_B)
        self.consume(state, staged, slot_B)
        root_B = staged.next_BA.gather(1, (staged.count_B - 1).clamp_min(0)[:, None])[:, 0]
        x_BSH, position_BS = self._block(root_B), self._positions(state.kv.length_B)
        for number, layer in enumerate(self._layers()):
            x_BSH = layer.cached(x_BSH, position_BS, state.kv, number)
        return root_B, self.norm(x_BSH)

    def _context(self, hidden: dict[int, Tensor]) -> Tensor:
        tapped_X = torch.cat([hidden[b] for b in self.shape.taps], -1)
        context_H: Tensor = self.hidden_norm(self.fc(tapped_X.to(self.fc.weight.dtype)))
        return context_H

    def _block(self, root: Tensor) -> Tensor:
        """[..., S, H] embeddings of blocks with these roots [...]."""
        mask = torch.full_like(root, self.shape.mask_token)[..., None].expand(*root.shape, self.shape.size - 1)
        return self._target[0].embed(torch.cat([root[..., None], mask], -1)).to(self.fc.weight.dtype)

    def _positions(self, root: Tensor) -> Tensor:
        """[..., S] rotary positions of blocks whose roots stand there."""
        return root[..., None] + torch.arange(self.shape.size, device=root.device)

    def _layers(self) -> list[BlockLayer]:
        return list(self.layers)  # type: ignore[arg-type]


def spread_taps(blocks: int, count: int = 5) -> tuple[int, ...]:
    """The official choice: `count` blocks from the second to the third from the end, evenly; shallow targets give fewer.

    Of 36 blocks: 1, 9, 17, 25, 33.
    """
    first, last = min(1, blocks - 1), max(blocks - 3, 0)
    if count == 1 or last <= first:
        return (blocks // 2,)
    return tuple(sorted({round(first + i * (last - first) / (count - 1)) for i in range(count)}))
