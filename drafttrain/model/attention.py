"""Attention of new positions over the KV cache: q/k norm, rotary embedding, KV append, ancestor mask.

Shapes: B rows, N new positions, P cached + new positions, M rotary positions, h heads, g query heads per KV head,
D head width, X = (h + 2 h_kv) D.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.model.kv_cache import KVCache
from drafttrain.model.kv_storage import PageView
from drafttrain.model.mask_chain_attention import attended
from drafttrain.model.masks import Documents, additive, attention_mask
from drafttrain.ops import library
from drafttrain.ops.append import append
from drafttrain.ops.rms_norm import norm
from drafttrain.ops.tree_attention import bits_of

FEW = 64  # new positions up to which the operators that read pages in place are faster


@dataclass(frozen=True, slots=True)
class Heads:
    """One layer's attention heads."""

    heads: int  # query heads
    kv_heads: int
    width: int  # of a head
    scale: float  # of the scores
    window: int | None = None  # positions that a query sees at most, its own included; None: all
    q_norm: Any = None  # RMS norm of each query head; None: there is none
    k_norm: Any = None  # RMS norm of each key head


def pages_in_place(kv: KVCache) -> PageView | None:
    """The pages, where few new positions attend to them in place by `tree_attention`; None: keys and values are read out."""
    if torch.is_grad_enabled() or not (kv.static or kv.device.type == "cuda"):
        return None
    return kv.page_view()


class AttentionMetadata:
    """Shared by all layers of one forward pass: positions, cache pages, mask and rotary angles."""

    def __init__(
        self,
        kv: KVCache | None,
        position_BN: Tensor,
        ancestor_BNN: Tensor | Documents | None,
        cos_MD: Tensor,
        sin_MD: Tensor,
    ) -> None:
        """cos_MD, sin_MD: of every position; the first half of each sine is negated. ancestor_BNN None: causal."""
        self.kv, self.position_BN, self.cos_MD, self.sin_MD = kv, position_BN, cos_MD, sin_MD
        self.documents = ancestor_BNN if isinstance(ancestor_BNN, Documents) else None  # of rows that hold several
        self.ancestor_BNN = None if isinstance(ancestor_BNN, Documents) else ancestor_BNN
        self._angles: tuple[Tensor, Tensor] | None = None
        self._bits_BN: Tensor | None = None
        self._masks: dict[tuple[int | None, int], Tensor | None] = {}
        self.pages = kv.page_view() if kv is not None and position_BN.shape[1] <= FEW else None
        few, width = kv is not None and self.pages is not None, cos_MD.shape[1]
        # one compiled operator appends and attends; it runs on a CPU
        self.compiled = few and not cos_MD.is_cuda and library.serves(cos_MD) and width in range(2, 257, 2)
        # two kernels append and attend; they run on a GPU, and their launch does not depend on the rows' lengths
        self.two_kernels = few and not self.compiled and kv is not None and pages_in_place(kv) is not None
        if self.compiled:
            self.position_BN = position_BN.contiguous()
            self.ancestor_BNN = None if self.ancestor_BNN is None else self.ancestor_BNN.contiguous()

    def rotate(self, x_BNhD: Tensor) -> Tensor:
        """Rotate each head's vector to its position (Su et al. 2021), halves paired as transformers pairs them."""
        if self._angles is None:
            self._angles = (self.cos_MD[self.position_BN][:, :, None], self.sin_MD[self.position_BN][:, :, None])
        cos_BN1D, sin_BN1D = self._angles
        return torch.addcmul(x_BNhD * cos_BN1D, x_BNhD.roll(x_BNhD.shape[-1] // 2, -1), sin_BN1D)

    @property
    def bits_BN(self) -> Tensor:
        """The new positions that each new position sees, as bits."""
        if self._bits_BN is None:
            B, N = self.position_BN.shape
            ancestor_BNN = self.ancestor_BNN
            if ancestor_BNN is None:
                ancestor_BNN = torch.ones(N, N, dtype=torch.bool, device=self.position_BN.device).tril().expand(B, N, N)
            self._bits_BN = bits_of(ancestor_BNN)
        return self._bits_BN

    def mask(self, window: int | None, groups: int) -> Tensor | None:
        """Additive mask over each KV head's rows; None where every position sees everything before it."""
        if (window, groups) not in self._masks:
            self._masks[window, groups] = self._mask(window, groups)
        return self._masks[window, groups]

    def _mask(self, window: int | None, groups: int) -> Tensor | None:
        kv, N = self.kv, self.position_BN.shape[1]
        if kv is not None and N == 1 and kv.equal_lengths and (window is None or kv.longest < window):
            return None
        mask_BNP = attention_mask(kv, self.ancestor_BNN, self.position_BN, window)
        return additive(mask_BNP.repeat(1, groups, 1), self.cos_MD.dtype)


def attend(qkv_BNX: Tensor, meta: AttentionMetadata, layer: int, shape: Heads) -> Tensor:
    """[B, N, h D]: write the new positions' keys and values, and attend to the prefix and the ancestors.

    qkv_BNX: query heads, then key heads, then value heads, as projected.
    """
    pages = meta.pages
    if pages is None or not (meta.compiled or meta.two_kernels) or not qkv_BNX.is_contiguous():
        return reference(qkv_BNX, meta, layer, shape)
    keys, values = pages.layer(layer)
    table_BQ, length_B = pages.table_BQ, pages.rows.length_B
    q_weight, k_weight, eps = (None, None, 0.0)
    if shape.q_norm is not None:
        q_weight, k_weight, eps = shape.q_norm.weight, shape.k_norm.weight, shape.q_norm.variance_epsilon
    if meta.two_kernels:
        at = (meta.position_BN, table_BQ, length_B, keys, values)
        q_BNhD = append(qkv_BNX, meta.cos_MD, meta.sin_MD, q_weight, k_weight, eps, *at, shape.heads)
        return pages.attend(layer, q_BNhD, meta.bits_BN, meta.position_BN, shape.scale, shape.window)
    out_BNI = qkv_BNX.new_empty(*qkv_BNX.shape[:2], shape.heads * shape.width)
    torch.ops.drafttrain.attend(
        qkv_BNX, meta.cos_MD, meta.sin_MD, q_weight, k_weight, eps, shape.scale, shape.window or 0,
        meta.position_BN, table_BQ, length_B, meta.ancestor_BNN, keys, values, out_BNI,
    )  # fmt: skip
    return out_BNI


def reference(qkv_BNX: Tensor, meta: AttentionMetadata, layer: int, shape: Heads) -> Tensor:
    """The twin of `attend`: torch's own attention over keys and values that are read out."""
    B, N, _ = qkv_BNX.shape
    h, k, D = shape.heads, shape.kv_heads, shape.width
    mixed_BNhD = qkv_BNX.view(B, N, -1, D)
    q_BNhD, k_BNhD, v_BNhD = torch.split(mixed_BNhD, [h, k, k], 2)
    if shape.q_norm is None:
        q_BNhD, k_BNhD = torch.split(meta.rotate(mixed_BNhD[:, :, : h + k]), [h, k], 2)
    else:
        q_BNhD = meta.rotate(norm(shape.q_norm, q_BNhD)[1])
        k_BNhD = meta.rotate(norm(shape.k_norm, k_BNhD)[1])
    k_BhND, v_BhND = k_BNhD.transpose(1, 2), v_BNhD.transpose(1, 2)
    if meta.kv is None:
        out_BhND = without_cache(q_BNhD.transpose(1, 2), k_BhND, v_BhND, meta, shape)
        return out_BhND.transpose(1, 2).reshape(B, N, h * D)
    meta.kv.append(layer, k_BhND, v_BhND)
    keys_BhPD, values_BhPD = meta.kv.read(layer, N)
    # the query heads of one KV head become rows of one attention: no key is repeated in memory
    groups = h // k
    rows_BhRD = q_BNhD.view(B, N, k, groups, D).permute(0, 2, 3, 1, 4).reshape(B, k, -1, D)
    out_BhRD = F.scaled_dot_product_attention(
        rows_BhRD, keys_BhPD, values_BhPD, meta.mask(shape.window, groups), scale=shape.scale
    )
    return out_BhRD.view(B, k, groups, N, D).permute(0, 3, 1, 2, 4).reshape(B, N, h * D)


def without_cache(q_BhND: Tensor, k_BhND: Tensor, v_BhND: Tensor, meta: AttentionMetadata, shape: Heads) -> Tensor:
    """[B, h, N, D]: attention within whole sequences."""
    if meta.ancestor_BNN is None:
        return attended(q_BhND, k_BhND, v_BhND, meta.documents, shape.window, shape.scale)
    mask = meta.mask(shape.window, 1)
    return F.scaled_dot_product_attention(q_BhND, k_BhND, v_BhND, mask, scale=shape.scale, enable_gqa=True)
