"""The distribution of a target's sampled texts, enumerated text by text, and how well samples follow it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from drafttrain.core.sampling import Sampling, distribution

Texts = dict[tuple[int, ...], float]


@torch.no_grad()
def of_texts(model: Any, prompt: list[int], sampling: Sampling, length: int) -> Texts:
    """The probability of every text of `length` tokens after the prompt, by the model's own forward without a cache."""
    expected: Texts = {(): 1.0}
    for _ in range(length):
        texts, grown = list(expected), Texts()
        token_BT = torch.tensor([prompt + list(text) for text in texts])
        next_BV = distribution(model(token_BT).logits[:, -1].double(), sampling)
        for text, next_V in zip(texts, next_BV, strict=True):
            for token in next_V.nonzero()[:, 0].tolist():
                grown[(*text, token)] = expected[text] * float(next_V[token])
        expected = grown
    return expected


def tail(expected: Texts, samples: Iterable[tuple[int, ...]]) -> float:
    """The probability of a worse fit than these samples', by chi-square; 0 if one of them is impossible."""
    found = Counter(samples)
    if not set(found) <= set(expected):
        return 0.0
    count = sum(found.values())
    cells = sorted((count * p, found[text]) for text, p in expected.items())
    while len(cells) > 1 and cells[0][0] < 5:  # the rarest texts together: chi-square is the limit of large cells
        (first, few), (second, more), *rest = cells
        cells = sorted([(first + second, few + more), *rest])
    statistic = sum((f - e) ** 2 / e for e, f in cells)
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2), torch.tensor(statistic / 2)))
