"""LiLiCorr: DFlash, whose likeliest tokens are scored together by a small bidirectional network (arXiv 2608.20530).

Shapes: B rows, A anchors, N = B A blocks, S slots, K drafts, J = K - 1 pairs of neighbouring slots, C candidates of a slot,
L = K C, X = 2 C, W nodes of a depth, M predictions, R rows at once, P = B T flat positions, U of them, k stored tokens,
h heads of width d, D width, F factors, H hidden, V vocabulary.

The C likeliest tokens of each slot are its candidates. One pass of `LatticeNetwork` gives every pair of neighbouring
candidates a score. A draft is chosen by the scores after the draft above it; the first, by those after the root. Other tokens
are never drafted: the draft distribution has C tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafttrain.core.errors import UserError
from drafttrain.core.sequence_shard import pieces
from drafttrain.drafters import Family
from drafttrain.drafters.common.block_drafter import CHUNK, EVALUATED, BlockDrafter, Walk, stateless
from drafttrain.drafters.options import LiLiCorrOptions
from drafttrain.model.batch import Anchors, Prediction, Top, TrainBatch
from drafttrain.model.drafter import Candidates, Commit
from drafttrain.model.layers import Linear, RMSNorm, recomputed
from drafttrain.model.target import FINAL, Target
from drafttrain.ops.top import over_vocabulary, top

FEATURES = 5  # of a candidate, from its slot's own logits
STD = 0.02  # of matrices at the start


@dataclass(frozen=True, slots=True)
class LatticeShape:
    """The dimensions of the network."""

    block_size: int  # slots of a block, the anchor's included
    candidates: int
    in_width: int  # of embeddings and states, H
    width: int  # D
    factors: int  # F
    layers: int
    heads: int
    mlp_ratio: float
    scale: float
    vector_eps: float
    norm_eps: float


class LatticeAttention(nn.Module):
    """Bidirectional attention with a bias per pair of positions.

    Queries, keys and values are one linear map, which Muon trains, where the official code has a bare parameter.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj, self.out_proj = Linear(width, 3 * width), Linear(width, width)

    def forward(self, x_NLD: Tensor, bias_hLL: Tensor) -> Tensor:
        qkv = self.in_proj(x_NLD).chunk(3, -1)
        q_NhLd, k_NhLd, v_NhLd = (x_NLD.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x_NLD in qkv)
        attended_NhLd = F.scaled_dot_product_attention(q_NhLd, k_NhLd, v_NhLd, attn_mask=bias_hLL[None].to(x_NLD.dtype))
        out_NLD: Tensor = self.out_proj(attended_NhLd.transpose(1, 2).flatten(2))
        return out_NLD


class LatticeMLP(nn.Module):
    def __init__(self, in_width: int, inner: int, width: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = Linear(in_width, inner), Linear(inner, width)

    def forward(self, x_D: Tensor) -> Tensor:
        out_D: Tensor = self.down_proj(F.silu(self.up_proj(x_D)))
        return out_D


class LatticeLayer(nn.Module):
    def __init__(self, shape: LatticeShape) -> None:
        super().__init__()
        width = shape.width
        self.attn_norm, self.mlp_norm = RMSNorm(width, shape.norm_eps), RMSNorm(width, shape.norm_eps)
        self.attn = LatticeAttention(width, shape.heads)
        self.mlp = LatticeMLP(width, int(width * shape.mlp_ratio), width)

    def forward(self, x_NLD: Tensor, bias_hLL: Tensor) -> Tensor:
        x_NLD = x_NLD + self.attn(self.attn_norm(x_NLD), bias_hLL)
        out_NLD: Tensor = x_NLD + self.mlp(self.mlp_norm(x_NLD))
        return out_NLD


class LatticeNetwork(nn.Module):
    """Scores the candidates of all slots of a block together.

    The candidates are one sequence of L positions. All see each other, in both directions. From the output y of a candidate
    and the state anc of the last position before the block come two unit vectors, `out` and `in`:

        score of candidate j of the first slot                          scale * anchor_out . in_j
        score of candidate j, after candidate i of the slot before      scale * out_i . in_j

    Modules and parameters are named as in the official code, but for `in_proj` of attention.
    """

    def __init__(self, shape: LatticeShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, width, factors, slots = shape.in_width, shape.width, shape.factors, shape.block_size - 1
        self.token_proj = nn.Identity() if hidden == width else Linear(hidden, width)
        self.pass_hidden_proj, self.context_proj = Linear(hidden, width), Linear(hidden, width)
        self.feature_norm, self.feature_mlp = nn.LayerNorm(FEATURES), LatticeMLP(FEATURES, width, width)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, slots, 1, width))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, shape.candidates, width))
        self.relative_slot_bias = nn.Parameter(torch.zeros(shape.heads, 2 * shape.block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(shape.heads))
        layers = [LatticeLayer(shape) for _ in range(shape.layers)]
        self.layers = nn.ModuleList(layers)
        self.output_norm, self.anchor_norm = RMSNorm(width, shape.norm_eps), RMSNorm(width, shape.norm_eps)
        self.factor_input_proj = Linear(3 * width, width)
        self.out_head, self.in_head, self.anchor_out_head = (Linear(width, factors) for _ in range(3))
        for linear in (m for m in self.modules() if isinstance(m, nn.Linear)):
            nn.init.normal_(linear.weight, std=STD)
            nn.init.zeros_(linear.bias)
        for layer in layers:
            nn.init.xavier_uniform_(layer.attn.in_proj.weight)  # as `torch.nn.MultiheadAttention`, which the official code uses

    def forward(self, token_NKCH: Tensor, log_q_NKC: Tensor, state_NKH: Tensor, context_NH: Tensor) -> tuple[Tensor, Tensor]:
        """(start_NC, pair_NJCC): the scores in float32; of a pair, [..., i, j] is that of j after i.

        token_NKCH: embeddings of the candidates, likeliest first. log_q_NKC: their log-probabilities by their slot alone.
        state_NKH: of the slots. context_NH: the target's fused state of the last position before the block.
        """
        x_NKCD = self.token_proj(token_NKCH) + self.pass_hidden_proj(state_NKH)[..., None, :]
        x_NKCD = x_NKCD + self.feature_mlp(self.feature_norm(features(log_q_NKC).to(x_NKCD.dtype)))
        x_NLD = (x_NKCD + self.slot_embedding[0] + self.rank_embedding[0]).flatten(1, 2)
        bias_hLL = self.bias()
        for layer in self.layers:
            x_NLD = layer(x_NLD, bias_hLL)
        anchor_ND = self.anchor_norm(self.context_proj(context_NH))
        y_NKCD = self.output_norm(x_NLD).unflatten(1, x_NKCD.shape[1:3])
        anchor_NKCD = anchor_ND[:, None, None].expand_as(y_NKCD)
        factor_NKCD = F.silu(self.factor_input_proj(torch.cat([y_NKCD, anchor_NKCD, y_NKCD * anchor_NKCD], -1)))
        out_NKCF, in_NKCF = self.unit(self.out_head(factor_NKCD)), self.unit(self.in_head(factor_NKCD))
        start_NC = torch.einsum("nf,ncf->nc", self.unit(self.anchor_out_head(anchor_ND)), in_NKCF[:, 0])
        pair_NJCC = out_NKCF[:, :-1] @ in_NKCF[:, 1:].transpose(-1, -2)
        return self.shape.scale * start_NC, self.shape.scale * pair_NJCC

    def unit(self, x_F: Tensor) -> Tensor:
        """[..., F] of length 1, in float32."""
        return F.normalize(x_F.float(), dim=-1, eps=self.shape.vector_eps)

    def bias(self) -> Tensor:
        """[h, L, L] what attention adds to its scores: by the distance of two candidates' slots, and within a slot."""
        slot_K = torch.arange(self.shape.block_size - 1, device=self.same_slot_bias.device)
        slot_L = slot_K.repeat_interleave(self.shape.candidates)
        distance_LL = slot_L[:, None] - slot_L
        bias_hLL = self.relative_slot_bias[:, distance_LL + self.shape.block_size - 1]
        return bias_hLL + (distance_LL == 0) * self.same_slot_bias[:, None, None]


def features(log_q_NKC: Tensor) -> Tensor:
    """[N, K, C, 5]: log-probability, probability, distance from the likeliest's, rank within 0 and 1, whether it is first."""
    log_q_NKC, count = log_q_NKC.float(), log_q_NKC.shape[-1]
    rank_C = torch.arange(count, device=log_q_NKC.device, dtype=torch.float32)
    ranks = (x_C.expand_as(log_q_NKC) for x_C in (rank_C / max(count - 1, 1), (rank_C == 0).float()))
    return torch.stack([log_q_NKC, log_q_NKC.exp(), log_q_NKC - log_q_NKC.amax(-1, keepdim=True), *ranks], -1)


@dataclass(frozen=True, slots=True)
class Lattice:
    """Candidates of all slots and their scores. A token that is not a candidate has the place of the likeliest one."""

    token_NKC: Tensor  # likeliest first
    start_NC: Tensor  # of the first slot's candidates
    pair_NJCC: Tensor  # of each further slot's candidates, after each candidate of the slot before

    def ascending(self) -> tuple[Tensor, Lattice]:
        """(token_NKC ascending, the lattice with its scores in that order)."""
        token_NKC, order_NKC = self.token_NKC.sort(-1)
        pair_NJCC = self.pair_NJCC.gather(-1, order_NKC[:, 1:, None].expand_as(self.pair_NJCC))
        return token_NKC, Lattice(self.token_NKC, self.start_NC.gather(-1, order_NKC[:, 0]), pair_NJCC)

    def place(self, draft: int, token_NW: Tensor) -> Tensor:
        """[N, W] places of tokens among the candidates of a draft."""
        match_NWC = self.token_NKC[:, draft, None] == token_NW[..., None]
        return match_NWC.int().argmax(-1)

    def scores(self, draft: int, before_NW: Tensor) -> Tensor:
        """[N, W, C] of a draft's candidates, after each of W tokens; the first draft's do not depend on it."""
        if draft == 0:
            return self.start_NC[:, None].expand(-1, before_NW.shape[1], -1)
        index_NWC = self.place(draft - 1, before_NW)[..., None].expand(-1, -1, self.start_NC.shape[-1])
        return self.pair_NJCC[:, draft - 1].gather(1, index_NWC)


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
        learnt_M = learnt_NK.flatten().nonzero()[:, 0]  # once: on a GPU each mask as an index waits for the device
        score_MC, match_MC = (x_NKC.flatten(0, 1)[learnt_M] for x_NKC in (score_NKC, match_NKC))
        index_M1 = match_MC.int().argmax(-1, keepdim=True)
        log_choice_MC = score_MC.log_softmax(-1)
        ce_weight, penalty_weight, _ = self.weights
        loss = -ce_weight * log_choice_MC.gather(1, index_M1).sum()
        if penalty_weight:
            position_M, token_MC = label_NK.flatten()[learnt_M], lattice.token_NKC.flatten(0, 1)[learnt_M]
            logits_MC = self.target_logits(batch, batch.teacher_index(position_M), token_MC)
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
