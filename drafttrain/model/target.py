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


@dataclass
class LoraSpec:
    """How a family also trains the target: low-rank matrices beside its linear maps (arXiv 2106.09685), and what holds it in
    place meanwhile. The defaults are those of self-distillation (arXiv 2401.10774, section 2.3.2)."""

    rank: int = 32  # 0: the target is not trained
    alpha: float = 16.0  # the matrices' product counts alpha / rank times
    modules: list[str] = field(default_factory=list)  # last names of the blocks' linear maps, such as q_proj; none: all of them
    hold: str = "distil"  # distil: KL(original || adapted) at every supervised token. text: cross-entropy of the token itself
    drafter_weight: float = 0.01  # of the drafter's loss beside that one
    ramp: bool = True  # drafter_weight grows from 0 as sin(pi / 2 * share of the steps)
    start: float = 0.0  # share of the steps in which the drafter learns alone, at the whole drafter_weight
    lr_scale: float = 0.25  # the matrices' learning rate / train.lr

    @staticmethod
    def of(given: LoraSpec | Mapping[str, Any]) -> LoraSpec | None:
        """From plain data too, as a checkpoint has it; None for rank 0. Raises UserError for a setting that there is not."""
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

        kv None: a pass over whole sequences, of several documents each where ancestor_BNN is `Documents`. ancestor_BNN, what
        sees what among the new positions; None: causal.
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

    def norm(self, hidden_H: Tensor) -> Tensor:
        """[..., H] the last block's outputs -> what `head` reads. Raises UserError where the model has no such norm."""
        ...

    def new_cache(self, slots: int, max_len: int, pages: int | None = None) -> KVCache: ...

    def shallow(self, blocks: int) -> Target:
        """The first blocks with embedding, norm and head as a target of their own, over the same weights: frozen, fewer than
        there are. Raises UserError for another number, and for a target whose blocks cannot be run by themselves."""
        ...

    def pruned(self, blocks: int) -> PrunedTarget:
        """A trainable copy of the first `blocks` blocks with norm and head."""
        ...


class PrunedTarget(nn.Module):
    """Marker for trainable copies: a module that also answers the Target protocol."""

    shape: TargetShape

    def new_cache(self, slots: int, max_len: int, pages: int | None = None) -> KVCache:
        raise AssertionError("overridden by every runner")

    def recompute(self) -> None:
        """From here on training keeps of every block its input alone, and computes the rest again for the gradient."""
        raise AssertionError("overridden by every runner")
