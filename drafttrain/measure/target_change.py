"""What became of a target that was trained with its drafter, beside the original one.

Shapes: R logit rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drafttrain.data.chat import Encoded
from drafttrain.drafters.checkpoint import Restored
from drafttrain.measure.quality import mean_log_likelihood
from drafttrain.model.target import Taps, Target
from drafttrain.targets.adapt import own_bytes
from drafttrain.targets.load import LoadedTarget


@dataclass(frozen=True, slots=True)
class Original:
    """The original target, the plain outputs it gave to the first of the prompts, and conversations not trained on."""

    loaded: LoadedTarget
    prompts: Sequence[list[int]]
    outputs: Sequence[list[int]]
    held_out: Sequence[Encoded]

    def change(self, restored: Restored, outputs: Sequence[list[int]]) -> dict[str, Any]:
        """The report's `target_change`. outputs: the adapted target's plain ones."""
        count, adapted = min(len(self.outputs), len(outputs)), restored.loaded.target
        targets = {"original": self.loaded.target, "adapted": adapted}
        texts = {"original_outputs": self.outputs[:count], "adapted_outputs": outputs[:count]}
        keys: dict[str, Any] = {
            "prompts": count,
            "changed": sum(a != b for a, b in zip(*texts.values(), strict=True)),
            "perplexity": {whose: perplexity(target, self.held_out, target.device) for whose, target in targets.items()},
            "parameters": restored.matrices,
            "mib": own_bytes(adapted, self.loaded.target) / 2**20,
        }
        for name, text in texts.items():
            keys[name] = {
                whose: mean_log_likelihood(target, self.prompts[:count], text, target.device)
                for whose, target in targets.items()
            }
        return keys


@torch.no_grad()
def perplexity(target: Target, rows: Sequence[Encoded], device: torch.device) -> float | None:
    """exp of the mean negative log-likelihood of the supervised tokens at temperature 1; None without any."""
    total, count = 0.0, 0
    for row in rows:
        token_1T = torch.from_numpy(row.token_ids).long().to(device)[None]
        label_R = torch.from_numpy(row.mask).nonzero()[:, 0].to(device)
        out = target(token_1T, None, None, torch.arange(token_1T.shape[1], device=device)[None], Taps(), label_R[None] - 1)
        assert out.logits_BRV is not None or not len(label_R)
        if out.logits_BRV is not None:
            log_RV = out.logits_BRV[0].float().log_softmax(-1)
            total += float(log_RV.gather(1, token_1T[0, label_R][:, None]).sum())
            count += len(label_R)
    return math.exp(-total / count) if count else None
