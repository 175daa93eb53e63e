"""Attention of new positions over the KV cache: q/k norm, rotary embedding, KV append, ancestor mask.

Shapes: B rows, N new positions, P cached + new positions, M rotary positions, h heads, g query heads per KV head,
D head width, X = (h + 2 h_kv) D, w words of ancestor bits.

A draft tree may be computed in several passes. The new positions of a pass are then its last N nodes, and `earlier` nodes are
scratch positions of the cache already.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.core.errors import UserError
from drafttrain.model.causal_attention import by_document, capped_attention, chunk_attention
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.kv_storage import PageView
from drafttrain.model.mask_chains import Chains, attended
from drafttrain.model.masks import Documents, additive, attention_mask
from drafttrain.ops import library
from drafttrain.ops.kv_cache import append
from drafttrain.ops.rms_norm import norm
from drafttrain.ops.rotary import rotate_signed
from drafttrain.ops.tree_bits import MOST_NODES, ancestors_of, bits_of, causal_bits

FEW = 64  # new positions up to which the compiled operator is faster, and for a text the operators of a GPU


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
    cap: float | None = None  # scores are cap * tanh(score / cap), as in Gemma-2
    sinks: Tensor | None = None  # [h] a score of each head that takes its share of the softmax and adds nothing, as in gpt-oss

    @property
    def plain(self) -> bool:
        """Whether torch's attention and the compiled operator of a CPU compute these scores."""
        return self.cap is None and self.sinks is None


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
        bits_BNw: Tensor | None = None,
        earlier: int = 0,
    ) -> None:
        """cos_MD, sin_MD: of every position; the first half of each sine is negated.

        bits_BNw: the nodes of the tree that each new position sees, as bits, in place of ancestor_BNN. Both None: causal.
        """
        self.kv, self.position_BN, self.cos_MD, self.sin_MD = kv, position_BN, cos_MD, sin_MD
        self.documents = ancestor_BNN if isinstance(ancestor_BNN, Documents) else None  # of rows that hold several
        self.ancestor_BNN = None if isinstance(ancestor_BNN, Documents) else ancestor_BNN
        self.earlier = earlier
        # a chunk of a prompt, which needs no mask (`chunk_attention`); a static length has its rows' lengths on the device
        total_length = earlier + position_BN.shape[1]
        text = ancestor_BNN is None and bits_BNw is None and earlier == 0
        self.chunk = kv is not None and text and total_length > FEW and not kv.static
        self._angles: tuple[Tensor, Tensor] | None = None
        self._bits_BNw = bits_BNw
        self._masks: dict[tuple[int | None, int], Tensor | None] = {}
        self._visible: dict[int | None, Tensor] = {}
        self.pages = kv.page_view() if kv is not None and total_length <= (FEW if text else MOST_NODES) else None
        in_place, width = kv is not None and self.pages is not None, cos_MD.shape[1]
        # one compiled operator appends and attends; it runs on a CPU
        is_short = in_place and position_BN.shape[1] <= FEW
        self.compiled = is_short and not cos_MD.is_cuda and library.serves(cos_MD) and width in range(2, 257, 2)
        # two kernels append and attend; they run on a GPU, and their launch does not depend on the rows' lengths
        self.two_kernels = in_place and not self.compiled and kv is not None and pages_in_place(kv) is not None
        if self.compiled:
            self.position_BN = position_BN.contiguous()
            tree_mask = self.ancestor_BNN if bits_BNw is None else bits_BNw
            self.seen = None if tree_mask is None else tree_mask.contiguous()  # as the compiled operators take it

    def rotate(self, x_BNhD: Tensor) -> Tensor:
        """Rotate each head's vector to its position (Su et al. 2021), halves paired as transformers pairs them."""
        if self._angles is None:
            self._angles = self.cos_MD[self.position_BN], self.sin_MD[self.position_BN]
        return rotate_signed(x_BNhD, *self._angles)

    @property
    def bits_BNw(self) -> Tensor:
        """The new positions that each new position sees, as bits."""
        if self._bits_BNw is None:
            B, N = self.position_BN.shape
            if self.ancestor_BNN is None:
                self._bits_BNw = causal_bits(N, self.position_BN.device, self.earlier).expand(B, -1, -1)
            else:
                self._bits_BNw = bits_of(self.ancestor_BNN)
        return self._bits_BNw

    def mask(self, window: int | None, groups: int) -> Tensor | None:
        """Additive mask over each KV head's rows; None where every position sees everything before it."""
        if (window, groups) not in self._masks:
            self._masks[window, groups] = self._mask(window, groups)
        return self._masks[window, groups]

    def visible(self, window: int | None) -> Tensor:
        """[B, N, P] bool: the keys that each new position sees."""
        if window not in self._visible:
            ancestor_BNN = self.ancestor_BNN
            if ancestor_BNN is None and (self.earlier or self._bits_BNw is not None):
                ancestor_BNN = ancestors_of(self.bits_BNw, self.earlier + self.position_BN.shape[1])
            self._visible[window] = attention_mask(self.kv, ancestor_BNN, self.position_BN, window)
        return self._visible[window]

    def _mask(self, window: int | None, groups: int) -> Tensor | None:
        kv, N = self.kv, self.position_BN.shape[1]
        if kv is not None and N == 1 and self.earlier == 0 and kv.equal_lengths and (window is None or kv.longest < window):
            return None
        return additive(self.visible(window).repeat(1, groups, 1), self.cos_MD.dtype)


def attend(qkv_BNX: Tensor, meta: AttentionMetadata, layer: int, shape: Heads) -> Tensor:
    """[B, N, h D]: write the new positions' keys and values, and attend to the prefix and the ancestors.

    qkv_BNX: query heads, then key heads, then value heads, as projected.
    """
    pages = meta.pages
    fused = meta.two_kernels or (meta.compiled and shape.plain)
    if pages is None or not fused or not qkv_BNX.is_contiguous():
        return reference(qkv_BNX, meta, layer, shape)
    if shape.q_norm is not None and shape.q_norm.weight.dtype != qkv_BNX.dtype:
        return reference(qkv_BNX, meta, layer, shape)
    keys, values = pages.layer(layer)
    table_BQ, length_B = pages.table_BQ, pages.rows.length_B
    q_weight, k_weight, eps = (None, None, 0.0)
    if shape.q_norm is not None:
        q_weight, k_weight, eps = shape.q_norm.weight, shape.k_norm.weight, shape.q_norm.variance_epsilon
    if meta.two_kernels:
        cache_args = (meta.position_BN, table_BQ, length_B, keys, values)
        q_BNhD = append(qkv_BNX, meta.cos_MD, meta.sin_MD, q_weight, k_weight, eps, *cache_args, shape.heads, meta.earlier)
        tree_args = (meta.bits_BNw, meta.position_BN)
        return pages.attend(layer, q_BNhD, *tree_args, shape.scale, shape.window, meta.earlier, shape.cap, shape.sinks)
    out_BNI = qkv_BNX.new_empty(*qkv_BNX.shape[:2], shape.heads * shape.width)
    torch.ops.drafttrain.attend(
        qkv_BNX, meta.cos_MD, meta.sin_MD, q_weight, k_weight, eps, shape.scale, shape.window or 0,
        meta.position_BN, table_BQ, length_B, meta.seen, meta.earlier, keys, values, out_BNI,
    )  # fmt: skip
    return out_BNI


def write(kv_BNX: Tensor, meta: AttentionMetadata, layer: int, shape: Heads) -> None:
    """Write keys and values of positions that have no queries. kv_BNX: key heads, then value heads, as projected."""
    kv = meta.kv
    assert kv is not None
    pages = kv.page_view()
    k_weight, eps = (None, 0.0) if shape.k_norm is None else (shape.k_norm.weight, shape.k_norm.variance_epsilon)
    if pages is not None and library.serves(kv_BNX):
        cache_args = (meta.position_BN, pages.table_BQ, pages.rows.length_B, *pages.layer(layer))
        append(kv_BNX.contiguous(), meta.cos_MD, meta.sin_MD, None, k_weight, eps, *cache_args, 0, meta.earlier)
        return
    k_BNhD, v_BNhD = kv_BNX.unflatten(-1, (-1, shape.width)).chunk(2, 2)
    k_BNhD = meta.rotate(k_BNhD if shape.k_norm is None else norm(shape.k_norm, k_BNhD)[1])
    kv.append(layer, k_BNhD.transpose(1, 2), v_BNhD.transpose(1, 2), meta.earlier)


def reference(qkv_BNX: Tensor, meta: AttentionMetadata, layer: int, shape: Heads) -> Tensor:
    """The twin of `attend`: torch's own attention over keys and values that are read out."""
    B, N, _ = qkv_BNX.shape
    h, k, D = shape.heads, shape.kv_heads, shape.width
    qkv_BNhD = qkv_BNX.view(B, N, -1, D)
    q_BNhD, k_BNhD, v_BNhD = torch.split(qkv_BNhD, [h, k, k], 2)
    if shape.q_norm is not None:
        if qkv_BNX.is_cuda:  # the kernel reads rows without gaps
            q_BNhD, k_BNhD = q_BNhD.contiguous(), k_BNhD.contiguous()
        q_BNhD = meta.rotate(norm(shape.q_norm, q_BNhD)[1])
        k_BNhD = meta.rotate(norm(shape.k_norm, k_BNhD)[1])
    elif qkv_BNX.is_cuda:  # apart, because cuDNN's attention gives its output the order of queries without gaps alone
        q_BNhD, k_BNhD = meta.rotate(q_BNhD), meta.rotate(k_BNhD)
    else:
        q_BNhD, k_BNhD = torch.split(meta.rotate(qkv_BNhD[:, :, : h + k]), [h, k], 2)
    k_BhND, v_BhND = k_BNhD.transpose(1, 2), v_BNhD.transpose(1, 2)
    if meta.kv is None:
        out_BhND = without_cache(q_BNhD.transpose(1, 2), k_BhND, v_BhND, meta, shape)
        return out_BhND.transpose(1, 2).reshape(B, N, h * D)
    meta.kv.append(layer, k_BhND, v_BhND, meta.earlier)
    if not shape.plain:
        out_BhND = over_cache(q_BNhD.transpose(1, 2), meta, layer, shape)
        return out_BhND.transpose(1, 2).reshape(B, N, h * D)
    if meta.chunk and not torch.is_grad_enabled():
        return chunk_attention(q_BNhD, meta.kv, layer, shape.scale, shape.window).view(B, N, h * D)
    keys_BhPD, values_BhPD = meta.kv.read(layer, meta.earlier + N)
    # the query heads of one KV head become rows of one attention: no key is repeated in memory
    groups = h // k
    rows_BhRD = q_BNhD.view(B, N, k, groups, D).permute(0, 2, 3, 1, 4).reshape(B, k, -1, D)
    out_BhRD = F.scaled_dot_product_attention(
        rows_BhRD, keys_BhPD, values_BhPD, meta.mask(shape.window, groups), scale=shape.scale
    )
    return out_BhRD.view(B, k, groups, N, D).permute(0, 3, 1, 2, 4).reshape(B, N, h * D)


def over_cache(q_BhND: Tensor, meta: AttentionMetadata, layer: int, shape: Heads) -> Tensor:
    """[B, h, N, D]: attention with capped scores or sinks to the prefix and the ancestors, whose keys are written."""
    kv, N = meta.kv, q_BhND.shape[2]
    assert kv is not None
    attention = partial(capped_attention, scale=shape.scale, window=shape.window, cap=shape.cap, sinks_h=shape.sinks)
    if meta.chunk:
        rows = [[x[None] for x in kv.read_row(layer, row, N)] for row in range(len(q_BhND))]
        return torch.cat([attention(q_hND[None], *row) for q_hND, row in zip(q_BhND, rows, strict=True)])
    return attention(q_BhND, *kv.read(layer, meta.earlier + N), mask_BNP=meta.visible(shape.window))


def _capped(q_BhND: Tensor, k_BhND: Tensor, v_BhND: Tensor, meta: AttentionMetadata, shape: Heads) -> Tensor:
    """`without_cache` with capped scores or sinks. Raises UserError where a process holds some columns of a sequence."""
    if meta.documents is not None and meta.documents.span is not None:
        raise UserError("train.sequence_parallel does not take a target with attention sinks or capped scores; set it to 1")
    attention = partial(capped_attention, scale=shape.scale, window=shape.window, cap=shape.cap, sinks_h=shape.sinks)
    mask_source = meta.documents if isinstance(meta.documents, Chains) else meta.ancestor_BNN
    if mask_source is None:
        return by_document(attention, meta.documents, q_BhND, k_BhND, v_BhND)
    return attention(q_BhND, k_BhND, v_BhND, mask_BNP=attention_mask(None, mask_source, meta.position_BN, shape.window))


def without_cache(q_BhND: Tensor, k_BhND: Tensor, v_BhND: Tensor, meta: AttentionMetadata, shape: Heads) -> Tensor:
    """[B, h, N, D]: attention within whole sequences."""
    if not shape.plain:
        return _capped(q_BhND, k_BhND, v_BhND, meta, shape)
    if meta.ancestor_BNN is None:
        return attended(q_BhND, k_BhND, v_BhND, meta.documents, shape.window, shape.scale)
    mask = meta.mask(shape.window, 1)
    return F.scaled_dot_product_attention(q_BhND, k_BhND, v_BhND, mask, scale=shape.scale, enable_gqa=True)
