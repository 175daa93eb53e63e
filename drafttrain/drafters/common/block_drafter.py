"""The backbone of block drafters, which draft a whole block in one pass (arXiv 2602.06036).

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

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.core.sequence_shard import Span
from drafttrain.core.tree import DraftTree
from drafttrain.drafters.common.block_options import BlockOptions, BlockShape
from drafttrain.drafters.common.dynamic_tree import Generation, Grower, Scored
from drafttrain.drafters.common.pending import CachedDrafter, OwnCache, Staged
from drafttrain.drafters.common.proposal import Proposal, Proposing
from drafttrain.model.batch import Anchors, Context, Pairs, Prediction, TrainBatch
from drafttrain.model.blockwise_attention import blockwise_attention
from drafttrain.model.convolution import Bare, Convolved
from drafttrain.model.drafter import Commit, draft_chain
from drafttrain.model.frozen_ref import FrozenRef
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.layers import DecoderLayer, LayerOptions, RMSNorm, recomputed
from drafttrain.model.target import Taps, Target, TargetShape

EVALUATED = 8192  # slots that go through a layer at once where no gradient is kept
STD = 0.02  # of matrices at the start, as the published modules' initializer_range
CHUNK = 1024  # logits in memory at once where D-PACE asks for the drafter's confidence


@dataclass
class BlockState(OwnCache):
    """grower: of the proposals."""

    grower: Grower


Choices = Callable[[int, Tensor], Tensor]  # (draft from 0, [B, W] tokens before it) -> [B, W or 1, V] its logits


class BlockLayer(DecoderLayer):
    """A decoder layer whose keys and values are those of the context and of the block, by one projection."""

    def __init__(self, shape: TargetShape, group: int | None) -> None:
        """group: of the convolutions around attention and MLP; None: there are none."""
        super().__init__(shape, qk_norm=True)
        parts = (Bare() if group is None else Convolved(shape.hidden_size, group) for _ in range(2))
        self.attention_conv, self.mlp_conv = parts

    def around(self, x_SH: Tensor, attention: Callable[[Tensor], Tensor]) -> Tensor:
        """[..., S, H]: the layer, of whatever attention."""
        x_SH = x_SH + self.attention_conv(self.input_layernorm(x_SH), attention)
        out_SH: Tensor = x_SH + self.mlp_conv(self.post_attention_layernorm(x_SH), self.mlp)
        return out_SH

    def cached(self, x_BSH: Tensor, position_BS: Tensor, kv: KVCache, number: int) -> Tensor:
        """One block a row, behind the context that the cache holds."""
        B, S, _ = x_BSH.shape
        whole_BSS = torch.ones(B, S, S, dtype=torch.bool, device=x_BSH.device)
        return self.around(x_BSH, lambda in_BSH: self.self_attn.cached(in_BSH, position_BS, kv, number, whole_BSS))

    def beside(
        self, x_BASH: Tensor, position_BAS: Tensor, context: tuple[Tensor, Tensor], seen: Context, span: Span | None = None
    ) -> Tensor:
        """Many blocks a row, each with its own part of one context, whose keys and values [B, h_kv, T, D] are given.

        seen: where the rows are held together (`span`), by the blocks of all processes.
        """
        return self.around(x_BASH, lambda in_BASH: self._attended(in_BASH, position_BAS, context, seen, span))

    def _attended(
        self, x_BASH: Tensor, position_BAS: Tensor, context: tuple[Tensor, Tensor], seen: Context, span: Span | None
    ) -> Tensor:
        B, A, S, _ = x_BASH.shape
        own = self.self_attn.qkv(x_BASH.flatten(1, 2), position_BAS.flatten(1))
        if span is None:
            q_BhASD, k_BhASD, v_BhASD = (x.unflatten(2, (A, S)) for x in own)
            mixed_BhXD = blockwise_attention(q_BhASD, k_BhASD, v_BhASD, *context, seen).flatten(2, 3)
        else:
            q_BhASD, k_BhASD, v_BhASD = (span.heads(x).unflatten(2, (-1, S)) for x in own)
            all_keys, all_values = (span.gather(x) for x in context)
            mixed_BhASD = blockwise_attention(q_BhASD, k_BhASD, v_BhASD, all_keys, all_values, seen)
            mixed_BhXD = span.positions(mixed_BhASD.flatten(2, 3))
        return self.self_attn.out(mixed_BhXD).unflatten(1, (A, S))


class BlockDrafter(CachedDrafter, Proposing):
    """fc, hidden_norm, layers and norm are named as in the official code. The embedding and the head are the target's.

    A family says how a draft is chosen: from a slot's state alone (`choices`), and what the token before it adds (`informed`).
    """

    def __init__(self, options: BlockOptions, target: Target, walks: bool = False, group: int | None = None) -> None:
        """walks: drafts depend on the one before, so that above temperature 0 a chain is drawn token by token. group: as
        `BlockLayer`'s."""
        super().__init__()
        self.shape = shape = BlockShape.of(options, target.shape)
        of = shape.layer.shape(target.shape)
        self.layer_shape = of
        self.taps, self.draft_length = Taps(shape.taps), shape.drafts
        self.proposal = Proposal(options, self.draft_length, target, independent=not walks)
        self.samples = walks and options.tree == "chain"
        self.decay, self.alpha = options.decay(self.draft_length), options.alpha if options.weights == "dpace" else None
        self.taps.check(of.blocks)
        if not 0 <= shape.mask_token < of.vocab_size:
            raise UserError(f"drafter.mask_token is {shape.mask_token}; the target embeds 0..{of.vocab_size - 1}")
        if self.draft_length + 2 > of.max_positions:
            raise UserError(f"drafter.block_size is {shape.size}; the target has {of.max_positions} positions: lower it")
        self.fc = nn.Linear(len(shape.taps) * of.hidden_size, of.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(of.hidden_size, of.norm_eps)
        self.layers = nn.ModuleList(BlockLayer(of, group) for _ in range(shape.layers))
        self.norm = RMSNorm(of.hidden_size, of.norm_eps)
        parts = [self.fc, *(part for layer in self._layers() for part in (layer.self_attn, layer.mlp))]
        for linear in (m for part in parts for m in part.modules() if isinstance(m, nn.Linear)):
            nn.init.normal_(linear.weight, std=STD)
        self._target = FrozenRef(target)

    def settled(self) -> dict[str, Any]:
        own = LayerOptions.between(self.layer_shape, self._target.module.shape)
        return {"taps": list(self.shape.taps), "mask_token": self.shape.mask_token, "layer": asdict(own)}

    def fed(self, length: int) -> int:
        return length + min(length, self.shape.anchors) * self.shape.size

    def informed(self, state_H: Tensor, before: Tensor) -> Tensor:
        """[..., X] what a draft is chosen from (`head`): its slot's state, and what the token before it tells."""
        return state_H

    def head(self, informed_X: Tensor) -> Tensor:
        """[..., V] logits of a draft."""
        return self.alone(informed_X)

    def alone(self, state_H: Tensor) -> Tensor:
        """[..., V] logits by the target's own head, which works in the target's dtype."""
        target = self._target.module
        return target.head(state_H.to(target.head_weight.dtype))

    @abstractmethod
    def choices(self, state_BKH: Tensor) -> Choices:
        """Of all slots that draft, whatever can be computed before the drafts above them are known."""

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """Draft i (from 0) predicts the token i + 2 after its source. In evaluation every source is an anchor.

        Where anchors were drawn, each stands for as many as there would be, so that the loss is that of all, in expectation.
        """
        anchors, token_P = batch.anchors(self.shape.anchors if self.training else None), batch.token_BT.flatten()
        state_BASH = self.states(batch, anchors)
        paced = None if self.alpha is None else self._paced(batch, anchors, state_BASH.detach(), self.alpha)
        for step, (slot, place_M, pairs) in enumerate(self.steps(batch, anchors)):
            before_M = token_P[batch.teacher_index(pairs.label_M)]
            informed_MX = self.informed(state_BASH[:, :, slot].flatten(0, 1)[place_M], before_M)
            weight = self.decay[step] if paced is None else paced[place_M, step]
            yield Prediction(step, pairs.source_M, pairs.label_M, informed_MX, self.head, weight / anchors.share)

    @torch.no_grad()
    def _paced(self, batch: TrainBatch, anchors: Anchors, state_BASH: Tensor, alpha: float) -> Tensor:
        """[B * A, K] D-PACE's weights (arXiv 2605.18810): draft j weighs what the expected accepted length owes to it.

        Sum over m >= j of the product over i <= m of (1 - alpha) q_i + alpha, q_i the probability of the true token.
        """
        token_P = batch.token_BT.flatten()
        confidence_PK = state_BASH.new_zeros(anchors.real_BA.numel(), self.draft_length, dtype=torch.float32)
        has_PK = torch.zeros_like(confidence_PK)
        for step, (slot, place_M, pairs) in enumerate(self.steps(batch, anchors)):
            state_MH, label_M = state_BASH[:, :, slot].flatten(0, 1)[place_M], token_P[pairs.label_M]
            informed_MX = self.informed(state_MH, token_P[batch.teacher_index(pairs.label_M)])
            for place, informed, label in zip(*(x.split(CHUNK) for x in (place_M, informed_MX, label_M)), strict=True):
                law = self.head(informed).float().softmax(-1)
                confidence_PK[place, step] = law.gather(1, label[:, None])[:, 0]
            has_PK[place_M, step] = 1.0
        reached_PK = ((1.0 - alpha) * confidence_PK + alpha).cumprod(1) * has_PK
        return reached_PK.flip(1).cumsum(1).flip(1)

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
            yield self.shape.first + step, *batch.future_of(anchors, 2 + step)

    def open(self, slots: int, max_len: int) -> BlockState:
        """The block lies behind the context, however few of its drafts become nodes."""
        kv = KVCache(self.shape.layers, slots, max_len + self.shape.size, self.fc.weight.device)
        device = kv.device
        return BlockState(kv, Staged(slots, self.draft_length, device), self.proposal.grower(device))

    def consume(self, state: OwnCache, commit: Commit, slot_B: Tensor) -> None:
        """The context's keys and values of every layer, and nothing else: no layer changes the context."""
        kv = state.kv
        kv.rows(slot_B)
        column_A = torch.arange(commit.token_BA.shape[1], device=slot_B.device)
        context_BAH, position_BA = self._context(commit.hidden), kv.length_B[:, None] + column_A
        for number, layer in enumerate(self._layers()):
            kv.append(number, *layer.self_attn.kv(context_BAH, position_BA))
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

    def propose(self, state: BlockState, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        root_B, state_BSH = self.block(state, slot_B)
        first, drafts = self.shape.first, min(self.draft_length, depth or self.draft_length)
        choices = self.choices(state_BSH[:, first : first + drafts])
        logits_B1V = choices(0, root_B[:, None])
        if self.samples:
            step = count(1)
            tree = draft_chain(
                root_B,
                logits_B1V[:, 0],
                lambda token_B: choices(next(step), token_B[:, None])[:, 0],
                drafts,
                sampling,
                state.kv.length_B,
            )
            return self.sure(tree, state_BSH[:, first : first + drafts])

        def scored(logits_BWV: Tensor) -> Scored:
            none_BW0 = state_BSH[:, :1, :0].expand(-1, logits_BWV.shape[1], -1)  # no node has a state of its own
            return Scored(logits_BWV, none_BW0)

        def feed(nodes: Generation) -> Scored:
            return scored(choices(nodes.depth, nodes.token_BW))

        return state.grower.grow(root_B, scored(logits_B1V), feed, None, depth)

    def sure(self, tree: DraftTree, state_BKH: Tensor) -> DraftTree:
        """A chain, with what the drafter knows of its worth."""
        return tree

    def _context(self, hidden: dict[int, Tensor]) -> Tensor:
        tapped_X = torch.cat([hidden[b] for b in self.shape.taps], -1)
        context_H: Tensor = self.hidden_norm(self.fc(tapped_X.to(self.fc.weight.dtype)))
        return context_H

    def _block(self, root: Tensor) -> Tensor:
        """[..., S, H] embeddings of blocks with these roots [...]."""
        mask = torch.full_like(root, self.shape.mask_token)[..., None].expand(*root.shape, self.shape.size - 1)
        return self._target.module.embed(torch.cat([root[..., None], mask], -1)).to(self.fc.weight.dtype)

    def _positions(self, root: Tensor) -> Tensor:
        """[..., S] rotary positions of blocks whose roots stand there."""
        return root[..., None] + torch.arange(self.shape.size, device=root.device)

    def _layers(self) -> list[BlockLayer]:
        return list(self.layers)  # type: ignore[arg-type]
