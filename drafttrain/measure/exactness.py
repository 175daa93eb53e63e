"""Whether greedy outputs are token-identical, and whether rounding of the number format explains a difference.

Shapes: R logit rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import zip_longest

import torch

from drafttrain.model.target import Taps, Target

_NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
SHAPES = ((1, 0), (8, 0), (1, 7), (4, 3))  # rows and further tokens of passes that compute the same logits


class Match(Enum):
    """The result of comparing two outputs."""

    SAME = "same"  # token-identical
    EXPLAINED = "explained"  # at the first difference, both tokens' logits are equal within rounding
    UNEXPLAINED = "unexplained"  # a defect


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first differing token (an output that ends earlier differs at its end); None when identical."""
    return next((i for i, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b), None)


def compare(
    target: Target,
    dtype: torch.dtype,
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
) -> list[Match]:
    """Compare outputs prompt by prompt. dtype: of the target's computation, e4m3 of one in FP8. In float32, every difference is
    unexplained."""
    found = []
    for prompt, a, b in zip(prompts, ours, theirs, strict=True):
        at = first_difference(a, b)
        if at is None:
            found.append(Match.SAME)
            continue
        narrow = dtype in _NARROW and at < min(len(a), len(b))
        explained = narrow and rounding_explains(target, dtype, [*prompt, *a[:at]], (a[at], b[at]), device)
        found.append(Match.EXPLAINED if explained else Match.UNEXPLAINED)
    return found


@torch.no_grad()
def rounding_explains(
    target: Target, dtype: torch.dtype, context: Sequence[int], tokens: tuple[int, int], device: torch.device | str = "cpu"
) -> bool:
    """Whether both tokens' logits are within rounding of the greatest logit.

    Each of the two compared logits may be off by half a unit in the last place: together eps * |greatest logit|. Rounding does
    more where a router's choice of experts is a near-tie: another expert changes a logit by hundredths. So a token also passes
    if its logit is that great in a pass of another shape, which computes the same logits. No pass uses a cache, so that a fault
    of caches or tree masks is never explained.
    """
    room = target.shape.max_positions - len(context)
    left = set(tokens)
    for rows, more in SHAPES:
        logits_V = _logits(target, context, device, rows, min(more, room))
        tolerance = torch.finfo(dtype).eps * float(logits_V.max().abs())
        left -= {token for token in left if float(logits_V.max() - logits_V[token]) <= tolerance}
        if not left:
            return True
    return False


def _logits(target: Target, context: Sequence[int], device: torch.device | str, rows: int, more: int) -> torch.Tensor:
    """[V] the logits behind the context, from the first of some equal rows, with further tokens behind it."""
    ids = [*context, *([context[-1]] * more)]
    token_BN = torch.tensor([ids] * rows, device=device)
    position_BN = torch.arange(len(ids), device=device).expand(rows, -1)
    row_BR = torch.full((rows, 1), len(context) - 1, device=device)
    out = target(token_BN, None, None, position_BN, Taps(), row_BR)
    assert out.logits_BRV is not None
    return out.logits_BRV[0, 0].float()
