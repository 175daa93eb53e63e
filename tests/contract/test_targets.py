"""What every target must do: exact trees or chains, `generate`'s tokens with any drafter, the right taps, training."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.decoding.settings import Controls
from drafttrain.features.online import Online
from drafttrain.model.batch import TrainBatch
from drafttrain.model.target import FINAL, Taps
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.ops import library
from drafttrain.targets.fast import FastTarget, why_not
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.load import RecomputedTarget
from tests.architectures import ARCHITECTURES, WINDOW, model_of
from tests.cases import slow_but
from tests.helpers import prompts
from tests.recorder import Graph, install
from tests.tiny import build

EXACT = [name for name, row in ARCHITECTURES.items() if row.refused is None]
REFUSED = [name for name, row in ARCHITECTURES.items() if row.refused is not None]
RECOMPUTED = [name for name in REFUSED if ARCHITECTURES[name].recomputed]
FEW = ("Gemma-4 (text)", "DeepSeek-V3", "gpt-oss", "Llama-4 (text)")  # a row of each kind of attention
KINDS = (*FEW, "GPT-2", "MPT", "Qwen3-Next", "Bamba")  # and of positions that are learned or none, and of recurrence; slow
FAMILIES = ("medusa", "eagle3", "draft_model", "dflash")
NEW = 2 * WINDOW  # tokens of a text


def runner_of(model: Any) -> type[HFTarget]:
    return HFTarget if why_not(model) else FastTarget


@cache
def target_of(name: str) -> HFTarget:
    model = model_of(name)
    return runner_of(model)(model)


@cache
def block_by_block(name: str) -> HFTarget:
    """A target that runs as on a GPU, where no compiled call has all blocks. What its probe would say is known."""
    model, known = model_of(name), target_of(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "has_product", lambda: False)
        patch.setattr("drafttrain.targets.hf.probe", lambda target: known.chains_reason)
        patch.setattr("drafttrain.targets.hf.wrong_tap", lambda target: known.wrong_tap)
        return runner_of(model)(model)


@cache
def generated(name: str) -> tuple[list[list[int]], list[list[int]]]:
    """(prompts, transformers' own greedy continuations). Prompts and texts are longer than windows and chunks."""
    model, asked = model_of(name), prompts(4, vocab=60, seed=3, longest=2 * WINDOW)
    asked[0] = (asked[0] * 20)[: 3 * WINDOW]
    texts = []
    for prompt in asked:
        given = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        token_1T = torch.tensor([prompt])
        whole = model.generate(token_1T, attention_mask=torch.ones_like(token_1T), **given)
        texts.append(whole[0, len(prompt) :].tolist())
    return asked, texts


@pytest.mark.parametrize("name", REFUSED)
def test_target_unsupported_architecture_is_refused_with_reason(name: str) -> None:
    reason = ARCHITECTURES[name].refused
    with pytest.raises(UserError, match=str(reason)) as caught:
        HFTarget(model_of(name))
    assert "\n" not in str(caught.value)


@pytest.mark.sampled(
    name=(*FEW, "Llama", "Qwen3-Next", "MPT")
)  # the others: `test_target_greedy_output_equals_transformers_generate`
@pytest.mark.parametrize("name", EXACT)
def test_target_trees_flag_matches_architecture_table(name: str) -> None:
    """The probe at load time compares them with the model's own forward, with both runners where both serve it."""
    target = target_of(name)
    assert target.trees == ARCHITECTURES[name].trees
    if type(target) is not HFTarget:
        assert HFTarget(model_of(name)).trees == target.trees


@pytest.mark.sampled(batch=(4,))
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", slow_but(FEW, EXACT))
def test_target_greedy_output_equals_transformers_generate(
    name: str, family: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged prompts, prompts longer than a prefill chunk and than a window; then by captured steps that run ahead."""
    row, target, (asked, texts) = ARCHITECTURES[name], target_of(name), generated(name)
    assert target.trees == row.trees
    asked, texts = (asked[:2], texts[:2]) if batch == 1 else (asked, texts)
    chain = {} if target.trees or family != "medusa" else {"paths": [[0], [0, 0], [0, 0, 0]]}
    drafter = build(family, target, noise=1.0, **chain)
    results = Decoder(target, drafter, "greedy", Sampling(), frozenset(), NEW, prefill_chunk=6).run(asked, batch).results
    assert [r.tokens for r in results] == texts
    if not row.captured:
        return
    install(monkeypatch.setattr)
    monkeypatch.setattr(library, "has_product", lambda: False)
    target = block_by_block(name)
    drafter = build(family, target, noise=1.0, **chain)
    controls = Controls(read_every=1)
    decoder = Decoder(target, drafter, "greedy", Sampling(), frozenset(), 9, prefill_chunk=6, controls=controls)
    decoder.captures = True
    assert [r.tokens for r in decoder.run(asked, batch).results] == [text[:9] for text in texts] and Graph.made >= 1


@pytest.mark.parametrize("name", slow_but(("Bloom",), RECOMPUTED))
def test_recomputed_target_greedy_output_equals_transformers_generate(name: str) -> None:
    target, (asked, texts) = RecomputedTarget(model_of(name), why="its cache is not known"), generated(name)
    drafter = build("medusa", target, noise=1.0, paths=[[0], [0, 0], [0, 0, 0]])
    results = Decoder(target, drafter, "greedy", Sampling(), frozenset(), NEW, prefill_chunk=6).run(asked, 4).results
    assert [r.tokens for r in results] == texts


@pytest.mark.sampled(name=KINDS)
@pytest.mark.parametrize("name", slow_but(FEW, EXACT))
def test_target_with_early_exit_drafter_output_equals_generate(name: str) -> None:
    """An early exit is a view of the target's weights, those that pack all blocks in one matrix included."""
    target, (asked, texts) = target_of(name), generated(name)
    decoder = Decoder(target, build("early_exit", target, noise=1.0), "greedy", Sampling(), frozenset(), 9, prefill_chunk=6)
    assert [r.tokens for r in decoder.run(asked, 4).results] == [text[:9] for text in texts]


@pytest.mark.sampled(name=KINDS)
@pytest.mark.parametrize("name", slow_but(FEW, EXACT))
def test_target_layer_states_equal_transformers_hidden_states(name: str) -> None:
    target = target_of(name)
    token = torch.randint(0, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    position = torch.arange(20).expand(2, 20)
    last = target.shape.blocks - 1
    with torch.no_grad():
        found = target(token, None, None, position, Taps((0, 1), final=True))
        theirs = model_of(name)(token, output_hidden_states=True)
    tolerance = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found.hidden[0], theirs.hidden_states[1], **tolerance)
    torch.testing.assert_close(found.hidden[1], theirs.hidden_states[2], **tolerance)
    torch.testing.assert_close(found.hidden[FINAL], theirs.hidden_states[last + 1], **tolerance)
    torch.testing.assert_close(found.logits_BRV, theirs.logits, **tolerance)


@pytest.mark.sampled(name=KINDS, family=("medusa",))
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", slow_but(FEW, EXACT))
def test_target_two_training_steps_lower_drafter_loss(name: str, family: str) -> None:
    target = target_of(name)
    drafter = build(family, target, noise=0.1).train().requires_grad_()
    token_BT = torch.randint(0, 60, (2, 30), generator=torch.Generator().manual_seed(0))
    whole = TrainBatch(token_BT, torch.arange(30).expand(2, 30), torch.zeros_like(token_BT), token_BT > -1)
    batch = Online(target, drafter.taps).fill(whole)
    objective, optimizer = Objective(drafter, target, LossOptions()), torch.optim.AdamW(drafter.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        torch.manual_seed(0)  # block families draw their anchors
        total, _ = objective(batch)
        losses.append(float(total.detach()))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    assert losses[2] < losses[0] and all(torch.isfinite(p).all() for p in drafter.parameters())
