"""Multi-head latent attention (MLA, arXiv 2405.04434, section 2.1), whose cache holds one vector per position for all heads.

That vector is the normed latent, then the rotated key that the heads share. Few new positions attend to it as it is (absorbed):
W_UK is applied to the queries instead of the latents, W_UV to the mean of latents. A long chunk of a prompt takes fewer
operations with keys and values of every head, which are then made from the latents a few heads at a time (expanded). On a GPU
few positions attend by `tree_attention`, in every format with absorbed queries and means in float32.

Shapes: B rows, N new positions, P positions, h heads, X input width, C latent, E rotated key, S = C + E a position's vector in
the cache, D the part of a query that is not rotated, Q = D + E a query, V a head's value, W the wider of Q and V.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.model.attention import AttentionMetadata, Heads, without_cache
from drafttrain.model.causal_attention import SCORES, capped_attention, row_attention
from drafttrain.model.joint import Joint
from drafttrain.ops.rms_norm import norm

EXPANDED = 2**25  # numbers of expanded keys and values in memory at once, if one head has fewer
# Where torch attends. In narrower formats that rounds the absorbed query and the scores, which changes more tokens than
# near-ties explain: 91 of 480 texts against 68 expanded. The kernel keeps both in float32: 64, with 1.40 % error of the logits
# instead of 1.44 % (decision 033)
ABSORBED = (torch.float32, torch.float64)


class LatentAttention:
    """One layer's attention. Its maps and norms are those of a module named as in transformers."""

    def __init__(self, attention: Any, order_E: list[int] | None) -> None:
        """order_E: of the values that are rotated (`rotary_order`); None: as they are."""
        self.latent, self.rotated = attention.kv_lora_rank, attention.qk_rope_head_dim
        self.plain, self.value = attention.qk_nope_head_dim, attention.v_head_dim
        heads, query = attention.num_heads, self.plain + self.rotated
        self.shape = Heads(heads, heads, query, attention.scaling)
        full_rank_query = attention.q_lora_rank is None  # queries have no latent of their own
        self.query = None if full_rank_query else Joint([attention.q_b_proj], _order([query] * heads, order_E))
        first, query_widths = (attention.q_proj, [query] * heads) if full_rank_query else (attention.q_a_proj, [])
        last = self.latent + self.rotated + (0 if full_rank_query else first.out_features)
        self.down = Joint([first, attention.kv_a_proj_with_mqa], _order([*query_widths, last], order_E))
        self.expand, self.out = Joint([attention.kv_b_proj], matrix=True), Joint([attention.o_proj])
        self.query_norm, self.latent_norm = getattr(attention, "q_a_layernorm", None), attention.kv_a_layernorm

    @property
    def joints(self) -> tuple[Joint, ...]:
        first = () if self.query is None else (self.query,)
        return (self.down, *first, self.expand, self.out)

    @property
    def cached(self) -> int:
        """Width of a position's vector in the cache."""
        return self.latent + self.rotated

    def __call__(self, read_BNX: Tensor, meta: AttentionMetadata, layer: int) -> Tensor:
        """[B, N, X]: attention's output."""
        q_BNhD, q_BNhE, row_BNS = self._projected(read_BNX, meta)
        kv, N = meta.kv, read_BNX.shape[1]
        if kv is not None:
            row_B1NS = row_BNS[:, None]
            kv.append(layer, row_B1NS, row_B1NS[..., :0], meta.earlier)
        if kv is not None and self._absorbs(meta, N):
            out_BhNV = self._absorbed(q_BNhD, q_BNhE, meta, layer)
        else:
            out_BhNV = self._expanded(torch.cat([q_BNhD, q_BNhE], -1).transpose(1, 2), row_BNS, meta, layer)
        return self.out(out_BhNV.transpose(1, 2).flatten(2))

    def _absorbs(self, meta: AttentionMetadata, new: int) -> bool:
        weight = self.expand.weight
        if meta.kv is None or weight is None or not (meta.two_kernels or weight.dtype in ABSORBED):
            return False
        return not (meta.chunk and self.expands(meta.kv.longest, new))

    def expands(self, prefix: int, new: int) -> bool:
        """Whether attention of `new` positions after a prefix takes fewer multiplications with keys and values of every head.

        Both forms apply W_UK and W_UV, one to all positions, the other to the new ones. A score and its part of the mean take
        2 C + E multiplications absorbed, D + E + V expanded.
        """
        maps, gain = self.latent * (self.plain + self.value), 2 * self.latent - self.plain - self.value
        return prefix * maps < new * (prefix + new) * gain

    def _projected(self, read_BNX: Tensor, meta: AttentionMetadata) -> tuple[Tensor, Tensor, Tensor]:
        """(q [B, N, h, D], rotated q [B, N, h, E], the vectors for the cache [B, N, S])."""
        down_BNX, h = self.down(read_BNX), self.shape.heads
        q_BNX, latent_BNC, key_BNE = down_BNX.split([down_BNX.shape[-1] - self.cached, self.latent, self.rotated], -1)
        if self.query is not None:
            q_BNX = self.query(norm(self.query_norm, q_BNX.contiguous())[1])
        q_BNhD, q_BNhE = q_BNX.unflatten(-1, (h, -1)).split([self.plain, self.rotated], -1)
        rotated_BNhE = meta.rotate(torch.cat([q_BNhE, key_BNE[:, :, None]], 2))
        latent_BNC = norm(self.latent_norm, latent_BNC.contiguous())[1]
        return q_BNhD, rotated_BNhE[:, :, :h], torch.cat([latent_BNC, rotated_BNhE[:, :, h]], -1)

    def _absorbed(self, q_BNhD: Tensor, q_BNhE: Tensor, meta: AttentionMetadata, layer: int) -> Tensor:
        """[B, h, N, V]: every head attends to the vectors of the cache."""
        kv, weight, N, dtype = meta.kv, self.expand.weight, q_BNhD.shape[1], q_BNhD.dtype
        assert kv is not None and weight is not None
        if dtype not in ABSORBED:
            weight, q_BNhD, q_BNhE = weight.float(), q_BNhD.float(), q_BNhE.float()
        to_key_hDC, to_value_hVC = weight.view(self.shape.heads, -1, self.latent).split([self.plain, self.value], 1)
        q_BhNC = _by_head(q_BNhD.transpose(1, 2), to_key_hDC)
        q_BhNS = torch.cat([q_BhNC, q_BNhE.transpose(1, 2)], -1)
        if meta.two_kernels and meta.pages is not None:
            attend_args = (q_BhNS.transpose(1, 2), meta.bits_BNw, meta.position_BN, self.shape.scale)
            mean_BNI = meta.pages.attend(layer, *attend_args, earlier=meta.earlier, first=self.latent)
            mean_BhNC = mean_BNI.unflatten(2, (-1, self.latent)).transpose(1, 2)
        elif meta.chunk:
            mean = partial(capped_attention, scale=self.shape.scale)
            keys = [kv.read_row(layer, row, N)[0][None] for row in range(len(q_BhNS))]
            row_means = [mean(q_hNS[None], k, k[..., : self.latent]) for q_hNS, k in zip(q_BhNS, keys, strict=True)]
            mean_BhNC = torch.cat(row_means)
        else:
            mean_BhNC = self._mean(q_BhNS, kv.read(layer, meta.earlier + N)[0], meta)
        return _by_head(mean_BhNC, to_value_hVC.transpose(1, 2)).to(dtype)

    def _mean(self, q_BhNS: Tensor, keys_B1PS: Tensor, meta: AttentionMetadata) -> Tensor:
        """[B, h, N, C]: the means of latents. Masks and scores in memory are limited as in `capped_attention`."""
        B, h, N, _ = q_BhNS.shape
        if q_BhNS[..., 0].numel() * keys_B1PS.shape[2] > SCORES:
            mask_BNP = meta.visible(None)
            return capped_attention(q_BhNS, keys_B1PS, keys_B1PS[..., : self.latent], self.shape.scale, mask_BNP=mask_BNP)
        # the heads become rows of one attention. Its values have the keys' width, which the fused operators ask for
        mean_B1RS = F.scaled_dot_product_attention(
            q_BhNS.reshape(B, 1, h * N, -1), keys_B1PS, keys_B1PS, meta.mask(None, h), scale=self.shape.scale
        )
        return mean_B1RS.view(B, h, N, -1)[..., : self.latent]

    def _expanded(self, q_BhNQ: Tensor, row_BNS: Tensor, meta: AttentionMetadata, layer: int) -> Tensor:
        """[B, h, N, V]: each head attends to keys and values of its own."""
        kv, N, padded_width = meta.kv, q_BhNQ.shape[2], max(self.shape.width, self.value)
        q_BhNW = F.pad(q_BhNQ, (0, padded_width - self.shape.width))
        if kv is None:
            k_BhNW, v_BhNW = self._keys_and_values(row_BNS, padded_width)
            out_BhNW = without_cache(q_BhNW, k_BhNW, v_BhNW, meta, self.shape)
        elif meta.chunk and not torch.is_grad_enabled():
            cached_rows = [(q_hNW[None], kv.read_row(layer, row, N)[0]) for row, q_hNW in enumerate(q_BhNW)]
            out_BhNW = torch.cat([self._by_few_heads(q_1hNW, row_1PS, self._chunk) for q_1hNW, row_1PS in cached_rows])
        else:
            row_BPS = kv.read(layer, meta.earlier + N)[0][:, 0]
            masked = partial(F.scaled_dot_product_attention, attn_mask=meta.mask(None, 1), scale=self.shape.scale)
            out_BhNW = self._by_few_heads(q_BhNW, row_BPS, masked)
        return out_BhNW[..., : self.value]

    def _by_few_heads(self, q_BhNW: Tensor, row_BPS: Tensor, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """[B, h, N, W]: attention of queries, keys and values, whose heads are expanded a few at a time."""
        heads_per_chunk = max(1, EXPANDED // (2 * row_BPS[..., 0].numel() * q_BhNW.shape[-1]))
        chunks = []
        for start in range(0, self.shape.heads, heads_per_chunk):
            heads = slice(start, start + heads_per_chunk)
            chunks.append(attention(q_BhNW[:, heads], *self._keys_and_values(row_BPS, q_BhNW.shape[-1], heads)))
        return torch.cat(chunks, 1) if len(chunks) > 1 else chunks[0]

    def _chunk(self, q_1hNW: Tensor, k_1hPW: Tensor, v_1hPW: Tensor) -> Tensor:
        return row_attention(q_1hNW[0], k_1hPW[0], v_1hPW[0], self.shape.scale, None)[None]

    def _keys_and_values(self, row_BPS: Tensor, padded_width: int, heads: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Keys and values of these heads, [B, h, P, W]. One width for both is what the fused operators take."""
        latent_BPC, key_BPE = row_BPS.split([self.latent, self.rotated], -1)
        if self.expand.weight is None:
            kv_BPhX = self.expand(latent_BPC).unflatten(-1, (self.shape.heads, -1))[:, :, heads]
        else:
            weight = self.expand.weight.view(self.shape.heads, -1, self.latent)[heads].flatten(0, 1)
            kv_BPhX = F.linear(latent_BPC, weight).unflatten(-1, (-1, self.plain + self.value))
        kv_BhPX = kv_BPhX.transpose(1, 2)
        k_BhPD, v_BhPV = kv_BhPX.split([self.plain, self.value], -1)
        k_BhPQ = torch.cat([k_BhPD, key_BPE[:, None].expand(-1, k_BhPD.shape[1], -1, -1)], -1)
        return F.pad(k_BhPQ, (0, padded_width - self.shape.width)), F.pad(v_BhPV, (0, padded_width - self.value))


def _by_head(x_BhNI: Tensor, weight_hIO: Tensor) -> Tensor:
    """[B, h, N, O]: each head's rows times its own matrix, which no batch copies."""
    B, N = x_BhNI.shape[0], x_BhNI.shape[2]
    return torch.bmm(x_BhNI.transpose(0, 1).flatten(1, 2), weight_hIO).unflatten(1, (B, N)).transpose(0, 1)


def _order(widths: list[int], order_E: list[int] | None) -> Tensor | None:
    """Rows of a map whose parts of these widths each end in values that are rotated, with this order of those values."""
    if order_E is None:
        return None
    rows, start = list[int](), 0
    for width in widths:
        rotated = start + width - len(order_E)
        rows += [*range(start, rotated), *(rotated + index for index in order_E)]
        start += width
    return torch.tensor(rows)
