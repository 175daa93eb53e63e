"""The target's head runs once per position, the drafter's once per prediction, and the gradients are those of a plain loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import peak
from drafttrain.drafters import families
from drafttrain.features.online import Online
from drafttrain.model.batch import Prediction, Shared, Top, TrainBatch
from drafttrain.model.drafter import Drafter
from drafttrain.model.proposal import Proposal
from drafttrain.model.target import FINAL, Taps
from drafttrain.objective.chunks import LossChunk, chunks
from drafttrain.objective.losses import LossOptions, Objective, teacher_forced
from drafttrain.objective.scores import shared_steps
from drafttrain.objective.scoring import Scoring
from drafttrain.objective.teacher import target_distribution
from drafttrain.ops import divergence
from drafttrain.targets.hf import HFTarget
from tests.helpers import tiny_target
from tests.unit.objective.test_losses import naive_loss, padded_batch

LOSSES = list(divergence.LOSSES)
MIX = {"ce": 0.1, "tvd": 1.8, "kl": 0.5}
CHUNKS = [7, 4096]


def made(name: str, target: HFTarget, **options: Any) -> Drafter:
    family = families()[name]
    drafter = family.build(family.options(**options), target)
    torch.manual_seed(2)
    for parameter in drafter.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return drafter.train()


def counted(function: Callable[[Tensor], Tensor], rows: list[int]) -> Callable[[Tensor], Tensor]:
    def call(hidden: Tensor) -> Tensor:
        rows.append(hidden.shape[:-1].numel())
        return function(hidden)

    return call


@pytest.mark.sampled
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(
    ("name", "options"),
    [("eagle3", {"steps": 7}), ("eagle3", {"steps": 7, "draft_vocab": 20}), ("medusa", {}), ("redrafter", {}), ("peagle", {})],
)
def test_objective_runs_each_head_once_per_prediction(
    name: str, options: dict[str, Any], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's for each position whose next token is a label; the drafter's for each prediction, backward included."""
    target, of_target, of_drafter = tiny_target(), list[int](), list[int]()
    drafter = made(name, target, **options)
    filled = Online(target, drafter.taps).fill(padded_batch())
    predictions = list(drafter.predict(filled))
    heads: Any = {p.head if isinstance(p.head, torch.nn.Module) else drafter.lm_head for p in predictions}
    for head in heads:
        monkeypatch.setattr(head, "forward", counted(head.forward, of_drafter))
    monkeypatch.setattr(target, "head", counted(target.head, of_target))
    Objective(drafter, target, LossOptions(chunk=chunk))(filled)[0].backward()
    assert sum(of_target) == len(torch.cat([p.label_M for p in predictions]).unique())
    assert sum(of_drafter) == sum(len(p.label_M) for p in predictions)
    assert max(of_target + of_drafter) <= chunk


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_teacher_forced_runs_target_head_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rows = tiny_target(), list[int]()
    drafter = made(name, target).eval()
    filled = Online(target, drafter.taps).fill(padded_batch())
    labels = torch.cat([p.label_M for p in drafter.predict(filled)])
    monkeypatch.setattr(target, "head", counted(target.head, rows))
    teacher_forced(drafter, target, filled)
    assert sum(rows) == len(labels.unique())


def test_objective_e2e_tv_runs_target_head_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    target, rows = tiny_target(), list[int]()
    drafter = made("eagle3", target, steps=7)
    filled = Online(target, drafter.taps).fill(padded_batch())
    labels = torch.cat([p.label_M for p in drafter.predict(filled)])
    monkeypatch.setattr(target, "head", counted(target.head, rows))
    Objective(drafter, target, LossOptions("e2e_tv", 7))(filled)[0].backward()
    assert sum(rows) == 2 * len(labels.unique())


def gradients(loss: Tensor, drafter: Drafter) -> list[Tensor]:
    found = torch.autograd.grad(loss, list(drafter.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, drafter.parameters(), strict=True)]


@pytest.mark.sampled
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("loss", [*LOSSES, "mix"])
def test_objective_draft_vocabulary_loss_and_gradients_equal_naive(loss: str, chunk: int) -> None:
    """Over the drafter's own tokens alone, renormalised; 0 where what is to be learnt is not among them."""
    target = tiny_target()
    drafter = made("eagle3", target, steps=3, draft_vocab=20)
    filled = Online(target, drafter.taps).fill(padded_batch())
    mix = MIX if loss == "mix" else {}
    total, _ = Objective(drafter, target, LossOptions(loss, chunk, mix))(filled)
    naive, final, token = torch.zeros(()), filled.hidden[FINAL].flatten(0, 1), filled.token_BT.flatten()
    for prediction in drafter.predict(filled):
        q = prediction.whole(prediction.head(prediction.hidden_MH), target.shape.vocab_size)
        p, label = target.head(final[prediction.label_M - 1]), token[prediction.label_M]
        for name, weight in (mix or {loss: 1.0}).items():
            naive = naive + prediction.weight * weight * naive_loss(name, q, p, label).sum()
    torch.testing.assert_close(total, naive)
    for a, b in zip(gradients(total, drafter), gradients(naive, drafter), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_entropy_of_top_k_distribution_is_that_with_all_other_tokens_as_one() -> None:
    target, batch = tiny_target(), padded_batch()
    filled = Online(target, Taps(final=True)).fill(batch)
    log_p = target.head(filled.hidden[FINAL]).log_softmax(-1)
    best, place = log_p.topk(5), torch.arange(batch.token_BT.numel())
    top = Top(best.indices, best.values, (1 - best.values.exp().sum(-1)).log())
    merged = torch.cat([top.log_p_BTk, top.log_rest_BT[..., None]], -1).flatten(0, 1)
    expected = torch.distributions.Categorical(logits=merged).entropy()
    torch.testing.assert_close(target_distribution(replace(filled, top=top), target).entropy(place), expected)
    whole = target_distribution(filled, target).entropy(place)
    torch.testing.assert_close(whole, torch.distributions.Categorical(logits=log_p.flatten(0, 1)).entropy())


@pytest.mark.sampled
@pytest.mark.parametrize("loss", ["kl", "mix", "e2e_tv"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("eagle3", {"draft_vocab": 20}), ("dspark", {}), ("dflash2", {"candidates": 4}), ("xpress", {}), ("dfly", {})],
)
def test_objective_top_k_teacher_chunk_size_changes_nothing(name: str, options: dict[str, Any], loss: str) -> None:
    """The target's tail then depends on the drafter's logits, step by step."""
    target = tiny_target()
    drafter = made(name, target, **options)
    filled = Online(target, drafter.taps).fill(padded_batch())
    log_p = target.head(filled.hidden[FINAL]).log_softmax(-1)
    best = log_p.topk(5)
    rest = (1 - best.values.exp().sum(-1)).log()
    filled = replace(filled, top=Top(best.indices, best.values, rest))
    mix = MIX if loss == "mix" else {}
    one, two = (Objective(drafter, target, LossOptions(loss, chunk, mix))(filled)[0] for chunk in CHUNKS)
    torch.testing.assert_close(one, two)
    for a, b in zip(gradients(one, drafter), gradients(two, drafter), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_objective_bfloat16_gradients_are_as_close_as_naive_loss(name: str) -> None:
    """Both compared with float32: chunks add no more than rounding to the gradient's own dtype."""
    target = tiny_target()
    drafter = made(name, target)
    filled = Online(target, drafter.taps).fill(padded_batch())
    exact = gradients(Objective(drafter, target, LossOptions(chunk=7))(filled)[0], drafter)
    drafter.to(torch.bfloat16)
    ours = gradients(Objective(drafter, target, LossOptions(chunk=7))(filled)[0], drafter)
    final = filled.hidden[FINAL].flatten(0, 1)
    low = replace(filled, hidden={key: state.bfloat16() for key, state in filled.hidden.items()})
    naive = torch.zeros(())
    for p in drafter.predict(low):
        log_p = target.head(final[p.label_M - 1]).log_softmax(-1)
        kl = F.kl_div(p.head(p.hidden_MH).float().log_softmax(-1), log_p, reduction="none", log_target=True)
        naive = naive + p.weight * kl.sum()
    plain = gradients(naive, drafter)

    def apart(found: list[Tensor]) -> float:
        return float(sum((a.float() - b).square().sum() for a, b in zip(found, exact, strict=True)) ** 0.5)

    assert apart(ours) <= 1.5 * apart(plain)
    assert all(g.dtype == torch.bfloat16 for g in ours)


def test_objective_gradients_scale_with_loss_and_second_backward_is_refused() -> None:
    target = tiny_target()
    drafter = made("medusa", target)
    filled = Online(target, drafter.taps).fill(padded_batch())
    objective = Objective(drafter, target, LossOptions(chunk=7))
    once, thrice = gradients(objective(filled)[0], drafter), gradients(3.0 * objective(filled)[0], drafter)
    for a, b in zip(once, thrice, strict=True):
        torch.testing.assert_close(3.0 * a, b)
    loss = objective(filled)[0]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        loss.backward()


def test_objective_without_gradients_gives_same_loss() -> None:
    target = tiny_target()
    for name, loss in (("eagle3", "kl"), ("dspark", "e2e_tv")):
        drafter = made(name, target)
        filled = Online(target, drafter.taps).fill(padded_batch())
        objective = Objective(drafter, target, LossOptions(loss, 7))
        with torch.no_grad():
            plain = objective(filled)[0]
        assert not plain.requires_grad
        torch.testing.assert_close(plain, objective(filled)[0].detach())


@pytest.mark.parametrize("name", ["medusa", "xpress"])
def test_objective_batch_without_labels_gives_zero_gradients(name: str) -> None:
    target = tiny_target()
    drafter, batch = made(name, target), padded_batch()
    filled = Online(target, drafter.taps).fill(replace(batch, mask_BT=torch.zeros_like(batch.mask_BT)))
    total, counts = Objective(drafter, target, LossOptions())(filled)
    total.backward()
    assert float(total.detach()) == 0.0 and not counts.total.any()
    assert all(p.grad is not None and not p.grad.any() for p in drafter.parameters())


def whole(x: Any, n: int) -> list[int]:
    return list(range(n))[x] if isinstance(x, slice) else x.tolist()


def checked(chunk: LossChunk, positions: list[Tensor], heads: list[str], at_once: int) -> list[tuple[int, int]]:
    """(step, row) of its predictions, whose positions must be right."""
    found, known = [], chunk.position_U.tolist()
    assert len(known) <= at_once
    for piece in chunk.pieces:
        assert sum(part.count for part in piece) <= at_once and len({heads[part.step] for part in piece}) == 1
        for part in piece:
            rows = whole(part.row_C, len(positions[part.step]))
            places = whole(part.place_C, len(known))
            assert len(rows) == len(places) == part.count
            assert [int(positions[part.step][row]) for row in rows] == [known[place] for place in places]
            found += [(part.step, row) for row in rows]
    return found


def test_chunks_of_any_size_have_every_prediction_once(subtests: pytest.Subtests) -> None:
    positions = [torch.tensor(x) for x in ([2, 3, 4, 8, 9], [3, 4, 9], [9, 2, 3, 3, 3], [], [7])]
    heads = ["a", "a", "b", "b", "b"]
    for at_once in (1, 2, 3, 5, 100):
        with subtests.test(at_once=at_once):
            found = [row for c in chunks(positions, heads, at_once) for row in checked(c, positions, heads, at_once)]
            assert sorted(found) == [(step, row) for step, x in enumerate(positions) for row in range(len(x))]
            assert {part.step for c in chunks(positions, heads, at_once) for p in c.pieces for part in p} == set(range(5))
            known = [position for c in chunks(positions, heads, at_once) for position in c.position_U.tolist()]
            assert known == [2, 3, 4, 7, 8, 9]
            assert list(chunks([], [], at_once)) == []


def test_shared_head_pieces_of_any_size_have_whole_rows(subtests: pytest.Subtests) -> None:
    """Three columns of two kinds. Row 1 has no prediction, row 3 only its second column."""
    columns = [([0, 2, 4, 5], [3, 6, 21, 22]), ([0, 2, 3, 4], [4, 7, 9, 22]), ([5, 0, 2], [24, 5, 8])]
    given = [
        Prediction(column, torch.tensor(label), torch.tensor(label), torch.zeros(6, 2), abs, weight, shared=shared)
        for kind, weight in enumerate((1.0, 0.5))
        for column, (row, label) in enumerate(columns)
        for shared in [Shared(max, kind, column, torch.tensor(row))]
    ]
    (steps,) = shared_steps(given, padded_batch()).values()
    wanted = sorted((row, column, label) for column, pairs in enumerate(columns) for row, label in zip(*pairs, strict=True))
    labels = [label for _, _, label in wanted]
    assert [kind.label_M.tolist() for kind in steps.kinds] == [labels, labels]
    assert [kind.weight.tolist() for kind in steps.kinds] == [[1.0] * 11, [0.5] * 11]
    for column, (_, own) in enumerate(columns):
        assert steps.kinds[0].label_M[steps.number_M(column)].tolist() == own
    for at_once in (1, 6, 12, 13, 1000):
        with subtests.test(at_once=at_once):
            found = []
            for chunk in steps.chunks(7, at_once):
                assert len(chunk.position_U) <= max(at_once, 3)
                for first, second in chunk.pieces:
                    assert first.rows is not None and (first.step, second.step) == (7, 8) and first.row_C == second.row_C
                    rows = whole(first.rows.row_N, 6)
                    assert 2 * 3 * len(rows) <= max(at_once, 6)
                    entries = range(3 * len(rows)) if first.rows.entry_C is None else first.rows.entry_C.tolist()
                    places = chunk.position_U[first.place_C].tolist()
                    assert [label - 1 for label in labels[first.row_C]] == places
                    found += [(rows[entry // 3], entry % 3, place + 1) for entry, place in zip(entries, places, strict=True)]
            assert found == wanted


def test_chunks_contiguous_positions_become_slices() -> None:
    (chunk,) = chunks([torch.arange(3, 9), torch.tensor([4, 5, 6])], ["a", "b"], 100)
    assert [(p.row_C, p.place_C) for piece in chunk.pieces for p in piece] == [
        (slice(0, 6), slice(0, 6)),
        (slice(0, 3), slice(1, 4)),
    ]


@pytest.mark.sampled(name=["eagle3", "dspark", "peagle", "dflash2", "xpress"])  # the others predict as dflash
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("loss", ["kl", "e2e_tv"])
@pytest.mark.parametrize("name", ["eagle3", "dspark", "peagle", "dflash2", "xpress", "dflare", "dfly"])
def test_objective_with_zero3_parameters_gives_same_gradients(name: str, loss: str, chunk: int) -> None:
    """By torch's own graph, with each piece computed again in the backward pass."""
    target = tiny_target()
    drafter = made(name, target)
    filled = Online(target, drafter.taps).fill(padded_batch())
    objective = Objective(drafter, target, LossOptions(loss, chunk))
    whole, counts = objective(filled)
    wanted = gradients(whole, drafter)
    next(drafter.parameters()).ds_id = 0  # type: ignore[attr-defined]  # as DeepSpeed marks them
    again, counts_again = objective(filled)
    torch.testing.assert_close(again, whole)
    torch.testing.assert_close(counts_again.packed(), counts.packed())
    for a, b in zip(gradients(again, drafter), wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["dspark", "xpress"])
def test_objective_with_zero3_empty_pieces_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes with fewer chunks than others, and fewer pieces in them, call their heads as often."""
    target, rows = tiny_target(), list[int]()
    drafter = made(name, target)
    filled = Online(target, drafter.taps).fill(padded_batch())
    objective = Objective(drafter, target, LossOptions(chunk=200))
    whole, _ = objective(filled)
    wanted = gradients(whole, drafter)
    next(drafter.parameters()).ds_id = 0  # type: ignore[attr-defined]  # as DeepSpeed marks them
    monkeypatch.setattr("drafttrain.objective.chunks.most_of_all", lambda counts: counts + 1)
    monkeypatch.setattr(drafter, "slot_logits", counted(drafter.slot_logits, rows))
    again, _ = objective(filled)
    torch.testing.assert_close(again, whole)
    for a, b in zip(gradients(again, drafter), wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert rows.count(0) > 2


@pytest.mark.parametrize("way", ["weighted", "differentiable"])
def test_scoring_steps_with_same_states_add_gradients(way: str) -> None:
    target = tiny_target()
    drafter = made("medusa", target)
    filled = Online(target, drafter.taps).fill(padded_batch())
    first, distribution = next(iter(drafter.predict(filled))), target_distribution(filled, target)

    def gradient(*weights: float) -> Tensor:
        state_MH = first.hidden_MH.detach().requires_grad_()
        given = [replace(first, hidden_MH=state_MH, weight=weight) for weight in weights]
        scoring = Scoring(given, filled, distribution, {"kl": 1.0}, 7)
        if way == "weighted":
            _, found = scoring.weighted()
            found.attach(torch.zeros((), requires_grad=True)).backward()
        else:
            sum(w * step.loss_M.sum() for w, step in zip(weights, scoring.differentiable(), strict=True)).backward()
        assert state_MH.grad is not None
        return state_MH.grad

    torch.testing.assert_close(gradient(1.0, 0.5), 1.5 * gradient(1.0))


def test_scoring_shared_head_in_mixed_order_equals_separate_scoring() -> None:
    target = tiny_target()
    drafters = [made(name, target) for name in ("medusa", "xpress", "dflash")]
    filled = Online(target, Taps(tuple({block for d in drafters for block in d.taps.blocks}), True)).fill(padded_batch())
    given = [list(drafter.predict(filled)) for drafter in drafters]
    distribution = target_distribution(filled, target)
    apart = [step for own in given for step in Scoring(own, filled, distribution, {"kl": 1.0}, 50).weighted()[0]]
    mixed = [p for turn in zip_longest(*given) for p in turn if p is not None]
    scores = Scoring(mixed, filled, distribution, {"kl": 1.0}, 50).weighted()[0]
    found = {id(prediction): step for prediction, step in zip(mixed, scores, strict=True)}
    for prediction, step in zip((p for own in given for p in own), apart, strict=True):
        torch.testing.assert_close(found[id(prediction)].loss_M, step.loss_M)
        assert torch.equal(found[id(prediction)].top1_M, step.top1_M)


def test_divergence_chosen_rows_are_not_copied_at_once(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    """Of all rows of the target's logits that predictions are compared with, a copy of a few is in memory."""
    torch.manual_seed(0)
    logits_CV, target_logits_UV = torch.randn(48, 512), torch.randn(64, 512)
    chosen_C, label_C = torch.randperm(64)[:48], torch.randint(512, (48,))
    monkeypatch.setitem(divergence.AT_ONCE, "cpu", 4 * 512)

    def both(name: str, row_C: Tensor | None, target_logits: Tensor) -> divergence.Scores:
        with torch.no_grad():
            return divergence.scores(logits_CV, target_logits, label_C, name, True, row_C=row_C)

    whole = logits_CV.numel() * logits_CV.element_size()  # the gradient takes as much, and nothing else should
    for name in divergence.FUSED:
        with subtests.test(name=name):
            copied = both(name, None, target_logits_UV[chosen_C])
            for found, expected in zip(both(name, chosen_C, target_logits_UV), copied, strict=True):
                torch.testing.assert_close(found, expected)
            assert peak(partial(both, name, chosen_C, target_logits_UV)) < 1.9 * whole


class OneHead(nn.Module):
    """The parts of a drafter that `Objective` uses: one prediction for every position, through one output matrix."""

    proposal = Proposal(1)

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.output = nn.Linear(width, vocab, bias=False)

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        pairs = batch.future(2)
        yield Prediction(0, pairs.source_M, pairs.label_M, batch.hidden[FINAL].flatten(0, 1)[pairs.source_M], self.output)


def test_objective_peak_memory_is_bounded_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the length; and whatever the vocabulary, but for its output matrix, where a chunk is as large as it may be."""
    width = 8

    def beyond(length: int, vocab: int) -> int:
        """Its output matrix's gradient, to which every chunk is added in place, is not the chunk's."""
        drafter, head = OneHead(vocab, width), nn.Linear(width, vocab, bias=False).requires_grad_(False)
        token_1T = torch.randint(vocab, (1, length))
        states = {FINAL: torch.randn(1, length, width).requires_grad_()}
        batch = TrainBatch(token_1T, torch.arange(length)[None], torch.zeros_like(token_1T), token_1T >= 0, states)
        target: Any = SimpleNamespace(head=head, shape=SimpleNamespace(vocab_size=vocab))
        objective = Objective(drafter, target, LossOptions("kl", 64))  # type: ignore[arg-type]

        def step() -> None:
            drafter.output.weight.grad = states[FINAL].grad = None
            objective(batch)[0].backward()

        step()
        drafter.output.weight.grad = states[FINAL].grad = None
        return peak(step) - 4 * vocab * width

    monkeypatch.setitem(divergence.AT_ONCE, "cpu", 4 * 2048)
    chunk = 4 * 64 * 2048
    short, long = beyond(256, 2048), beyond(1024, 2048)
    assert 1.5 * chunk < short < 3 * chunk  # the target's logits, and the drafter's, whose gradient takes their place
    assert long - short < 0.3 * chunk
    monkeypatch.setattr("drafttrain.objective.MAX_LOGITS", 64 * 2048)
    assert abs(beyond(256, 8192) - short) < 0.3 * chunk
