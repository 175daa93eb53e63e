"""LoRA on the drafter of every family: only the matrices are trained, and a checkpoint drafts as the trained drafter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.drafters.checkpoint import CheckpointMeta, TargetRecord, load_drafter, read_weights, save_drafter, start_weights
from drafttrain.drafters.common.drafter_lora import PREFIX, add_matrices, name_in_checkpoint
from drafttrain.features.online import Online
from drafttrain.model.batch import TrainBatch
from drafttrain.model.drafter import Drafter
from drafttrain.model.lora import LoraOptions
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.targets.hf import HFTarget
from tests.helpers import EACH, drafted_and_predicted, prompts, tiny_target
from tests.tiny import SHAPES, build

LORA = LoraOptions(rank=2, alpha=8.0)


def text() -> TrainBatch:
    token_BT = torch.tensor([prompts(1, seed=1, longest=25)[0] + [1, 2, 3, 4, 5, 6, 7, 8]])
    return TrainBatch(
        token_BT, torch.arange(token_BT.shape[1])[None], torch.zeros_like(token_BT), torch.ones_like(token_BT, dtype=torch.bool)
    )


def logits(drafter: Drafter, batch: TrainBatch) -> list[torch.Tensor]:
    with torch.no_grad():
        return [p.head(p.hidden_MH) for p in drafter.eval().predict(batch)]


def saved(name: str, drafter: Drafter, target: HFTarget, folder: Path, lora: LoraOptions) -> None:
    shape, options = target.shape, {"family": name, **SHAPES.get(name, {})}
    record = TargetRecord("hf", "x", None, "float32", shape.vocab_size, shape.hidden_size, shape.blocks, target.fingerprint)
    state = {name_in_checkpoint(key): tensor for key, tensor in drafter.state_dict().items()}
    save_drafter(folder, state, CheckpointMeta(name, options, drafter.decode_settings(), record, 3, lora=vars(lora)))


@pytest.mark.parametrize("name", EACH)  # a family may read its maps in another way than by their calls
def test_drafter_lora_trains_only_matrices_and_checkpoint_drafts_same_tokens(name: str, tmp_path: Path) -> None:
    """Before training it is the drafter that it started from. After it, decoding and its joined weights are the merged ones."""
    target, drafter = tiny_target(), build(name, tiny_target(), 0.5)
    if not drafter.trained:
        pytest.skip("trains nothing")
    if any(".lora_" in key for key in drafter.state_dict()):
        with pytest.raises(UserError, match=r"train\.lora needs a drafter without low-rank matrices"):
            add_matrices(drafter, LORA, target.shape.vocab_size)
        return
    batch, before = Online(target, drafter.taps).fill(text()), {k: v.clone() for k, v in drafter.state_dict().items()}
    plain = logits(drafter, batch)
    add_matrices(drafter.train(), LORA, target.shape.vocab_size)
    assert all(torch.equal(a, b) for a, b in zip(plain, logits(drafter, batch), strict=True))
    trained = {key: p for key, p in drafter.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in key for key in trained)
    train(drafter, target, batch, trained)
    saved(name, drafter, target, tmp_path, LORA)
    state = read_weights(tmp_path)
    assert before.keys() == {key for key in state if not key.startswith(PREFIX)}
    assert all(torch.equal(state[key], tensor) for key, tensor in before.items())
    again = load_drafter(tmp_path, target)[0]
    assert again.state_dict().keys() == before.keys() == start_weights(tmp_path, again).keys()
    moved = logits(drafter, batch)
    assert not all(torch.allclose(a, b, atol=1e-3) for a, b in zip(plain, moved, strict=True))
    for a, b in zip(moved, logits(again, batch), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)
    prompt = prompts(1, seed=8, longest=30)[0] + [5, 9, 2]
    drafts, predicted = drafted_and_predicted(target, again, prompt)
    assert drafts == predicted


def train(drafter: Drafter, target: HFTarget, batch: TrainBatch, trained: dict[str, Any]) -> None:
    """Every matrix must get a gradient: a map that is read in another way than by its call would be left as it is."""
    objective, optimizer = Objective(drafter.train(), target, LossOptions()), torch.optim.AdamW(trained.values(), lr=2e-2)
    start = {key: p.detach().clone() for key, p in trained.items()}
    for _ in range(3):
        loss, _ = objective(batch)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in trained.values()), [key for key, p in trained.items() if p.grad is None]
        optimizer.step()
    same = [key for key, p in trained.items() if torch.equal(p, start[key])]
    assert not same, same
