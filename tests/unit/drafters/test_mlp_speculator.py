"""The MLP speculator against its formula, written with loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from drafttrain.core.errors import UserError
from drafttrain.drafters.mlp_speculator import FAMILY, MLPSpeculator, MLPSpeculatorOptions
from drafttrain.model.target import FINAL
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.targets.hf import HFTarget
from tests.helpers import tiny_target
from tests.unit.drafters.test_hydra import packed_batch

FORMS: list[dict[str, Any]] = [
    {},
    {"scale_input": True},
    {"inner_dim": 24},
    {"tie_weights": True},
    {"tie_weights": True, "inner_dim": 24, "scale_input": True},
]


def shaken(target: HFTarget, **options: Any) -> MLPSpeculator:
    drafter = MLPSpeculator(MLPSpeculatorOptions(n_predict=3, **options), target)
    torch.manual_seed(4)
    for parameter in drafter.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return drafter


def looped_logits(drafter: MLPSpeculator, hidden_H: torch.Tensor, known: list[int], options: dict[str, Any]) -> torch.Tensor:
    """The law after these tokens: one stage for each of them."""
    inner, tied = drafter.head[0].weight.shape[1], options.get("tie_weights", False)
    state_part = 0.5 ** (0.5 / 3)
    token_part = math.sqrt((1 - state_part**2) * (inner / 2))
    x = hidden_H
    if options.get("scale_input"):
        x = x / (x.square().mean() + 1e-6).sqrt() / math.sqrt(2)
    for stage, token in enumerate(known):
        own = 0 if tied else stage
        proj = drafter.proj[min(stage, len(drafter.proj) - 1)]
        x = proj.weight @ x + token_part / state_part * drafter.emb[own].weight[token]
        x = drafter.ln[own].weight * x / (x.square().mean() + 1e-6).sqrt() + drafter.ln[own].bias
        x = F.gelu(x)
    return drafter.head[0 if tied else len(known) - 1].weight @ x


@pytest.mark.parametrize("options", FORMS)
def test_mlp_speculator_loss_and_gradients_equal_loop(options: dict[str, Any]) -> None:
    target = tiny_target()
    drafter = shaken(target, **options).train()
    batch = packed_batch(target, drafter)
    total, counts = Objective(drafter, target, LossOptions("kl"))(batch)
    total.backward()
    ours = [p.grad.clone() for p in drafter.parameters() if p.grad is not None]
    drafter.zero_grad()
    naive, made, document, hidden = torch.zeros(()), [0, 0, 0], batch.document_BT, batch.hidden[FINAL]
    for row in range(2):
        for t in range(13):
            for stage in range(3):
                label = t + stage + 2
                if label >= 13 or document[row, t] < 0 or document[row, label] != document[row, t]:
                    continue
                if not batch.mask_BT[row, label]:
                    continue
                known = batch.token_BT[row, t + 1 : label].tolist()
                p = target.head(hidden[row, label - 1]).softmax(-1)
                log_q = looped_logits(drafter, hidden[row, t], known, options).log_softmax(-1)
                naive = naive + (p * (p.log() - log_q)).sum()
                made[stage] += 1
    naive.backward()
    assert counts.total.tolist() == made and min(made) > 3
    torch.testing.assert_close(total, naive, rtol=1e-5, atol=1e-4)
    for a, p in zip(ours, (p for p in drafter.parameters() if p.grad is not None), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-3, atol=1e-4)


def test_mlp_speculator_tied_weights_are_shared_by_stages() -> None:
    """The first projection stays apart whatever the widths are, as in fms-extras."""
    target = tiny_target()
    width, vocab = target.shape.hidden_size, target.shape.vocab_size
    one = vocab * width * 2 + width * width + 2 * width
    assert sum(p.numel() for p in shaken(target, tie_weights=True).parameters()) == one + width * width
    assert sum(p.numel() for p in shaken(target).parameters()) == 3 * one
    assert [tuple(p.weight.shape) for p in shaken(target, tie_weights=True, inner_dim=24).proj] == [(24, width), (24, 24)]


def test_mlp_speculator_fresh_copies_target_embedding_and_head() -> None:
    target = tiny_target()
    drafter = MLPSpeculator(MLPSpeculatorOptions(), target)
    token_V = torch.arange(target.shape.vocab_size)
    similar_V = F.cosine_similarity(drafter.emb[1].weight, target.embed(token_V), dim=-1)
    torch.testing.assert_close(similar_V, torch.ones_like(similar_V))
    assert torch.equal(drafter.head[2].weight, target.head_weight)


def test_mlp_speculator_invalid_options_are_refused() -> None:
    target = tiny_target()
    for options in ({"n_predict": 0}, {"inner_dim": 0}, {"n_predict": 4096}):
        with pytest.raises(UserError, match=rf"^drafter\.{next(iter(options))} is \d+; "):
            FAMILY.build(MLPSpeculatorOptions(**options), target)
