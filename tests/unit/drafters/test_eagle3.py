"""EAGLE-3's draft vocabulary, its losses against a computation position by position, and EAGLE 3.1's two norms."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.drafters.eagle3 import FAMILY, Eagle3, Eagle3Options, default_taps
from drafttrain.model.target import FINAL
from drafttrain.objective.losses import LossOptions, Objective, teacher_forced
from drafttrain.objective.scores import restricted
from drafttrain.objective.teacher import TargetChunk, TargetRows
from tests.contract import test_families as contract
from tests.exports import CASES
from tests.helpers import drafted_and_predicted, fast_target, prompts, tiny_target
from tests.tiny import build
from tests.unrolled import labels, packed_batch, shaken, states

COUNTS = torch.arange(64) * 37 % 64  # a permutation: token i is seen COUNTS[i] times
VOCAB: dict[str, Any] = {"draft_vocab": 40}
OTHERS: dict[str, Any] = {"layers": 3, "qk_norm": True, "norm_before_fc": True, "own_embedding": True, "norm_output": True}
WINDOWS: dict[str, Any] = {"layer": {"sliding_window": 9, "full_attention_layers": [1]}}
# latent attention: values wider than queries and scores that yarn makes larger; narrower ones, and queries without a latent
LATENT, QUERIES = ({"layer": CASES[f"eagle3-latent{x}"][1]["layer"], "layers": n} for x, n in (("", 1), ("-queries", 2)))
VARIANTS: list[dict[str, Any]] = [
    {},
    VOCAB,
    {"fc_norm": True},
    {"norm_output": True},
    {"draft_vocab": 40, "fc_norm": True, "norm_output": True},
    OTHERS,
    LATENT,
    QUERIES,
    {"layers": 2, "layer": {"attention_sinks": True}},
]


def drafter_of(**options: Any) -> Eagle3:
    drafter = Eagle3(Eagle3Options(**{"target_layer_ids": [0, 1, 3], **options}), tiny_target())
    drafter.prepare(lambda: COUNTS)
    return shaken(drafter)  # type: ignore[return-value]


@pytest.mark.parametrize(("options", "loss"), [*((variant, "kl") for variant in VARIANTS), (VOCAB, "ce"), (VOCAB, "lk")])
def test_eagle3_losses_and_gradients_equal_loop(options: dict[str, Any], loss: str) -> None:
    drafter = drafter_of(steps=3, **options).train()
    target, ids = drafter._target.module, drafter.ids
    batch = packed_batch(drafter, target)  # type: ignore[arg-type]
    total, counts = Objective(drafter, target, LossOptions(loss, 5))(batch)
    total.backward()
    ours = [p.grad.clone() for p in drafter.parameters()]
    drafter.zero_grad()
    naive, hits, mass, spoken = torch.zeros(()), [0] * 3, [0.0] * 3, set(range(64) if ids is None else ids.tolist())
    found = states(drafter, batch, 3, detach=False)
    for step in range(3):
        for row, t in labels(batch, step):
            p_V = target.head(batch.hidden[FINAL][row, t + 1 + step]).softmax(-1)
            q_V = torch.zeros(64).index_copy(0, torch.tensor(sorted(spoken)), drafter.logits(found[step, row, t]).softmax(-1))
            hits[step] += int(p_V.argmax() == q_V.argmax())
            mass[step] += float(torch.minimum(p_V, q_V.detach()).sum())
            label, inside = int(batch.token_BT[row, t + 2 + step]), sorted(spoken)
            if (label if loss == "ce" else int(p_V.argmax())) not in spoken:
                continue
            p_D, q_D = p_V[inside] / p_V[inside].sum(), q_V[inside]
            one = {
                "kl": lambda p=p_D, q=q_D: (p * (p.log() - q.log())).sum(),
                "ce": lambda q=q_V, label=label: -q[label].log(),
                "lk": lambda p=p_D, q=q_D: -torch.minimum(p, q).sum().log(),
            }[loss]()
            naive = naive + 0.8**step * one
    naive.backward()
    torch.testing.assert_close(total, naive)
    assert counts.correct.tolist() == hits
    torch.testing.assert_close(counts.acceptance, torch.tensor(mass, dtype=torch.float64), atol=1e-5, rtol=1e-5)
    for a, p in zip(ours, drafter.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [OTHERS | WINDOWS, LATENT, QUERIES])
@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_eagle3_of_other_trainers_training_predictions_equal_draft_tokens(tree: str, options: dict[str, Any]) -> None:
    target, prompt = fast_target(), prompts(1, seed=8, longest=30)[0] + [5, 9, 2, 8, 1, 30, 12, 40, 2, 2, 7, 9, 3, 6, 4]
    options = options | {"tree": tree, "width": 2, "nodes": 12}
    drafted, predicted = drafted_and_predicted(target, build("eagle3", target, 0.5, **options), prompt)
    assert predicted == drafted


def test_default_taps_are_the_official_ones_or_three_without_the_last() -> None:
    assert [default_taps(n) for n in (32, 7, 5)] == [[1, 15, 28], [1, 2, 3], [1]]
    assert all(default_taps(n, "auto") == default_taps(n) for n in range(7, 40))
    assert [default_taps(n, "auto") for n in (3, 4, 5, 6)] == [[0, 1, 2], [0, 1, 2], [1, 2, 3], [1, 2, 4]]
    assert default_taps(12, "thirds") == [3, 7, 11]


def test_eagle3_d2t_maps_most_frequent_tokens() -> None:
    target = tiny_target()
    drafter = Eagle3(Eagle3Options(draft_vocab=10), target)
    drafter.prepare(lambda: COUNTS)
    wanted = sorted(int((c == COUNTS).nonzero()) for c in range(54, 64))
    assert drafter.d2t is not None and drafter.t2d is not None and drafter.ids is not None
    assert drafter.ids.tolist() == wanted == [i + o for i, o in enumerate(drafter.d2t.tolist())]
    assert drafter.t2d.dtype == torch.bool and drafter.t2d.nonzero()[:, 0].tolist() == wanted
    assert torch.equal(drafter.lm_head.weight, target.head_weight[wanted])
    assert {"d2t", "t2d"} <= set(drafter.state_dict())
    assert not {"d2t", "t2d"} & set(drafter_of().state_dict())


def test_eagle3_draft_vocabulary_unseen_tokens_fill_from_lowest_id() -> None:
    drafter = Eagle3(Eagle3Options(draft_vocab=4), tiny_target())
    drafter.prepare(lambda: torch.zeros(64, dtype=torch.long).index_fill(0, torch.tensor([50]), 3))
    assert drafter.ids is not None and drafter.ids.tolist() == [0, 1, 2, 50]


def test_restricted_loss_target_argmax_outside_draft_vocabulary_is_zero() -> None:
    logits_CD, law_logits_CV = torch.randn(3, 2, requires_grad=True), torch.tensor([[9.0, 0, 1, 2]] * 2 + [[0.0, 1, 9, 2]])
    target = TargetRows(TargetChunk(law_logits_CV))
    loss_C, top1_C, acceptance_C = restricted(logits_CD, target, torch.tensor([1, 1, 2]), {"kl": 1.0}, torch.tensor([1, 2]))
    loss_C.sum().backward()
    assert loss_C[:2].tolist() == [0, 0] and float(loss_C[2].detach()) > 0 and not logits_CD.grad[:2].any()
    assert top1_C[:2].tolist() == [False, False] and float(acceptance_C[:2].max()) < 0.01


def test_eagle3_draft_vocabulary_ranks_are_counted_over_whole_vocabulary() -> None:
    drafter = drafter_of(draft_vocab=40).eval()
    target = drafter._target.module
    batch = packed_batch(drafter, target)  # type: ignore[arg-type]
    batch = replace(batch, mask_BT=batch.document_BT >= 0)
    hits = teacher_forced(drafter, target, batch, 5)
    first = next(iter(drafter.predict(batch)))
    assert drafter.ids is not None
    rank = {}
    for source, label, hidden in zip(first.source_M.tolist(), first.label_M.tolist(), first.hidden_MH, strict=True):
        best = drafter.ids[drafter.logits(hidden).topk(5).indices].tolist()
        token = int(batch.token_BT.flatten()[label])
        rank[source] = best.index(token) if token in best else 5
    assert set(hits.rank_MK[:, 0].tolist()) <= set(rank.values()) and len(hits.rank_MK) > 3


def test_eagle3_growing_steps_join_after_equal_parts_of_training() -> None:
    drafter = drafter_of(steps=3, growing_steps=True).train()
    batch = packed_batch(drafter, tiny_target())
    done = [0.001, 1 / 3, 0.34, 2 / 3, 0.67, 1.0]
    assert [len(list(drafter.predict(replace(batch, progress=share)))) for share in done] == [1, 1, 2, 2, 3, 3]
    assert len(list(drafter.eval().predict(replace(batch, progress=0.001)))) == 4


def test_eagle3_norm_output_and_fc_norm_act_only_if_enabled() -> None:
    for norm_output in (False, True):
        drafter = drafter_of(norm_output=norm_output)
        drafter.norm.weight.data.zero_()
        out = drafter.leave(torch.ones(1, 1, 32), torch.ones(1, 1, 32))
        assert bool((out == 0).all()) is norm_output
    drafter = drafter_of(fc_norm=True)
    assert [n for n, _ in drafter.named_parameters() if n.startswith("fc_norm")] == [f"fc_norm.{i}.weight" for i in range(3)]
    states = {b: torch.randn(1, 4, 32) for b in drafter.taps.blocks}
    torch.testing.assert_close(drafter.fuse({b: 50 * s for b, s in states.items()}), drafter.fuse(states), atol=1e-3, rtol=1e-3)


def test_eagle3_invalid_options_are_refused() -> None:
    target = tiny_target()
    wrong: tuple[dict[str, Any], ...] = ({"draft_vocab": 0}, {"draft_vocab": 65}, {"draft_length": 0}, {"layers": 0})
    for options in ({"steps": 0}, {"target_layer_rule": "last"}, *wrong):
        with pytest.raises(UserError, match=rf"drafter\.{next(iter(options))} is "):
            FAMILY.build(Eagle3Options(**options), target)
    with pytest.raises(UserError, match="norm_before_fc are true"):
        Eagle3(Eagle3Options(fc_norm=True, norm_before_fc=True), target)
    with pytest.raises(UserError, match=r"qk_norm is true with drafter\.layer\.kv_lora_rank, .*; set one of them"):
        Eagle3(Eagle3Options(qk_norm=True, **LATENT), target)


CHECKS = [
    contract.test_drafter_coupled_output_equals_plain_sampling,
    contract.test_drafter_training_predictions_equal_draft_tokens,
    contract.test_drafter_depth_limit_cuts_same_draft_tree,
    contract.test_drafter_sampling_follows_target_distribution,
]
FULL: list[dict[str, Any]] = [
    {"target_layer_ids": [0, 1, 3], "draft_vocab": 40, "norm_output": True, "fc_norm": True},
    {"target_layer_ids": [0, 1, 3], "draft_vocab": 50, "draft_length": 3, "tree": "dynamic", "width": 2, "nodes": 10},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "options"),
    [*product(CHECKS[:-1], FULL), (CHECKS[-1], FULL[0]), pytest.param(CHECKS[-1], FULL[1], marks=pytest.mark.grid)],
)
def test_eagle3_draft_vocabulary_passes_family_contract(
    check: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(contract.SHAPES, "eagle3", options)
    check("eagle3")


@pytest.mark.parametrize("options", [*FULL, FULL[1] | LATENT])
def test_eagle3_draft_vocabulary_and_latents_greedy_output_equals_plain_and_reloads(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(contract.SHAPES, "eagle3", options)
    contract.test_drafter_greedy_output_equals_plain_decoding("eagle3", 1.0, 4)
    contract.test_drafter_reloaded_checkpoint_drafts_same_tokens("eagle3", tmp_path)
