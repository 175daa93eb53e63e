"""Floor 1: the frozen target as drafters and the decoder see it.

Shapes: B rows, N nodes or positions, R logit rows, H hidden, V vocabulary, P cached positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drafttrain.kv import KVCache

FINAL = -1  # key of the post-norm output in `hidden`, beside block numbers from 0


@dataclass(frozen=True, slots=True)
class Taps:
    """What a family needs of the target: outputs of these blocks (0 is the first block's output), the post-norm output."""

    blocks: tuple[int, ...] = ()
    final: bool = False

    @property
    def keys(self) -> tuple[int, ...]:
        return self.blocks + ((FINAL,) if self.final else ())

    def check(self, blocks: int) -> None:
        """Raise ValueError when a tap lies outside a target of so many blocks."""
        if any(not 0 <= b < blocks for b in self.blocks):
            raise ValueError(
                f"taps {list(self.blocks)} exceed the target's {blocks} blocks; set drafter.taps within 0..{blocks - 1}"
            )

    def __or__(self, other: Taps) -> Taps:
        return Taps(tuple(sorted({*self.blocks, *other.blocks})), self.final or other.final)


@dataclass(frozen=True, slots=True)
class TargetOut:
    """logits_BRV: None when not asked for. hidden: by tap key, [B, N, H] each."""

    logits_BRV: Tensor | None
    hidden: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TargetShape:
    """The dimensions a drafter is built from."""

    vocab_size: int
    hidden_size: int
    blocks: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    rope_theta: float
    norm_eps: float


class Target(Protocol):
    """A causal LM: trees in, logits and tapped states out. `fingerprint` names its weights."""

    shape: TargetShape
    fingerprint: str
    trees: bool  # False: this architecture cannot be given a tree mask; chains only
    captured: bool  # a call with the cache's lengths bounded asks the device nothing: a CUDA graph can hold it
    tokenizer: Any  # transformers', where it was loaded with one; else None

    @property
    def device(self) -> torch.device: ...

    def __call__(
        self,
        token_BN: Tensor,
        kv: KVCache | None,
        ancestor_BNN: Tensor | None,
        position_BN: Tensor,
        taps: Taps,
        logit_row_BR: Tensor | None = None,
    ) -> TargetOut:
        """Run N new positions per row after the cached prefix.

        kv None: a plain causal pass over whole sequences. ancestor_BNN None: causal among the new positions.
        logit_row_BR: the positions to give logits for; None gives all, an empty R none.
        """
        ...

    def embed(self, token: Tensor) -> Tensor: ...

    def head(self, hidden_H: Tensor) -> Tensor:
        """[..., H] post-norm states -> [..., V] logits."""
        ...

    @property
    def head_weight(self) -> Tensor:
        """[V, H]: what a drafter's own head may start from."""
        ...

    def new_cache(self, slots: int, max_len: int, pages: int | None = None) -> KVCache: ...

    def pruned(self, blocks: int) -> PrunedTarget:
        """A trainable copy of the first `blocks` blocks with norm and head."""
        ...

    def scratch(self, blocks: int, width: int | None) -> PrunedTarget:
        """A trainable model of the same architecture, freshly initialised."""
        ...

    def companion(self, path: str, revision: str | None) -> Any:
        """Another causal LM and its tokenizer, from a directory or hub id."""
        ...


class PrunedTarget(nn.Module):
    """Marker for trainable copies: a module that also answers the Target protocol."""

    shape: TargetShape

    def new_cache(self, slots: int, max_len: int, pages: int | None = None) -> KVCache:
        raise AssertionError("overridden by every runner")
