"""A network that scores the candidates of all slots of a block together (arXiv 2608.20530).

Shapes: N blocks, K drafting slots, J = K - 1 pairs of neighbouring slots, C candidates of a slot, L = K C, W tokens, D width, F
factors, h heads, H hidden.

The candidates of a block are one sequence of L positions. All see each other, in both directions. From the output y of a
candidate and the state anc of the last position before the block come two unit vectors, `out` and `in`:

    score of candidate j of the first slot                          scale * anchor_out . in_j
    score of candidate j, after candidate i of the slot before      scale * out_i . in_j
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafttrain.model.layers import Linear, RMSNorm

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
    """Modules and parameters are named as in the official code, but for `in_proj` of attention."""

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
