"""DFlash2: DFlash with short convolutions in its layers, and a selector that walks through each slot's likeliest tokens.

Shapes: B rows, S slots, K drafts, W nodes of a depth, C candidates, H hidden, R rank, V vocabulary.

The C likeliest tokens of slot t are its candidates. After the token a candidate b scores, with U the target's head on the
slot's state h_t:

    S(a, b) = U_t(b) + sum over R of A[a] * (P h_t) * B[b]

Other tokens are never drafted: the draft distribution has C tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from drafttrain.core.errors import UserError
from drafttrain.drafters import Family
from drafttrain.drafters.common.block_drafter import BlockDrafter, Walk, stateless
from drafttrain.drafters.options import DFlash2Options
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.drafter import Candidates, Commit
from drafttrain.model.target import Target
from drafttrain.ops.top import over_vocabulary, top

STD = 0.02  # of A and P at the start


class CandidateSelector(nn.Module):
    """Named as in the official code. B is zero at the start: the choice is then DFlash's own."""

    def __init__(self, width: int, vocab: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook, self.successor_codebook = nn.Embedding(vocab, rank), nn.Embedding(vocab, rank)
        self.hidden_projection = nn.Linear(width, rank, bias=False)
        nn.init.normal_(self.predecessor_codebook.weight, std=STD)
        nn.init.zeros_(self.successor_codebook.weight)
        nn.init.normal_(self.hidden_projection.weight, std=STD)

    def joint(self, state_H: Tensor, before: Tensor) -> Tensor:
        """[..., R] the product of the slot's and the previous token's codes."""
        joint_R: Tensor = self.predecessor_codebook(before) * self.hidden_projection(state_H)
        return joint_R

    def scores(self, best_C: Tensor, token_C: Tensor, joint_R: Tensor) -> Tensor:
        """[..., C] of candidates whose logits from the slot's state alone are best_C."""
        return best_C + torch.einsum("...cr,...r->...c", self.successor_codebook(token_C), joint_R).to(best_C.dtype)


class DFlash2(BlockDrafter):
    def __init__(self, options: DFlash2Options, target: Target) -> None:
        super().__init__(options, target, walks=True, group=options.group)
        width, vocab = target.shape.hidden_size, target.shape.vocab_size
        if options.candidates > vocab:
            raise UserError(f"drafter.candidates is {options.candidates}; the target has {vocab} tokens, set fewer")
        self.width = width
        self.offered = options.candidates
        self.candidate_selector = CandidateSelector(width, vocab, options.rank)

    def head_input(self, state_H: Tensor, before: Tensor) -> Tensor:
        return torch.cat([state_H, self.candidate_selector.joint(state_H, before)], -1)

    def head(self, input_X: Tensor) -> Tensor:
        """Minus infinity for all but the candidates."""
        slot_V = self.slot_logits(input_X[..., : self.width])
        best_C, token_C = slot_V.topk(self.offered, -1)
        score_C = self.candidate_selector.scores(best_C, token_C, input_X[..., self.width :])
        return over_vocabulary(score_C, token_C, slot_V.shape[-1])

    def walk(self, state_BSH: Tensor, drafts: int, pending: Commit) -> Walk:
        """What does not depend on the token before is computed once for all slots."""
        state_BKH, selector = self.drafting(state_BSH, drafts), self.candidate_selector
        slot_BKV = self.slot_logits(state_BKH)
        likeliest_MC = top(slot_BKV.flatten(0, 1), self.offered)[1]
        token_BKC = likeliest_MC.sort(-1).values.unflatten(0, slot_BKV.shape[:2])
        best_BKC, code_BKCR = slot_BKV.gather(-1, token_BKC), selector.successor_codebook(token_BKC)
        projected_BKR = selector.hidden_projection(state_BKH)

        def choose(draft: int, before_BW: Tensor) -> Tensor:
            joint_BWR = selector.predecessor_codebook(before_BW) * projected_BKR[:, draft, None]
            return best_BKC[:, draft, None] + (joint_BWR @ code_BKCR[:, draft].transpose(1, 2)).to(best_BKC.dtype)

        return Walk(stateless(choose), Candidates(token_BKC, slot_BKV.shape[-1]))

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """Each slot's own logits, which make the candidates (not counted); then the choice among them, which is drafted."""
        for prediction in super().predict(batch):
            state_MH = prediction.hidden_MH[:, : self.width]
            yield replace(prediction, hidden_MH=state_MH, head=self.slot_logits, counted=False)
            yield replace(prediction, offers=self.offered)


FAMILY = Family("dflash2", DFlash2Options, DFlash2)
