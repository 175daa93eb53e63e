"""A decoder block of the Llama family in decoding: joined projections and few operations, for targets and drafters alike.

Other modules hold the weights: transformers' or a drafter's layers, with the same names. What differs between the blocks of
architectures that our own forward runs is data (`BlockKind`). All blocks of a Llama-like model run in one compiled call over
few new positions (`Blocks`).

Shapes: B rows, N new positions, I joined heads, H hidden, X width of an input, L blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.model.attention import AttentionMetadata, Heads, attend, write
from drafttrain.model.joint import Joint
from drafttrain.model.latent_attention import LatentAttention
from drafttrain.model.low_rank import LowRank
from drafttrain.ops import library
from drafttrain.ops.gated import gated
from drafttrain.ops.linear import PANEL, linear, pack
from drafttrain.ops.rms_norm import OtherNorm, norm


@dataclass(frozen=True, slots=True)
class BlockKind:
    """How the blocks of an architecture differ from Llama's, by the names of transformers' modules; None: there is none."""

    before: str | None = "input_layernorm"  # norm of the input of attention
    after_attention: str | None = None  # norm of the output of attention
    between: str | None = "post_attention_layernorm"  # norm of the input of the MLP
    after_mlp: str | None = None  # norm of the output of the MLP
    parallel: bool = False  # the MLP reads what attention reads
    norm: type[OtherNorm] | None = None  # the formula of its norms; None: Llama's
    wide_head_norms: bool = False  # queries and keys are normed before they are divided into heads
    interleaved: bool = False  # rotary pairs are neighbours, not halves
    repeated: bool = False  # transformers' table of angles has each one twice in a row, not in two halves
    tables: bool = False  # each layer type has its own rotary angles
    latent: bool = False  # attention caches latents (`LatentAttention`)
    rotated: tuple[str, ...] | None = None  # the layer types whose queries and keys are rotated; None: all

    def of(self, owner: Any, name: str | None) -> Any:
        """The owner's norm of this name, with this architecture's formula; None: there is none."""
        module = None if name is None else getattr(owner, name, None)
        return module if module is None or self.norm is None else self.norm(module)


LLAMA = BlockKind()
LATENT = BlockKind(latent=True, interleaved=True)


def rotary_order(width: int, pairs: int, interleaved: bool) -> list[int] | None:
    """The order of a head's values in which value i rotates with value i + width / 2; None: they are so already.

    The first 2 * pairs values rotate, neighbours if interleaved, else halves. Scores do not depend on the order.
    """
    if pairs * 2 == width and not interleaved:
        return None
    first = [2 * i for i in range(pairs)] if interleaved else [*range(pairs)]
    second = [2 * i + 1 for i in range(pairs)] if interleaved else [*range(pairs, 2 * pairs)]
    unrotated = [*range(2 * pairs, width)]
    half = len(unrotated) // 2
    return [*first, *unrotated[:half], *second, *unrotated[half:]]


def _whole(x_BNH: Tensor) -> Tensor:
    return x_BNH


def heads_of(attention: Any, window: int | None = None, kind: BlockKind = LLAMA) -> Heads:
    """The heads of an attention module, named as in transformers; a norm without a weight is none."""
    norms = [kind.of(attention, name) for name in ("q_norm", "k_norm")]
    q_norm, k_norm = (m if getattr(m, "weight", None) is not None else None for m in norms)
    width, sinks = attention.head_dim, getattr(attention, "sinks", None)
    if hasattr(attention, "q_proj"):
        heads, kv_heads = attention.q_proj.out_features // width, attention.k_proj.out_features // width
    else:
        heads, kv_heads = attention.config.num_attention_heads, attention.config.num_key_value_heads
    cap = getattr(attention, "attn_logit_softcapping", None)
    return Heads(heads, kv_heads, width, attention.scaling, window, q_norm, k_norm, cap, sinks)


def _joined_order(shape: Heads, order_D: list[int]) -> Tensor:
    """The output rows of joined q, k and v in this order of every query's and key's values."""
    head = torch.tensor(order_D)
    rotated, heads = shape.heads + shape.kv_heads, shape.heads + 2 * shape.kv_heads
    rows = torch.arange(heads * shape.width).view(heads, shape.width)
    return torch.cat([rows[:rotated, head], rows[rotated:]]).flatten()


def _maps(owner: Any, *names: str) -> list[nn.Linear]:
    """The owner's linear maps of these names, or the one that joins them, whose name is the last one."""
    return [getattr(owner, name) for name in names[:-1]] if hasattr(owner, names[0]) else [getattr(owner, names[-1])]


def has_experts(mlp: Any) -> bool:
    """Whether this is no gated MLP but a mixture of experts, which computes itself."""
    return not (hasattr(mlp, "gate_proj") or isinstance(getattr(mlp, "gate_up_proj", None), nn.Module))


def _activation(mlp: Any) -> Callable[[Tensor], Tensor] | None:
    """The gate's activation; None: SiLU, which has an operator."""
    activation = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    return (
        None
        if activation is None or isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"
        else activation
    )


class DecoderBlock:
    """One decoder block. Modules of transformers or of a drafter hold the weights, the order of operations is ours."""

    def __init__(
        self,
        layer: Any,
        window: int | None = None,
        reduce: Callable[[Tensor], Tensor] = _whole,
        kind: BlockKind = LLAMA,
        order_D: list[int] | None = None,
    ) -> None:
        """window: positions that a query sees at most; None: all. reduce: adds up the parts of a split block.

        order_D: of the values of each query and key head (`rotary_order`).
        """
        self.reduce, self.kind = reduce, kind
        self.target_kv: Joint | None = None  # of positions without queries, where these have maps of their own
        mlp = layer.mlp
        self.latent = LatentAttention(layer.self_attn, order_D) if kind.latent else None
        if self.latent is None:
            self._prepare_heads(layer.self_attn, window, order_D)
        else:
            self.shape = self.latent.shape
        self.experts = mlp if has_experts(mlp) else None
        if self.experts is None:
            self.gate_up, self.down = Joint(_maps(mlp, "gate_proj", "up_proj", "gate_up_proj")), Joint([mlp.down_proj])
            self.activation = _activation(mlp)
        self.before, self.between = kind.of(layer, kind.before), kind.of(layer, kind.between)
        self.after_attention, self.after_mlp = kind.of(layer, kind.after_attention), kind.of(layer, kind.after_mlp)
        self._kv: tuple[Tensor, Tensor | None] | None = None  # the rows of the joined weight that make keys and values

    def _prepare_heads(self, attention: Any, window: int | None, order_D: list[int] | None) -> None:
        block_kind = self.kind
        self.shape = heads_of(attention, window, block_kind)
        self.wide_norms = (self.shape.q_norm, self.shape.k_norm) if block_kind.wide_head_norms else None
        if block_kind.wide_head_norms:
            self.shape = replace(self.shape, q_norm=None, k_norm=None)
        order_O = None if order_D is None else _joined_order(self.shape, order_D)
        self.qkv = Joint(_maps(attention, "q_proj", "k_proj", "v_proj", "qkv_proj"), order_O)
        self.out = Joint([attention.o_proj])
        if hasattr(attention, "k_proj_target"):
            self.target_kv = Joint([attention.k_proj_target, attention.v_proj_target])

    def forward(
        self,
        x_BNH: Tensor,
        delta_BNH: Tensor | None,
        step: AttentionMetadata,
        number: int,
        read_BNX: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(x, delta): the block's output is their sum. The norm of the next block does the addition.

        read_BNX: the input of the projections; None: the norm of x + delta.
        """
        if read_BNX is None:
            x_BNH, read_BNX = _normed(self.before, x_BNH, delta_BNH)
        attended_BNH = self.attention(read_BNX, step, number)
        if self.kind.parallel:
            return x_BNH, attended_BNH + self.mlp(read_BNX)
        if self.after_attention is not None:
            attended_BNH = norm(self.after_attention, attended_BNH)[1]
        x_BNH, normed_BNH = _normed(self.between, x_BNH, attended_BNH)
        out_BNH = self.mlp(normed_BNH)
        return x_BNH, out_BNH if self.after_mlp is None else norm(self.after_mlp, out_BNH)[1]

    def attention(self, read_BNX: Tensor, step: AttentionMetadata, number: int) -> Tensor:
        """[B, N, H] attention's output."""
        if self.latent is not None:
            return self.reduce(self.latent(read_BNX, step, number))
        qkv_BNX = self.qkv(read_BNX)
        if self.wide_norms is not None:
            widths = [count * self.shape.width for count in (self.shape.heads, self.shape.kv_heads, self.shape.kv_heads)]
            q_BNX, k_BNX, v_BNX = qkv_BNX.split(widths, -1)
            normed = [norm(m, x.contiguous())[1] for m, x in zip(self.wide_norms, (q_BNX, k_BNX), strict=True)]
            qkv_BNX = torch.cat([*normed, v_BNX], -1)
        return self.reduce(self.out(attend(qkv_BNX, step, number, self.shape)))

    def mlp(self, normed_BNH: Tensor) -> Tensor:
        """[B, N, H] the MLP's output."""
        if self.experts is not None:
            out = self.experts(normed_BNH)
            return out[0] if isinstance(out, tuple) else out  # some return their router's scores too
        return self.reduce(self.down(gated(self.gate_up(normed_BNH), self.activation)))

    def write(self, read_BNX: Tensor, step: AttentionMetadata, number: int) -> None:
        """Write keys and values of positions without queries. The projections, which have no bias, are joined by then."""
        if self.target_kv is not None:
            write(self.target_kv(read_BNX), step, number, self.shape)
            return
        if self._kv is None:
            assert self.qkv.weight is not None and self.qkv.bias is None
            rows = self.qkv.weight[self.shape.heads * self.shape.width :]
            self._kv = rows, None if self.qkv.packed is None else pack(rows)
        write(linear(read_BNX, self._kv[0], None, self._kv[1]), step, number, self.shape)

    def with_added(self, of: Mapping[int, LowRank]) -> DecoderBlock:
        """A block over the same weights whose linear maps add to their outputs. of: by the maps' identities."""
        view = copy.copy(self)
        if self.latent is None:
            view.qkv, view.out = self.qkv.with_added(of), self.out.with_added(of)
        if self.experts is None:
            view.gate_up, view.down = self.gate_up.with_added(of), self.down.with_added(of)
        return view

    def changed(self) -> None:
        """The joined weights have changed."""
        self._kv = None

    def weights(self) -> BlockWeights | None:
        """Joined and packed weights; None if they are not packed, or the block is not Llama's."""
        if self.kind != LLAMA or self.experts is not None or self.activation is not None or not self.shape.plain:
            return None
        joints = (self.qkv, self.out, self.gate_up, self.down)
        qkv, out, gate_up, down = (joint.packed for joint in joints)
        if qkv is None or out is None or gate_up is None or down is None:
            return None
        if any(len(joint.weight) % PANEL for joint in joints if joint.weight is not None):  # the call takes whole panels
            return None
        return BlockWeights(
            getattr(self.before, "weight", None),
            qkv,
            self.qkv.bias,
            out,
            self.out.bias,
            self.between.weight,
            gate_up,
            self.gate_up.bias,
            down,
            self.down.bias,
            self.shape,
        )

    @property
    def joints(self) -> tuple[Joint, ...]:
        attention = (self.qkv, self.out) if self.latent is None else self.latent.joints
        context = () if self.target_kv is None else (self.target_kv,)
        mlp = () if self.experts is not None else (self.gate_up, self.down)
        return (*attention, *context, *mlp)


def _normed(module: Any, x_BNH: Tensor, delta_BNH: Tensor | None) -> tuple[Tensor, Tensor]:
    """(x + delta, its norm); without a norm, the sum itself."""
    if module is not None:
        return norm(module, x_BNH, delta_BNH)
    summed_BNH = x_BNH if delta_BNH is None else x_BNH + delta_BNH
    return summed_BNH, summed_BNH


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """One block's weights; its projections are packed by `ops.linear.pack`."""

    norm_H: Tensor | None  # before attention; None: the block is given the input of its projections
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    norm2_H: Tensor  # before the MLP
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    shape: Heads


class Blocks:
    """A frozen model's blocks, whose weights the compiled operators hold. The twin of `run` is the loop over the blocks."""

    def __init__(self, blocks: Sequence[BlockWeights], eps: float) -> None:
        first = blocks[0].shape
        self.eps, self.scale = eps, first.scale
        self.head_eps = 0.0 if first.q_norm is None else first.q_norm.variance_epsilon
        self.windows = torch.tensor([b.shape.window or 0 for b in blocks])
        tensors: list[Tensor | None] = []
        for b in blocks:
            q_norm, k_norm = (None if m is None else m.weight for m in (b.shape.q_norm, b.shape.k_norm))
            tensors += [b.norm_H, b.qkv, b.qkv_bias, q_norm, k_norm, b.out, b.out_bias]
            tensors += [b.norm2_H, b.gate_up, b.gate_up_bias, b.down, b.down_bias]
        self._kept = library.KeptWeights(tensors)
        self._taps: dict[tuple[int, ...], Tensor] = {}  # block numbers as tensors, made once: captured passes bring no data

    def run(
        self, x_BNH: Tensor, meta: AttentionMetadata, taps: tuple[int, ...] = (), read_BNI: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, dict[int, Tensor]]:
        """(x, delta, tapped block outputs): the last block's output is x + delta. x is changed in place.

        read_BNI: input of the first block's projections; None: the norm of x.
        """
        pages = meta.pages
        assert pages is not None and meta.compiled
        if taps not in self._taps:
            self._taps[taps] = torch.tensor(taps, dtype=torch.long)
        tapped = x_BNH.new_empty(len(taps), *x_BNH.shape)
        delta_BNH = torch.ops.drafttrain.run_blocks(
            self._kept.number, x_BNH, read_BNI, meta.cos_MD, meta.sin_MD, self.eps, self.head_eps, self.scale, self.windows,
            meta.position_BN, pages.table_BQ, pages.rows.length_B, meta.seen, meta.earlier, pages.store,
            self._taps[taps], tapped,
        )  # fmt: skip
        return x_BNH, delta_BNH if delta_BNH.numel() else None, dict(zip(taps, tapped, strict=True))
