"""What differs between the decoder blocks of architectures that our own forward runs, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drafttrain.ops.rms_norm import OtherNorm


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
