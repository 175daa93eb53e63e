"""The log-likelihood of text under the target, and the change of a target that was trained with its drafter.

Shapes: B rows, T positions, R logit rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafttrain.data.chat import Encoded
from drafttrain.drafters.checkpoint import Restored
from drafttrain.model.target import Taps, Target
from drafttrain.targets.adapt import own_bytes
from drafttrain.targets.load import LoadedTarget


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


@dataclass(frozen=True, slots=True)
class Original:
    """The original target and its outputs."""

    loaded: LoadedTarget
    prompts: Sequence[list[int]]
    outputs: Sequence[list[int]]  # plain outputs to the first of the prompts
    held_out: Sequence[Encoded]  # conversations that were not trained on

    def change(self, restored: Restored, outputs: Sequence[list[int]]) -> dict[str, Any]:
        """The report's `target_change`. outputs: plain outputs of the adapted target."""
        count, adapted = min(len(self.outputs), len(outputs)), restored.loaded.target
        targets = {"original": self.loaded.target, "adapted": adapted}
        lists = {"original_outputs": self.outputs[:count], "adapted_outputs": outputs[:count]}
        keys: dict[str, Any] = {
            "prompts": count,
            "changed": sum(a != b for a, b in zip(*lists.values(), strict=True)),
            "perplexity": {label: perplexity(target, self.held_out, target.device) for label, target in targets.items()},
            "parameters": restored.matrices,
            "mib": own_bytes(adapted, self.loaded.target) / 2**20,
        }
        for name, text in lists.items():
            keys[name] = {
                label: mean_log_likelihood(target, self.prompts[:count], text, target.device)
                for label, target in targets.items()
            }
        return keys


def perplexity(target: Target, rows: Sequence[Encoded], device: torch.device) -> float | None:
    """exp of the mean negative log-likelihood of the supervised tokens at temperature 1; None without supervised tokens."""
    total, count = 0.0, 0
    for row in rows:
        token_1T = torch.from_numpy(row.token_ids).long().to(device)[None]
        label_R = torch.from_numpy(row.mask).nonzero()[:, 0].to(device)
        total += log_likelihood(target, token_1T, label_R)
        count += len(label_R)
    return math.exp(-total / count) if count else None
