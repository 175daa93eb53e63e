"""DSpark's choices and confidences against what the paper says of them, slot by slot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling, distribution
from drafttrain.core.tree import DraftTree
from drafttrain.decoding.scheduler import Decoder
from drafttrain.drafters.dspark import FAMILY, DSpark, DSparkOptions
from drafttrain.features.online import Online
from drafttrain.model.batch import TrainBatch
from drafttrain.model.drafter import Commit
from drafttrain.model.target import Target
from drafttrain.targets.hf import HFTarget
from tests.helpers import drafted_and_predicted, fast_target, prompts, tiny_target, watch_proposals
from tests.tiny import build
from tests.unit.drafters.test_dflash import slot_states


def built(target: HFTarget, **options: Any) -> DSpark:
    torch.manual_seed(1)
    drafter = DSpark(DSparkOptions(**{"block_size": 4, "layers": 2, "target_layer_ids": [0, 2], "rank": 8} | options), target)
    for parameter in drafter.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return drafter.eval().requires_grad_(False)


def read(target: HFTarget, drafter: DSpark, length: int = 12) -> TrainBatch:
    token_BT = torch.randint(0, 64, (1, length), generator=torch.Generator().manual_seed(3))
    batch = TrainBatch(token_BT, torch.arange(length)[None], torch.zeros_like(token_BT), token_BT >= 0)
    return Online(target, drafter.taps).fill(batch)


def proposed(drafter: DSpark, batch: TrainBatch, sampling: Sampling, depth: int | None = None) -> DraftTree:
    """Behind all but the last token, which is the root."""
    state, slot_B, last = drafter.open(1, 64), torch.zeros(1, dtype=torch.long), batch.token_BT.shape[1] - 1
    hidden = {k: h[:, :last] for k, h in batch.hidden.items()}
    state.observe_prompt(Commit(batch.token_BT[:, :last], batch.token_BT[:, 1:], hidden, torch.tensor([last])), slot_B)
    return state.propose(slot_B, sampling, depth)


def draft_logits(drafter: DSpark, target: Target, state_H: torch.Tensor, before: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, confidence's logit) of a draft."""
    heads = dict(drafter.named_parameters())
    row_R = heads["markov_head.markov_w1.weight"][before]
    confidence = heads["confidence_head.proj.weight"][0] @ torch.cat([state_H, row_R]) + heads["confidence_head.proj.bias"][0]
    return target.head(state_H) + heads["markov_head.markov_w2.weight"] @ row_R, confidence


@pytest.mark.sampled
@pytest.mark.parametrize("slots", ["shifted", "in_place"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_dspark_drafts_and_confidences_follow_previous_token(slots: str, temperature: float) -> None:
    target = tiny_target()
    drafter = built(target, slots=slots)
    drafter.use_decode_settings({"calibration": [[[0.5 + s, 0.25 * k] for k in range(drafter.draft_length)] for s in range(2)]})
    batch, sampling = read(target, drafter), Sampling(temperature, top_k=9, seed=5)
    tree = proposed(drafter, batch, sampling)
    states = slot_states(drafter, target, batch, 0, batch.token_BT.shape[1] - 2)  # type: ignore[arg-type]
    tokens = tree.token_BN[0].tolist()
    assert len(tokens) == drafter.draft_length + 1 and tree.confidence_BN is not None
    assert (tree.q_BNV is None) == sampling.greedy and float(tree.confidence_BN[0, 0]) == 1.0
    for k in range(drafter.draft_length):
        logits_V, confidence = draft_logits(drafter, target, states[drafter.shape.first + k], tokens[k])
        if tree.q_BNV is None:
            assert tokens[k + 1] == int(logits_V.argmax())
        else:
            torch.testing.assert_close(tree.q_BNV[0, k], distribution(logits_V, sampling), rtol=1e-4, atol=1e-5)
            assert float(tree.q_BNV[0, k, tokens[k + 1]]) > 0
        line = (0.5 + (not sampling.greedy)) * confidence + 0.25 * k
        torch.testing.assert_close(tree.confidence_BN[0, k + 1], line.sigmoid(), rtol=1e-4, atol=1e-5)


def test_dspark_depth_limit_keeps_first_drafts_and_confidences() -> None:
    target = tiny_target()
    drafter = built(target)
    batch = read(target, drafter)
    whole, cut = (proposed(drafter, batch, Sampling(), depth) for depth in (None, 2))
    assert cut.confidence_BN is not None and whole.confidence_BN is not None
    assert torch.equal(cut.token_BN, whole.token_BN[:, :3])
    # products of fewer rows may add up in another order, which depends on the processor
    torch.testing.assert_close(cut.confidence_BN, whole.confidence_BN[:, :3], rtol=1e-4, atol=1e-6)


def test_dspark_training_predictions_use_true_previous_token() -> None:
    target = tiny_target()
    drafter = built(target)
    batch = read(target, drafter)
    for prediction in drafter.predict(batch):
        at = 4  # some source
        where = prediction.source_M.tolist().index(at)
        label = int(prediction.label_M[where])
        state_H = slot_states(drafter, target, batch, 0, at)[prediction.step]  # type: ignore[arg-type]
        logits_V, confidence = draft_logits(drafter, target, state_H, int(batch.token_BT[0, label - 1]))
        hidden_1X = prediction.hidden_MH[where][None]
        torch.testing.assert_close(prediction.head(hidden_1X)[0], logits_V, rtol=1e-4, atol=1e-4)
        assert prediction.confidence is not None
        torch.testing.assert_close(prediction.confidence(hidden_1X)[0], confidence, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gaps", ["stop", "skip"])
def test_dspark_block_across_a_gap_trains_drafts_by_its_option(gaps: str) -> None:
    """Two replies, of tokens 1 to 4 and 6 to 11. Blocks of four drafts, by the token after which they begin."""
    target = tiny_target()
    drafter = built(target, gaps=gaps)
    batch = read(target, drafter)
    batch = replace(batch, mask_BT=(torch.arange(12) != 0)[None] & (torch.arange(12) != 5)[None])
    labels = {source: set[int]() for source in range(12)}
    for prediction in drafter.predict(batch):
        for source, label in zip(prediction.source_M.tolist(), prediction.label_M.tolist(), strict=True):
            labels[source].add(label)
    assert labels[0] == {2, 3, 4} and labels[6] == {8, 9, 10, 11}
    assert labels[2] == ({4} if gaps == "stop" else {4, 6, 7})
    assert labels[3] == labels[4] == set()


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_draft_vocabulary_training_predictions_equal_draft_tokens(name: str, tree: str) -> None:
    target, prompt = fast_target(), prompts(1, seed=8, longest=30)[0] + [5, 9, 2, 8, 1, 30, 12, 40, 2, 2, 7, 9, 3, 6, 4]
    drafter = build(name, target, 0.5, draft_vocab=40, tree=tree, width=2, nodes=12)
    drafter.prepare(lambda: torch.arange(64) * 37 % 64)
    drafted, predicted = drafted_and_predicted(target, drafter, prompt)
    ids = vars(drafter)["_buffers"]["t2d"].nonzero()[:, 0].tolist()
    assert predicted == drafted and set(drafted) <= set(ids) and len(ids) == 40


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_draft_vocabulary_sampled_chain_has_distribution_over_target_ids(name: str) -> None:
    target = fast_target()
    drafter = build(name, target, 0.5, draft_vocab=40)
    drafter.prepare(lambda: torch.arange(64) * 37 % 64)
    asked = prompts(3, seed=3, longest=20)
    drafted = Decoder(target, drafter, "lossless", Sampling(0.8, seed=3), frozenset(), 20).run(asked, 2).results
    assert [len(result.tokens) for result in drafted] == [20] * 3
    tree = watch_proposals(drafter)
    Decoder(target, drafter, "lossless", Sampling(0.8, seed=3), frozenset(), 8).run(asked[:1], 1)
    if tree[0].q_BNV is not None:
        outside = torch.ones(64, dtype=torch.bool).index_fill_(0, vars(drafter)["_buffers"]["t2d"].nonzero()[:, 0], False)
        assert float(tree[0].q_BNV[..., outside].sum()) == 0.0 and tree[0].q_BNV.shape[-1] == 64


def test_dspark_unknown_gaps_are_refused() -> None:
    with pytest.raises(UserError, match=r"drafter\.gaps is 'keep'; choose one of stop, skip"):
        FAMILY.build(DSparkOptions(gaps="keep"), tiny_target())


def test_dspark_rank_below_one_is_refused() -> None:
    with pytest.raises(UserError, match=r"drafter\.rank is 0"):
        FAMILY.build(DSparkOptions(rank=0), tiny_target())
