"""What a policy that is not lossless does to the text, in the target's own eyes.

Shapes: R logit rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafttrain.model.target import Taps, Target


@torch.no_grad()
def mean_log_likelihood(
    target: Target, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> float | None:
    """Nats per output token under the target's law at temperature 1, pooled over all outputs; None without tokens."""
    total, count = 0.0, 0
    for prompt, output in zip(prompts, outputs, strict=True):
        text = [*prompt, *output]
        token_BN = torch.tensor([text], device=device)
        row_BR = torch.arange(len(prompt) - 1, len(text) - 1, device=device)[None]
        out = target(token_BN, None, None, torch.arange(len(text), device=device)[None], Taps(), row_BR)
        assert out.logits_BRV is not None
        log_RV = out.logits_BRV[0].float().log_softmax(-1)
        total += float(log_RV.gather(1, torch.tensor(output, device=device)[:, None]).sum())
        count += len(output)
    return total / count if count else None
