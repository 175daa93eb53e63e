"""The log-likelihood of text under the target: a measure of the quality of outputs.

Shapes: R logit rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.model.target import Taps, Target


@torch.no_grad()
def log_likelihood(target: Target, token_1T: Tensor, label_R: Tensor) -> float:
    """Nats of the tokens at positions label_R, given all tokens before each, at temperature 1. Summed over the R positions."""
    if not len(label_R):
        return 0.0
    position_1T = torch.arange(token_1T.shape[1], device=token_1T.device)[None]
    out = target(token_1T, None, None, position_1T, Taps(), label_R[None] - 1)
    assert out.logits_BRV is not None
    log_RV = out.logits_BRV[0].float().log_softmax(-1)
    return float(log_RV.gather(1, token_1T[0, label_R][:, None]).sum())


def mean_log_likelihood(
    target: Target, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> float | None:
    """Nats per output token under the target at temperature 1, pooled over all outputs; None without tokens."""
    total, count = 0.0, 0
    for prompt, output in zip(prompts, outputs, strict=True):
        token_1T = torch.tensor([[*prompt, *output]], device=device)
        total += log_likelihood(target, token_1T, torch.arange(len(prompt), token_1T.shape[1], device=device))
        count += len(output)
    return total / count if count else None
