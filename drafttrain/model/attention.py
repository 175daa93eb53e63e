"""Attention of a step's new positions over the paged cache: q/k norm, rotary embedding, KV append, ancestor mask.

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
from drafttrain.model.mask_chain_attention import attended
from drafttrain.model.masks import Documents, additive, seen
from drafttrain.ops import library
from drafttrain.ops.append import append
from drafttrain.ops.rms_norm import norm
from drafttrain.ops.tree_attention import bits_of, tree_attention

FEW = 64  # new positions up to which the compiled operator is the faster; it reads pages where they lie


@dataclass(frozen=True, slots=True)
class Heads:
    """One layer's attention: counts and width of its heads, score scale, sliding window, q/k norm modules."""

    heads: int
    kv_heads: int
    width: int
    scale: float
    window: int | None = None
    q_norm: Any = None
    k_norm: Any = None


def paged(kv: KVCache | None) -> bool:
    """Whether few new positions read this cache's pages where they lie, by `tree_attention`."""
    return kv is not None and (kv.bound is not None or kv.length_S.is_cuda) and not torch.is_grad_enabled()


class Step:
    """What all layers of one forward share: positions, what sees what, rotary angles.

    documents: where rows of whole sequences hold several; else None.
    cos_MD, sin_MD: of every position; the sines carry the sign of the half they meet. ancestor_BNN None: causal.
    """

    def __init__(
        self,
        kv: KVCache | None,
        position_BN: Tensor,
        ancestor_BNN: Tensor | Documents | None,
        cos_MD: Tensor,
        sin_MD: Tensor,
    ) -> None:
        self.kv, self.position_BN, self.cos_MD, self.sin_MD = kv, position_BN, cos_MD, sin_MD
        self.documents = ancestor_BNN if isinstance(ancestor_BNN, Documents) else None
        self.ancestor_BNN = None if isinstance(ancestor_BNN, Documents) else ancestor_BNN
        self._angles: tuple[Tensor, Tensor] | None = None
        self._bits_BN: Tensor | None = None
        self._masks: dict[tuple[int | None, int], Tensor | None] = {}
        few = kv is not None and position_BN.shape[1] <= FEW
        self.compiled = few and not cos_MD.is_cuda and library.serves(cos_MD) and cos_MD.shape[1] in range(2, 257, 2)
        # on a GPU the append and the attention are two kernels, and neither asks how long a text is
        self.in_two = few and not self.compiled and paged(kv)
        if self.compiled:
            self.position_BN = position_BN.contiguous()
            self.ancestor_BNN = None if self.ancestor_BNN is None else self.ancestor_BNN.contiguous()

    def turn(self, x_BNhD: Tensor) -> Tensor:
        """Rotate each head's vector to its position (Su et al. 2021), halves paired as transformers pairs them."""
        if self._angles is None:
            self._angles = (self.cos_MD[self.position_BN][:, :, None], self.sin_MD[self.position_BN][:, :, None])
        cos_BN1D, sin_BN1D = self._angles
        return torch.addcmul(x_BNhD * cos_BN1D, x_BNhD.roll(x_BNhD.shape[-1] // 2, -1), sin_BN1D)

    @property
    def bits_BN(self) -> Tensor:
        """What each new position sees of the new ones, as bits."""
        if self._bits_BN is None:
            B, N = self.position_BN.shape
            ancestor_BNN = self.ancestor_BNN
            if ancestor_BNN is None:
                ancestor_BNN = torch.ones(N, N, dtype=torch.bool, device=self.position_BN.device).tril().expand(B, N, N)
            self._bits_BN = bits_of(ancestor_BNN)
        return self._bits_BN

    def mask(self, window: int | None, groups: int) -> Tensor | None:
        """Additive mask over each KV head's rows; None where everything before a position is seen."""
        if (window, groups) not in self._masks:
            self._masks[window, groups] = self._mask(window, groups)
        return self._masks[window, groups]

    def _mask(self, window: int | None, groups: int) -> Tensor | None:
        kv, N = self.kv, self.position_BN.shape[1]
        if kv is not None and N == 1 and kv.even and (window is None or kv.longest < window):
            return None
        return additive(seen(kv, self.ancestor_BNN, self.position_BN, window).repeat(1, groups, 1), self.cos_MD.dtype)


def attend(qkv_BNX: Tensor, step: Step, layer: int, shape: Heads) -> Tensor:
    """[B, N, h D]: write the new positions' keys and values, and attend to the prefix and to what the tree allows.

    qkv_BNX: query heads, then key heads, then value heads, as projected.
    """
    kv = step.kv
    if kv is None or not (step.compiled or step.in_two) or not qkv_BNX.is_contiguous():
        return reference(qkv_BNX, step, layer, shape)
    keys, values = kv.layer(layer)
    q_weight, k_weight, eps = (None, None, 0.0)
    if shape.q_norm is not None:
        q_weight, k_weight, eps = shape.q_norm.weight, shape.k_norm.weight, shape.q_norm.variance_epsilon
    if step.in_two:
        at = (step.position_BN, kv.table_BQ, kv.length_B, keys, values)
        q_BNhD = append(qkv_BNX, step.cos_MD, step.sin_MD, q_weight, k_weight, eps, *at, shape.heads)
        return tree_attention(
            q_BNhD, keys, values, kv.table_BQ, kv.length_B, step.bits_BN, step.position_BN, shape.scale, shape.window,
            kv.longest + qkv_BNX.shape[1],
        )  # fmt: skip
    out_BNI = qkv_BNX.new_empty(*qkv_BNX.shape[:2], shape.heads * shape.width)
    torch.ops.drafttrain.attend(
        qkv_BNX, step.cos_MD, step.sin_MD, q_weight, k_weight, eps, shape.scale, shape.window or 0,
        step.position_BN, kv.table_BQ, kv.length_B, step.ancestor_BNN, keys, values, out_BNI,
    )  # fmt: skip
    return out_BNI


def reference(qkv_BNX: Tensor, step: Step, layer: int, shape: Heads) -> Tensor:
    B, N, _ = qkv_BNX.shape
    h, k, D = shape.heads, shape.kv_heads, shape.width
    mixed_BNhD = qkv_BNX.view(B, N, -1, D)
    q_BNhD, k_BNhD, v_BNhD = torch.split(mixed_BNhD, [h, k, k], 2)
    if shape.q_norm is None:
        q_BNhD, k_BNhD = torch.split(step.turn(mixed_BNhD[:, :, : h + k]), [h, k], 2)
    else:
        q_BNhD = step.turn(norm(shape.q_norm, q_BNhD)[1])
        k_BNhD = step.turn(norm(shape.k_norm, k_BNhD)[1])
    k_BhND, v_BhND = k_BNhD.transpose(1, 2), v_BNhD.transpose(1, 2)
    if step.kv is None:
        out_BhND = whole(q_BNhD.transpose(1, 2), k_BhND, v_BhND, step, shape)
        return out_BhND.transpose(1, 2).reshape(B, N, h * D)
    keys_BhPD, values_BhPD = step.kv.write(layer, k_BhND, v_BhND)
    # the query heads of one KV head become rows of one attention: no key is repeated in memory
    groups = h // k
    rows_BhRD = q_BNhD.view(B, N, k, groups, D).permute(0, 2, 3, 1, 4).reshape(B, k, -1, D)
    out_BhRD = F.scaled_dot_product_attention(
        rows_BhRD, keys_BhPD, values_BhPD, step.mask(shape.window, groups), scale=shape.scale
    )
    return out_BhRD.view(B, k, groups, N, D).permute(0, 3, 1, 2, 4).reshape(B, N, h * D)


def whole(q_BhND: Tensor, k_BhND: Tensor, v_BhND: Tensor, step: Step, shape: Heads) -> Tensor:
    """[B, h, N, D] of whole sequences."""
    if step.ancestor_BNN is None:
        return attended(q_BhND, k_BhND, v_BhND, step.documents, shape.window, shape.scale)
    mask = step.mask(shape.window, 1)
    return F.scaled_dot_product_attention(q_BhND, k_BhND, v_BhND, mask, scale=shape.scale, enable_gqa=True)
