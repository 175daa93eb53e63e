"""The frozen target as drafters and the decoder see it.

Shapes: B rows, N nodes or positions, R logit rows, H hidden, V vocabulary, P cached positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drafttrain.core.errors import UserError
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.masks import Documents

FINAL = -1  # key of the post-norm output in `hidden`; other keys are block numbers from 0


@dataclass(frozen=True, slots=True)
class Taps:
    """The outputs of the target that a family needs."""

    blocks: tuple[int, ...] = ()  # numbers of blocks; 0 is the first block
    final: bool = False  # the post-norm output

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys of these outputs in `TargetOut.hidden`."""
        return self.blocks + ((FINAL,) if self.final else ())

    def check(self, blocks: int) -> None:
        """Raise ValueError when a tap is outside a target of so many blocks."""
        if any(not 0 <= b < blocks for b in self.blocks):
            raise ValueError(
                f"taps {list(self.blocks)} exceed the target's {blocks} blocks; set drafter.taps within 0..{blocks - 1}"
            )

    def __or__(self, other: Taps) -> Taps:
        return Taps(tuple(sorted({*self.blocks, *other.blocks})), self.final or other.final)


@dataclass
class LoraSpec:
    """How a family also trains the target: low-rank matrices added to its linear maps (arXiv 2106.09685).

    The defaults are those of self-distillation (arXiv 2401.10774, section 2.3.2).
    """

    rank: int = 32  # 0: the target is not trained
    alpha: float = 16.0  # the matrices' product counts alpha / rank times
    modules: list[str] = field(default_factory=list)  # last names of the blocks' linear maps, such as q_proj; none: all of them
    hold: str = "distil"  # keeps the target close. distil: KL(original || adapted); text: cross-entropy; of supervised tokens
    drafter_weight: float = 0.01  # weight of the drafter's loss; that loss has weight 1
    ramp: bool = True  # drafter_weight grows from 0 as sin(pi / 2 * share of the steps)
    start: float = 0.0  # share of the steps in which the drafter alone is trained, at the full drafter_weight
    lr_scale: float = 0.25  # the matrices' learning rate / train.lr

    @staticmethod
    def of(given: LoraSpec | Mapping[str, Any]) -> LoraSpec | None:
        """From a LoraSpec or a checkpoint's plain data; None for rank 0. Raises UserError for an unknown setting."""
        if isinstance(given, LoraSpec):
            return given if given.rank else None
        known = [f.name for f in fields(LoraSpec)]
        unknown = sorted(given.keys() - set(known))
        if unknown:
            raise UserError(f"drafter.adapter has no setting {', '.join(unknown)}; it has {', '.join(known)}")
        return LoraSpec.of(LoraSpec(**given))

    def check(self) -> None:
        """Raise UserError for values outside their range."""
        if self.rank < 1 or self.alpha <= 0:
            raise UserError(
                f"drafter.adapter.rank is {self.rank}, alpha {self.alpha:g}; set both above 0, or rank to 0 for no adapter"
            )
        if self.hold not in ("distil", "text"):
            raise UserError(f"drafter.adapter.hold is {self.hold!r}; choose distil or text")
        if not 0.0 <= self.start < 1.0:
            raise UserError(f"drafter.adapter.start is {self.start:g}; set it to 0 or more and below 1, a share of the steps")
        for name in ("drafter_weight", "lr_scale"):
            if getattr(self, name) <= 0:
                raise UserError(f"drafter.adapter.{name} is {getattr(self, name):g}; set it above 0")


@dataclass(frozen=True, slots=True)
class TargetOut:
    """Output of one pass of the target."""

    logits_BRV: Tensor | None  # None when no logit rows were requested
    hidden: dict[int, Tensor] = field(default_factory=dict)  # by tap key, [B, N, H] each


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
    """A causal LM: trees in, logits and tapped states out."""

    shape: TargetShape
    fingerprint: str  # names the weights
    trees: bool  # False: this architecture takes no tree mask; chains only
    captured: bool  # with a cache of static length a call does not sync with the host: a CUDA graph can hold it
    tokenizer: Any  # transformers', where it was loaded with one; else None

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __call__(
        self,
        token_BN: Tensor,
        kv: KVCache | None,
        ancestor_BNN: Tensor | Documents | None,
        position_BN: Tensor,
        taps: Taps,
        logit_row_BR: Tensor | None = None,
    ) -> TargetOut:
        """Run N new positions per row after the cached prefix.

        kv None: a pass over whole sequences, of several documents each where ancestor_BNN is `Documents`.
        ancestor_BNN: entry [i, j] is true where new position i sees new position j; None: causal.
        logit_row_BR: the positions to give logits for; None: all; R = 0: none.
        """
        ...

    def embed(self, token: Tensor) -> Tensor:
        """[..., H] embeddings of tokens [...]."""
        ...

    def head(self, hidden_H: Tensor) -> Tensor:
        """[..., H] post-norm states -> [..., V] logits."""
        ...

    @property
    def head_weight(self) -> Tensor:
        """[V, H] weight of the head; a drafter's own head may start from it."""
        ...

    def norm(self, hidden_H: Tensor) -> Tensor:
        """[..., H] outputs of the last block -> post-norm states. Raises UserError where the model has no such norm."""
        ...

    def new_cache(self, slots: int, max_len: int, pages: int | None = None) -> KVCache:
        """An empty cache of all blocks; arguments as for `KVCache`."""
        ...

    def shallow(self, blocks: int) -> Target:
        """A frozen target of the first blocks with embedding, norm and head, over the same weights.

        Raises UserError unless `blocks` is at least 1 and below the target's own number, and for a target whose blocks cannot
        be run alone.
        """
        ...

    def pruned(self, blocks: int) -> PrunedTarget:
        """A trainable copy of the first `blocks` blocks with norm and head."""
        ...


class PrunedTarget(nn.Module):
    """A module that implements the Target protocol; base of every runner."""

    shape: TargetShape

    def new_cache(self, slots: int, max_len: int, pages: int | None = None) -> KVCache:
        raise AssertionError("overridden by every runner")

    def recompute(self) -> None:
        """From now on training stores each block's input alone and recomputes the rest in the backward pass."""
        raise AssertionError("overridden by every runner")
