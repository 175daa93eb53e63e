"""The frozen target as drafters and the decoder see it.

Shapes: B rows, N nodes or positions, R logit rows, H hidden, V vocabulary, P cached positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drafttrain.model.kv_cache import KVCache
from drafttrain.model.masks import Documents
from drafttrain.model.shapes import TargetShape
from drafttrain.ops.commit import along

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
                f"target layers {list(self.blocks)} exceed the target's {blocks} blocks; set drafter.target_layer_ids within "
                f"0..{blocks - 1}"
            )

    def __or__(self, other: Taps) -> Taps:
        return Taps(tuple(sorted({*self.blocks, *other.blocks})), self.final or other.final)


@dataclass(frozen=True, slots=True)
class TargetOut:
    """Output of one pass of the target."""

    logits_BRV: Tensor | None  # None when no logit rows were requested
    hidden: dict[int, Tensor] = field(default_factory=dict)  # by tap key, [B, N, H] each

    def hidden_along(self, path_BN: Tensor, columns: int) -> dict[int, Tensor]:
        """[B, A, H] each: the states at the first `columns` nodes of each path."""
        return dict(zip(self.hidden, along(list(self.hidden.values()), path_BN, columns), strict=True))


class Target(Protocol):
    """A causal LM: trees in, logits and tapped states out."""

    shape: TargetShape
    fingerprint: str  # names the weights
    trees: bool  # False: this architecture takes no tree mask; chains only
    generations: bool  # a tree may come in several passes, each with the nodes that follow those before
    tokenizer: Any  # transformers', where it was loaded with one; else None
    whole_images: bool  # the tokens of an image see each other: a pass holds all of them
    placeholder: int | None  # token that stands for an image's rows in the target's own vocabulary; None: it sees no images

    @property
    def device(self) -> torch.device: ...

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph can hold a call with a cache of static length: it does not sync with the host."""
        ...

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
        ancestor_BNN: entry [i, j] is true where new position i sees new position j; None: causal. Where `generations`, it may
        be [B, N, M]: the new positions are the last N nodes of a tree, whose other nodes are scratch positions of the cache.
        logit_row_BR: the positions to give logits for; None: all; R = 0: none.
        """
        ...

    def embed(self, token: Tensor) -> Tensor:
        """[..., H] embeddings of tokens [...], ids of images (`model.images`) among them where the target sees images."""
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
