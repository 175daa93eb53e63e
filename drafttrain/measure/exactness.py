"""Whether outputs are those of plain decoding.

Greedy outputs must be token-identical, unless rounding of the number format explains a difference. Samples must have the same
distribution: a two-sample chi-square test over many seeds.

Shapes: R logit rows, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum
from itertools import zip_longest

import torch

from drafttrain.core.sampling import Sampling
from drafttrain.decoding.logits_processors import logits_after
from drafttrain.model.target import Taps, Target

_NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
SHAPES = ((1, 0), (8, 0), (1, 7), (4, 3))  # rows and further tokens of passes that compute the same logits
RARE = 10  # tokens seen less often than this in both samples together are pooled into one cell
SAMPLES = 384  # continuations per side
POSITIONS = 3  # positions compared; the first generated token is left out, because the prefill gives it
PLAIN = Sampling()
ENDED = -1  # counts as the token at positions after a stop token


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
    sampling: Sampling = PLAIN,
) -> list[Match]:
    """Compare outputs prompt by prompt. dtype: of the target's computation, e4m3 of one in FP8. In float32, every difference is
    unexplained. sampling: whose logit bias and penalties the outputs were decoded with.
    """
    matches = []
    for prompt, a, b in zip(prompts, ours, theirs, strict=True):
        position = first_difference(a, b)
        if position is None:
            matches.append(Match.SAME)
            continue
        narrow = dtype in _NARROW and position < min(len(a), len(b))
        explained = narrow and rounding_explains(
            target, dtype, prompt, a[:position], (a[position], b[position]), device, sampling
        )
        matches.append(Match.EXPLAINED if explained else Match.UNEXPLAINED)
    return matches


@torch.no_grad()
def rounding_explains(
    target: Target,
    dtype: torch.dtype,
    prompt: Sequence[int],
    output: Sequence[int],
    tokens: tuple[int, int],
    device: torch.device | str = "cpu",
    sampling: Sampling = PLAIN,
) -> bool:
    """Whether both tokens' logits are within rounding of the greatest logit.

    Each of the two compared logits may be off by half a unit in the last place: together eps * |greatest logit|. Rounding does
    more where a router's choice of experts is a near-tie: another expert changes a logit by hundredths. So a token also passes
    if its logit is that great in a pass of another shape, which computes the same logits. No pass uses a cache, so that a fault
    of caches or tree masks is never explained.
    """
    context = [*prompt, *output]
    free_positions = target.shape.max_positions - len(context)
    unexplained = set(tokens)
    for rows, extra_tokens in SHAPES:
        logits_V = _logits(target, context, device, rows, min(extra_tokens, free_positions))
        logits_V = logits_after(logits_V, sampling, prompt, output, target.placeholder) if sampling.penalised else logits_V
        tolerance = torch.finfo(dtype).eps * float(logits_V.max().abs())
        unexplained -= {token for token in unexplained if float(logits_V.max() - logits_V[token]) <= tolerance}
        if not unexplained:
            return True
    return False


def _logits(target: Target, context: Sequence[int], device: torch.device | str, rows: int, extra_tokens: int) -> torch.Tensor:
    """[V] the logits behind the context, from the first of some equal rows, with further tokens behind it."""
    ids = [*context, *([context[-1]] * extra_tokens)]
    token_BN = torch.tensor([ids] * rows, device=device)
    position_BN = torch.arange(len(ids), device=device).expand(rows, -1)
    row_BR = torch.full((rows, 1), len(context) - 1, device=device)
    out = target(token_BN, None, None, position_BN, Taps(), row_BR)
    assert out.logits_BRV is not None
    return out.logits_BRV[0, 0].float()


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(X >= statistic) for X chi-square with `freedom` degrees of freedom."""
    if freedom <= 0:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def two_sample(ours: Sequence[int], theirs: Sequence[int]) -> float:
    """p-value of both samples having one distribution: chi-square on the 2 x cells table, with rare tokens as one cell."""
    a, b = Counter(ours), Counter(theirs)
    cells: Counter[int] = Counter()
    first: Counter[int] = Counter()
    for token in a.keys() | b.keys():
        cell = token if a[token] + b[token] >= RARE else -2
        cells[cell] += a[token] + b[token]
        first[cell] += a[token]
    share = len(ours) / (len(ours) + len(theirs))
    statistic = 0.0
    for cell, total in cells.items():
        for observed, expected in ((first[cell], share * total), (total - first[cell], (1 - share) * total)):
            statistic += (observed - expected) ** 2 / expected
    return chi_square_tail(statistic, len(cells) - 1)


def p_value(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """p-value over all compared positions: the least p-value of a position times the number of positions (Bonferroni).

    ours, theirs: outputs for one prompt under independent seeds.
    """
    tested = [two_sample([_at(o, i) for o in ours], [_at(o, i) for o in theirs]) for i in range(1, POSITIONS + 1)]
    return min(1.0, len(tested) * min(tested))


def _at(output: Sequence[int], index: int) -> int:
    return output[index] if index < len(output) else ENDED
