"""XPress: DFlash's slots, refined by a small network that mixes each slot with the slots before it (arXiv 2608.02438).

Shapes: B rows, A anchors, P = B A blocks, N of them at once, S slots, J slots given, K drafts, W nodes of a depth, M
predictions, H hidden, R rank, V vocabulary.

Slot k has the state h_k and the token t_k of the slot before it; g is the mean of all slots' states. With L_c lower triangular,
its diagonal included, for each channel c:

    a_k      = in_proj([down_h h_k; down_g g; W1[t_k]])
    x_k[c]   = a_k[c] + sum over j <= k of L_c[k, j] a_j[c]
    x_k      = x_k + MLP(x_k)
    logits_k = target's head(h_k) + W2 x_k

vLLM drafts greedily by Jacobi passes: it fills the slots with the choices of the states alone, then computes all logits from
the tokens of the pass before. Slot k reads the tokens of earlier slots alone, so after pass k its token is final, and after
S - 1 passes nothing changes. Here slots are computed from left to right, which gives the same tokens (`walk`). A node's state
is a_0 to a_k of its ancestors and itself, so trees and sampled chains are possible too.

Slot 0 holds the anchor and drafts nothing, but later slots read a_0. Its t_0 is the anchor's token, as in vLLM.

Training also begins with Jacobi passes: some blocks at a time, whose slots' own logits serve all kinds of predictions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.core.errors import UserError
from drafttrain.drafters import Family
from drafttrain.drafters.common.block_drafter import BlockDrafter, Inputs, Walk
from drafttrain.drafters.common.dynamic_tree import Scored, TreeLevel
from drafttrain.drafters.options import XPressOptions
from drafttrain.model.batch import Anchors, Pairs, Prediction, Shared, TrainBatch
from drafttrain.model.drafter import Commit
from drafttrain.model.layers import GatedMLP, Linear
from drafttrain.model.target import Target

STD = 0.02  # of all matrices at the start but L, which is 0


class SlotMixer(nn.Module):
    """L: a matrix over slots for each channel, of which only the lower triangle is used."""

    def __init__(self, rank: int, slots: int) -> None:
        super().__init__()
        self.L = nn.Parameter(torch.zeros(rank, slots, slots))

    def forward(self, a_JR: Tensor, first: int = 0) -> Tensor:
        """[..., J - first, R] the mixed slots from `first` on. a_JR: slots 0 to J - 1."""
        slots = a_JR.shape[-2]
        lower_RSS = self.L if first + 1 == slots else self.L.tril()  # the last slot sees all
        mixed_KR = torch.einsum("...jr,rkj->...kr", a_JR, lower_RSS[:, first:slots, :slots])
        out_KR: Tensor = a_JR[..., first:, :] + mixed_KR
        return out_KR


class Refiner(nn.Module):
    """The parts are named as in vLLM."""

    def __init__(self, width: int, vocab: int, slots: int, rank: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Embedding(vocab, rank)
        self.down_h, self.down_g = Linear(width, rank, bias=False), Linear(width, rank, bias=False)
        self.in_proj = Linear(3 * rank, rank, bias=False)
        self.mix, self.mlp = SlotMixer(rank, slots), GatedMLP(rank, inner)
        self.w2 = Linear(rank, vocab, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=STD)

    def slots(self, state_SH: Tensor) -> Tensor:
        """[..., S, 2 R] what the refiner reads of each slot's state and of the block. state_SH: of all slots."""
        state_SR, block_1R = self.down_h(state_SH), self.down_g(state_SH.mean(-2, keepdim=True))
        return torch.cat([state_SR, block_1R.expand_as(state_SR)], -1)

    def read(self, slot_KX: Tensor, before_K: Tensor) -> Tensor:
        """[..., K, R] the inputs a of the mixer. slot_KX: of some slots, by `slots`. before_K: the tokens before them."""
        a_KR: Tensor = self.in_proj(torch.cat([slot_KX, self.w1(before_K)], -1))
        return a_KR

    def refined(self, a_JR: Tensor, first: int = 0) -> Tensor:
        """[..., J - first, R] the refined states x of the slots from `first` on. a_JR: of slots 0 to J - 1."""
        mixed_KR = self.mix(a_JR, first)
        x_KR: Tensor = mixed_KR + self.mlp(mixed_KR)
        return x_KR


class XPress(BlockDrafter):
    """xpress_head is named as in vLLM."""

    def __init__(self, options: XPressOptions, target: Target) -> None:
        super().__init__(options, target, walks=True)
        rank, inner = options.rank, 2 * options.rank if options.mlp_hidden is None else options.mlp_hidden
        if options.slots != "in_place":
            raise UserError(f"drafter.slots is {options.slots!r}, but slot 0 of this family drafts nothing; set it to in_place")
        self.width, self.rank, self.mlp_hidden = target.shape.hidden_size, rank, inner
        self.free_passes = options.free_passes if options.free_weight else 0
        self.free_share, self.base_weight = options.free_weight / max(1, self.free_passes), options.base_weight
        self.xpress_head = Refiner(self.width, target.shape.vocab_size, self.shape.size, rank, inner)

    def resolved_options(self) -> dict[str, Any]:
        return super().resolved_options() | {"mlp_hidden": self.mlp_hidden}

    def head(self, input_X: Tensor) -> Tensor:
        """The input may end in columns that the head does not read."""
        return self._refined_logits(self.slot_logits(input_X[..., : self.width]), input_X[..., self.width :][..., : self.rank])

    def _refined_logits(self, slot_V: Tensor, x_R: Tensor) -> Tensor:
        refined_V: Tensor = self.xpress_head.w2(x_R)
        return refined_V.to(slot_V.dtype).add_(slot_V)  # in place: in training these are the largest tensors

    def tokens_before(self, batch: TrainBatch, anchors: Anchors) -> Tensor:
        """[P, S] the true tokens before the slots."""
        tokens = [batch.after(max(1, slot)).gather(1, anchors.source_BA).flatten() for slot in range(self.shape.size)]
        return torch.stack(tokens, 1)

    def head_inputs(self, batch: TrainBatch, anchors: Anchors, state_BASH: Tensor) -> Inputs:
        """The slot's state and its refined state."""
        state_PSH, refiner = state_BASH.flatten(0, 1), self.xpress_head
        x_PSR = refiner.refined(refiner.read(refiner.slots(state_PSH), self.tokens_before(batch, anchors)))

        def of(draft: int, index_M: Tensor, pairs: Pairs) -> Tensor:
            return torch.cat([column[:, self.shape.first + draft][index_M] for column in (state_PSH, x_PSR)], -1)

        return of

    def kinds(self, state_NSH: Tensor, before_NS: Tensor) -> list[Tensor]:
        """[N, K, V] each, all kinds of logits of these blocks' drafts: refined after the true tokens `before_NS`; the slots'
        own, where they have a loss; refined after the drafts of the pass before, `free_passes` times.

        The first of these passes reads the choices of the slots' own logits.
        """
        refiner, first = self.xpress_head, self.shape.first
        slot_NKV = self.slot_logits(state_NSH[:, first:].flatten(0, 1)).unflatten(0, (len(state_NSH), self.draft_length))
        slot_NSX, previous_tokens = refiner.slots(state_NSH), [before_NS]

        def refined(before_NS: Tensor) -> Tensor:
            """[..., N, K, V] the logits after these tokens, [..., N, S]."""
            input_NSR = refiner.read(slot_NSX.expand(*before_NS.shape, -1), before_NS)
            return self._refined_logits(slot_NKV, refiner.refined(input_NSR, first))

        with torch.no_grad():
            for pass_index in range(self.free_passes):
                last_NKV = refined(previous_tokens[-1]) if pass_index else slot_NKV
                previous_tokens.append(torch.cat([before_NS[:, : first + 1], last_NKV.argmax(-1)[:, :-1]], 1))
        after_true, *after_drafts = refined(torch.stack(previous_tokens))
        return [after_true, *([slot_NKV] if self.base_weight else []), *after_drafts]

    def predictions(self, batch: TrainBatch, anchors: Anchors, state_BASH: Tensor) -> Iterator[Prediction]:
        """In training, not counted, also the slots' own logits, and those refined from the refiner's own drafts."""
        shares = [*([self.base_weight] if self.base_weight else []), *[self.free_share] * self.free_passes]
        if not self.training or not shares:
            yield from super().predictions(batch, anchors, state_BASH)
            return
        previous_token_PS, state_PSH, paced = self.tokens_before(batch, anchors), state_BASH.flatten(0, 1), None
        if self.alpha is not None:
            with torch.no_grad():
                paced = self._paced(batch, anchors, self.head_inputs(batch, anchors, state_BASH), self.alpha)

        def head(state_NSH: Tensor, rows: slice | Tensor) -> list[Tensor]:
            return self.kinds(state_NSH, previous_token_PS[rows])

        for step, (index_M, pairs) in enumerate(self.steps(batch, anchors)):
            weight = (self.decay[step] if paced is None else paced[index_M, step]) / anchors.share
            for logits_kind, share in enumerate([1.0, *shares]):
                shared = Shared(head, logits_kind, step, index_M)
                prediction_args = step, pairs.source_M, pairs.label_M, state_PSH, shared.logits, share * weight
                yield Prediction(*prediction_args, counted=not logits_kind, shared=shared)

    def walk(self, state_BSH: Tensor, drafts: int, pending: Commit) -> Walk:
        """A node's state is a_0 to a_k of its own slot k and of its ancestors' slots, [B, W, (k + 1) R]."""
        refiner, rank = self.xpress_head, self.rank
        slot_BKV, slot_BSX = self.slot_logits(self.drafting(state_BSH, drafts)), refiner.slots(state_BSH)

        def score(nodes: TreeLevel) -> Scored:
            slot, past = self.shape.first + nodes.depth, nodes.state_BWH.shape[-1] // rank
            (B, W), N = nodes.token_BW.shape, slot + 1 - past  # below the root two slots: its own, and that of its children
            slot_BWNX = slot_BSX[:, None, past : slot + 1].expand(B, W, -1, -1)
            a_BWNR = refiner.read(slot_BWNX, nodes.token_BW[..., None].expand(B, W, N))
            a_BWJR = torch.cat([nodes.state_BWH.reshape(B, W, past, rank), a_BWNR], 2)
            x_BWR = refiner.refined(a_BWJR, first=slot)[:, :, 0]
            return Scored(self._refined_logits(slot_BKV[:, nodes.depth, None], x_BWR), a_BWJR.flatten(2))

        return Walk(score)


FAMILY = Family("xpress", XPressOptions, XPress)
