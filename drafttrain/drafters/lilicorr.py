"""LiLiCorr: DFlash, whose likeliest tokens are scored together by a small bidirectional network (arXiv 2608.20530).

Shapes: B rows, A anchors, N = B A blocks, S slots, K drafts, C candidates, W nodes of a depth, M predictions, R rows at once,
P = B T flat positions, U of them, k stored tokens, H hidden, V vocabulary.

The C likeliest tokens of each slot are its candidates. One pass of the network (`common/lattice.py`) gives every pair of
neighbouring candidates a score. A draft is chosen by the scores after the draft above it; the first, by those after the root.
Other tokens are never drafted: the draft distribution has C tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.core.errors import UserError
from drafttrain.core.sequence_shard import pieces
from drafttrain.drafters import Family
from drafttrain.drafters.common.block_drafter import CHUNK, EVALUATED, BlockDrafter, Walk, stateless
from drafttrain.drafters.common.lattice import Lattice, LatticeNetwork, LatticeShape
from drafttrain.drafters.options import LiLiCorrOptions
from drafttrain.model.batch import Anchors, Prediction, Top, TrainBatch
from drafttrain.model.drafter import Candidates, Commit
from drafttrain.model.layers import recomputed
from drafttrain.model.target import FINAL, Target
from drafttrain.ops.remap import over_vocabulary
from drafttrain.ops.top import top

MAX_LOGITS = 1 << 27  # in memory at once
LEAST = -30.0  # log-probability of a token about which nothing is stored, at least


class LiLiCorr(BlockDrafter):
    """lilicorr is named as in the official code."""

    def __init__(self, options: LiLiCorrOptions, target: Target) -> None:
        check(options, target)
        super().__init__(options, target, walks=True)
        shape = LatticeShape(
            options.block_size,
            options.candidates,
            target.shape.hidden_size,
            options.hidden_size,
            options.factor_dim,
            options.corrector_layers,
            options.heads,
            options.mlp_ratio,
            options.logit_scale,
            options.vector_eps,
            self.norm.eps,
        )
        self.vocab, self.offered = target.shape.vocab_size, options.candidates
        self.weights = options.ce_weight, options.penalty_weight, options.divergence_weight
        self.lilicorr = LatticeNetwork(shape)

    def lattice(self, state_NKH: Tensor, context_NH: Tensor) -> Lattice:
        """The candidates of whole blocks and their scores. context_NH: of the last position before each block."""
        single_pass, outputs = torch.is_grad_enabled() and not self.recomputes, []
        at_once = max(1, len(state_NKH) if single_pass else EVALUATED // self.shape.size)
        for chunk in pieces(self, len(state_NKH), at_once, state_NKH.device):
            state_RKH, context_RH = state_NKH[chunk], context_NH[chunk]
            log_q_RKC, token_RKC = self.best(state_RKH)
            embedded_RKCH = self._target.module.embed(token_RKC).detach().to(state_RKH.dtype)
            scores = recomputed(self.recomputes, self.lilicorr, embedded_RKCH, log_q_RKC, state_RKH, context_RH)
            outputs.append((token_RKC, *scores))
        return Lattice(*(torch.cat(x) for x in zip(*outputs, strict=True)))

    def best(self, state_NKH: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probability, token), [N, K, C] each, of the likeliest tokens by the slots' states alone.

        The probabilities are those of the whole vocabulary, and have gradients.
        """
        state_MH, rows = state_NKH.flatten(0, 1), rows_at_once(self.vocab)
        outputs = [recomputed(True, self._best, state_RH) for state_RH in state_MH.split(rows)]
        log_q_NKC, token_NKC = (torch.cat(x).unflatten(0, state_NKH.shape[:2]) for x in zip(*outputs, strict=True))
        return log_q_NKC, token_NKC

    def _best(self, state_RH: Tensor) -> tuple[Tensor, Tensor]:
        logits_RV = self.slot_logits(state_RH)
        token_RC = top(logits_RV.detach(), self.offered)[1]
        return logits_RV.gather(1, token_RC).float() - logits_RV.float().logsumexp(-1, keepdim=True), token_RC

    def walk(self, state_BSH: Tensor, drafts: int, pending: Commit) -> Walk:
        """All slots are scored, however few of them draft: candidates see each other."""
        context_BH = self.context(pending.hidden_at(pending.last_B1))[:, 0]
        token_BKC, lattice = self.lattice(self.drafting(state_BSH, self.draft_length), context_BH).ascending()
        return Walk(stateless(lattice.scores), Candidates(token_BKC, self.vocab))

    def choice(self, input_X: Tensor) -> Tensor:
        """[..., V] logits of drafts. input_X: the candidates' scores, then their tokens."""
        score_C, token_C = input_X.chunk(2, -1)
        return over_vocabulary(score_C, token_C.long(), self.vocab)

    def predictions(self, batch: TrainBatch, anchors: Anchors, state_BASH: Tensor) -> Iterator[Prediction]:
        """Each slot's own logits, which make the candidates (not counted); then the choice among them, which is drafted.

        The first step brings the loss of the lattice.
        """
        hidden = {key: batch.hidden[key].gather(1, columns(anchors, batch.hidden[key])) for key in self.taps.keys}
        state_NKH = self.drafting(state_BASH.flatten(0, 1), self.draft_length)
        lattice = self.lattice(state_NKH, self.context(hidden).flatten(0, 1))
        previous_token_NK = torch.stack(
            [batch.after(1 + j).gather(1, anchors.source_BA).flatten() for j in range(self.draft_length)], 1
        )
        score_NKC = torch.cat([lattice.scores(j, previous_token_NK[:, j, None]) for j in range(self.draft_length)], 1)
        aux = self.lattice_loss(batch, self.labels(batch, anchors), lattice, score_NKC) / (self.draft_length * anchors.share)
        slots = super().predictions(batch, anchors, state_BASH)
        for slot_prediction, (index_M, _) in zip(slots, self.steps(batch, anchors), strict=True):
            step, weight = slot_prediction.step, self.weights[2] * slot_prediction.weight
            yield replace(slot_prediction, counted=False)
            input_MX = torch.cat([score_NKC[index_M, step], lattice.token_NKC[index_M, step].float()], -1)
            lattice_aux = aux if step == 0 else None
            yield replace(
                slot_prediction, hidden_MH=input_MX, head=self.choice, weight=weight, aux=lattice_aux, offers=self.offered
            )

    def labels(self, batch: TrainBatch, anchors: Anchors) -> Tensor:
        """[N, K] flat position of each draft's label; -1 for a draft without one."""
        label_NK = torch.full((anchors.real_BA.numel(), self.draft_length), -1, device=batch.token_BT.device)
        for step, (index_M, pairs) in enumerate(self.steps(batch, anchors)):
            label_NK[index_M, step] = pairs.label_M
        return label_NK

    def lattice_loss(self, batch: TrainBatch, label_NK: Tensor, lattice: Lattice, score_NKC: Tensor) -> Tensor:
        """The weighted losses of the scores, summed over the slots that they are for.

        These are, of blocks whose drafts all have labels, the slots up to the first whose true token is no candidate.
        score_NKC: of the candidates, after the true tokens above.
        """
        true_NK = batch.token_BT.flatten()[label_NK]
        match_NKC = lattice.token_NKC == true_NK[..., None]
        complete_N1, covered_NK = (label_NK >= 0).all(1, keepdim=True), match_NKC.any(-1)
        learnt_NK = complete_N1 & covered_NK.int().cumprod(1).bool()
        score_MC, index_M1 = score_NKC[learnt_NK], match_NKC[learnt_NK].int().argmax(-1)[:, None]
        log_choice_MC = score_MC.log_softmax(-1)
        ce_weight, penalty_weight, _ = self.weights
        loss = -ce_weight * log_choice_MC.gather(1, index_M1).sum()
        if penalty_weight:
            logits_MC = self.target_logits(batch, batch.teacher_index(label_NK[learnt_NK]), lattice.token_NKC[learnt_NK])
            margin_MC = F.relu(logits_MC.gather(1, index_M1) - logits_MC)
            loss = loss + penalty_weight * (log_choice_MC.exp() * margin_MC).sum()
        return loss

    @torch.no_grad()
    def target_logits(self, batch: TrainBatch, position_M: Tensor, token_MC: Tensor) -> Tensor:
        """[M, C] the target's logits of these tokens at these flat positions, up to a number of each row."""
        if batch.top is not None:
            return stored_log_p(batch.top, position_M, token_MC, self.vocab)
        target, final_PH = self._target.module, batch.hidden[FINAL].flatten(0, 1)
        position_U, index_M = position_M.unique(return_inverse=True)
        logits_MC, rows = token_MC.new_zeros(token_MC.shape, dtype=torch.float32), rows_at_once(self.vocab)
        for start in range(0, len(position_U), rows):
            logits_RV = target.head(final_PH[position_U[start : start + rows]].to(target.head_weight.dtype))
            chunk_m = ((index_M >= start) & (index_M < start + rows)).nonzero()[:, 0]
            logits_MC[chunk_m] = logits_RV[(index_M[chunk_m] - start)[:, None], token_MC[chunk_m]].float()
        return logits_MC


def check(options: LiLiCorrOptions, target: Target) -> None:
    """Raise UserError for a corrector that cannot be."""
    if options.slots != "in_place":
        raise UserError(f"drafter.slots is {options.slots!r}; this family drafts in place: set drafter.slots=in_place")
    if options.candidates > (vocab := target.shape.vocab_size):
        raise UserError(f"drafter.candidates is {options.candidates}; the target has {vocab} tokens, set fewer")
    if options.hidden_size % options.heads:
        raise UserError(f"drafter.heads is {options.heads}; set it to a divisor of drafter.hidden_size, {options.hidden_size}")
    if int(options.hidden_size * options.mlp_ratio) < 1:
        raise UserError(f"drafter.mlp_ratio is {options.mlp_ratio}; drafter.hidden_size is {options.hidden_size}: raise it")


def columns(anchors: Anchors, state_BTH: Tensor) -> Tensor:
    """[B, A, H] the columns of the anchors' sources, to gather states with."""
    return anchors.source_BA[..., None].expand(-1, -1, state_BTH.shape[-1])


def rows_at_once(vocab: int) -> int:
    return max(1, min(CHUNK, MAX_LOGITS // vocab))


def stored_log_p(stored: Top, position_M: Tensor, token_MC: Tensor, vocab: int) -> Tensor:
    """[M, C] the target's log-probabilities. Tokens that are not stored share the rest of the probability evenly."""
    id_Mk, log_p_Mk = stored.id_BTk.flatten(0, 1)[position_M], stored.log_p_BTk.flatten(0, 1)[position_M]
    unstored_log_p_M = stored.log_rest_BT.flatten()[position_M] - math.log(max(1, vocab - id_Mk.shape[1]))
    match_MCk = id_Mk[:, None] == token_MC[..., None]
    log_p_MC = log_p_Mk[:, None].expand_as(match_MCk).where(match_MCk, -torch.inf).amax(-1)
    return torch.where(match_MCk.any(-1), log_p_MC, unstored_log_p_M[:, None]).clamp_min(LEAST).float()


FAMILY = Family("lilicorr", LiLiCorrOptions, LiLiCorr)
