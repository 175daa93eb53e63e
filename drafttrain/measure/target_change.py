"""The change of a target that was trained with its drafter: the adapted target compared with the original.

Shapes: T positions, R labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drafttrain.data.chat import Encoded
from drafttrain.drafters.checkpoint import Restored
from drafttrain.measure.quality import log_likelihood, mean_log_likelihood
from drafttrain.model.target import Target
from drafttrain.targets.adapt import own_bytes
from drafttrain.targets.load import LoadedTarget


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
            "perplexity": {kind: perplexity(target, self.held_out, target.device) for kind, target in targets.items()},
            "parameters": restored.matrices,
            "mib": own_bytes(adapted, self.loaded.target) / 2**20,
        }
        for name, text in lists.items():
            keys[name] = {
                kind: mean_log_likelihood(target, self.prompts[:count], text, target.device) for kind, target in targets.items()
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
