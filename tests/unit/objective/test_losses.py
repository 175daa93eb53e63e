"""The chunked objective against a whole-tensor computation, values and gradients."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.nn import functional as F

from drafttrain.core.errors import UserError
from drafttrain.drafters import families
from drafttrain.features.online import Online
from drafttrain.features.padded import rows_of
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.drafter import Drafter
from drafttrain.model.target import FINAL, Taps
from drafttrain.objective.losses import LossOptions, Objective, teacher_forced
from drafttrain.ops import jit
from drafttrain.ops.divergence import AT_ONCE, LOSSES, OF_DISTRIBUTIONS, divergence, reference, scores
from drafttrain.targets.hf import HFTarget
from tests.helpers import tiny_target
from tests.tiny import built

ARCHITECTURES = ["llama", "mistral-sliding", "gpt2", "gemma3-sliding"]
# a family of each kind of prediction: plain, for every step at once, with a loss of its own, with a confidence, not counted,
# by a head that steps share, over a choice of tokens
OBJECTIVE = ("medusa", "draft_model", "eagle", "dspark", "dflash2", "xpress", "lilicorr")
# one of each attention of training: none, on own outputs, the target's block, blocks, its own, the target's forward, chains
PACKED = ("medusa", "eagle3", "mtp_native", "dflash", "peagle", "draft_model", "pard", "uno")


def padded_batch(vocab: int = 64) -> TrainBatch:
    generator = torch.Generator().manual_seed(3)
    token = torch.randint(0, vocab, (3, 14), generator=generator)
    document = torch.zeros_like(token)
    document[1, 10:], document[2, 6:] = -1, -1
    mask = torch.rand(token.shape, generator=generator) < 0.7
    return TrainBatch(token, torch.arange(14).expand(3, 14), document, mask & (document >= 0))


WIDE = ("lilicorr", "xpress")  # families whose default size takes seconds for each loss


def drafter_of(name: str, target: HFTarget, **options: int) -> Drafter:
    drafter = built(name, target, small=name in WIDE, **options)
    torch.manual_seed(2)
    for parameter in drafter.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return drafter


def test_divergence_values_equal_torch_formulas() -> None:
    q = torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    p = torch.randn(50, 9, generator=torch.Generator().manual_seed(1))
    label = torch.arange(50) % 9
    torch.testing.assert_close(
        divergence("ce", q.log_softmax(-1), p.log_softmax(-1), label), F.cross_entropy(q, label, reduction="none")
    )
    kl = F.kl_div(q.log_softmax(-1), p.softmax(-1), reduction="none").sum(-1)
    torch.testing.assert_close(divergence("kl", q.log_softmax(-1), p.log_softmax(-1), label), kl)
    alpha = torch.minimum(q.softmax(-1), p.softmax(-1)).sum(-1)
    torch.testing.assert_close(divergence("lk", q.log_softmax(-1), p.log_softmax(-1), label), -alpha.log())
    torch.testing.assert_close(divergence("tvd", q.log_softmax(-1), p.log_softmax(-1), label), 1 - alpha)
    torch.testing.assert_close(
        divergence("kl", p.log_softmax(-1), p.log_softmax(-1), label), torch.zeros(50), atol=1e-6, rtol=0
    )
    with pytest.raises(ValueError, match=f"choose {', '.join(LOSSES)}"):
        divergence("mse", q, p, label)


def test_lk_hybrid_loss_and_gradient_equal_the_formula() -> None:
    """Its weight follows the overlap, and is held fixed in the gradient."""
    q, p = (torch.randn(50, 9, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    q.requires_grad_()
    alpha = torch.minimum(q.softmax(-1), p.softmax(-1)).sum(-1)
    weight = torch.exp(-3 * alpha.detach())
    kl = F.kl_div(q.log_softmax(-1), p.softmax(-1), reduction="none").sum(-1)
    expected = weight * kl + (1 - weight) * (1 - alpha)
    (gradient,) = torch.autograd.grad(expected.sum(), q)
    found = scores(q.detach(), p, torch.arange(50) % 9, "lk_hybrid", want_grad=True)
    torch.testing.assert_close((found.loss_C, found.grad_logits_CV), (expected.detach(), gradient))


def test_scores_some_rows_at_once_are_those_of_all_rows(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    close = {"rtol": 1e-5, "atol": 1e-6}  # kernels of other sizes add up in another order
    label = torch.arange(7)
    for name, rows in product(LOSSES, (1, 3, 7, 8)):
        with subtests.test(name=name, rows=rows):
            monkeypatch.setitem(AT_ONCE, "cpu", rows * 11)
            q, p = (torch.randn(7, 11, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
            whole, parts = reference(q, p, label, name, want_grad=True), scores(q, p, label, name, want_grad=True)
            for a, b in zip(parts, whole, strict=True):
                assert a is not None and b is not None
                torch.testing.assert_close(a, b, **close)
            assert scores(q, p, label, name, want_grad=False).grad_logits_CV is None
            assert scores(q, p, label, name, want_grad=True, out=q).grad_logits_CV is q
            torch.testing.assert_close(q, whole.grad_logits_CV, **close)


def test_loss_options_chunk_is_bounded_by_vocabulary() -> None:
    options = LossOptions(chunk=1024)
    assert [options.at_once(vocab) for vocab in (2048, 131_072, 262_144, 1 << 30)] == [1024, 1024, 512, 1]
    assert LossOptions(chunk=7).at_once(262_144) == 7


@pytest.mark.sampled(name=OBJECTIVE)
@pytest.mark.parametrize("chunk", [7, 4096])  # recomputed in the backward pass, or whole
@pytest.mark.parametrize("loss", ["ce", "kl", "rkl", "jsd", "tvd", "lk", "lk_hybrid"])
@pytest.mark.parametrize("name", sorted(families()))
def test_objective_chunked_loss_and_gradients_equal_naive(name: str, loss: str, chunk: int) -> None:
    target = tiny_target()
    drafter = drafter_of(name, target).train()
    if not drafter.trained:
        pytest.skip("trains nothing: it has no loss")
    filled = Online(target, drafter.taps).fill(padded_batch())
    total, counts = Objective(drafter, target, LossOptions(loss, chunk))(filled)
    total.backward()
    chunked = [p.grad.clone() for p in drafter.parameters()]
    drafter.zero_grad()
    naive = torch.zeros(())
    final, token = filled.hidden[FINAL].flatten(0, 1), filled.token_BT.flatten()
    totals = []
    for prediction in drafter.predict(filled):
        q = prediction.head(prediction.hidden_MH)
        p = target.head(final[prediction.label_M - 1])
        naive = naive + (prediction.weight * naive_loss(loss, q, p, token[prediction.label_M])).sum()
        naive = naive if prediction.aux is None else naive + prediction.aux
        if prediction.confidence is not None:
            naive = naive + doubt(prediction, q, p)
        if not prediction.counted:
            continue
        totals.append(len(q))
        assert float(counts.correct[prediction.step]) == float((q.argmax(-1) == p.argmax(-1)).sum())
    naive.backward()
    torch.testing.assert_close(total, naive)
    assert counts.total.tolist()[: len(totals)] == totals
    for a, p in zip(chunked, drafter.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, atol=1e-5, rtol=1e-4)


def brier(log_q_CV: torch.Tensor, log_p_CV: torch.Tensor, label_C: torch.Tensor) -> torch.Tensor:
    """Weighted by p, so that it is another loss where draft and target change places."""
    return (log_p_CV.exp() * (log_p_CV.exp() - log_q_CV.exp()).square()).sum(-1)


def test_new_loss_where_kernels_serve_is_differentiated_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "brier", brier)
    monkeypatch.setattr(jit, "serves", lambda *_: True)  # as on a GPU
    q, p, label, row = torch.randn(5, 11), torch.randn(3, 11), torch.arange(5), torch.tensor([0, 2, 1, 1, 0])
    q_grad = q.clone().requires_grad_()
    loss = brier(q_grad.log_softmax(-1), p[row].log_softmax(-1), label)
    loss.sum().backward()
    found = scores(q, p, label, "brier", want_grad=True, out=q, row_C=row)
    assert found.grad_logits_CV is q
    torch.testing.assert_close((found.loss_C, q), (loss.detach(), q_grad.grad))


@pytest.mark.parametrize("name", OBJECTIVE)
def test_new_loss_of_one_function_trains_as_written_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "brier", brier)
    target, options = tiny_target(), LossOptions("brier", 7)
    options.check()
    drafter = drafter_of(name, target).train()
    filled = Online(target, drafter.taps).fill(padded_batch())
    total, _ = Objective(drafter, target, options)(filled)
    gradients = torch.autograd.grad(total, list(drafter.parameters()), materialize_grads=True)
    final, token, expected = filled.hidden[FINAL].flatten(0, 1), filled.token_BT.flatten(), torch.zeros(())
    for prediction in drafter.predict(filled):
        q, p = prediction.head(prediction.hidden_MH), target.head(final[prediction.label_M - 1])
        expected = expected + (prediction.weight * naive_loss("brier", q, p, token[prediction.label_M])).sum()
        expected = expected if prediction.aux is None else expected + prediction.aux
        if prediction.confidence is not None:
            expected = expected + doubt(prediction, q, p)
    torch.testing.assert_close(total, expected)
    written_out = torch.autograd.grad(expected, list(drafter.parameters()), materialize_grads=True)
    torch.testing.assert_close(gradients, written_out, atol=1e-5, rtol=1e-4)


def naive_loss(name: str, q_MV: torch.Tensor, p_MV: torch.Tensor, label_M: torch.Tensor) -> torch.Tensor:
    """Over what the head offers, row by row; 0 where it does not offer what is to be learnt."""
    losses = []
    for q_V, p_V, label in zip(q_MV, p_MV, label_M.tolist(), strict=True):
        token_D = (q_V > -torch.inf).nonzero()[:, 0].tolist()
        best = int(p_V.argmax())
        learnt = [label] if name == "ce" else [best] if name in OF_DISTRIBUTIONS else [label, best]
        if not set(learnt) <= set(token_D):
            losses.append(torch.zeros(()))
            continue
        place = torch.tensor([token_D.index(label) if label in token_D else 0])
        q, p = (x[token_D].log_softmax(-1)[None] for x in (q_V, p_V))
        losses.append(divergence(name, q, p, place)[0])
    return torch.stack(losses) if losses else torch.zeros(0)


def doubt(prediction: Prediction, q_MV: torch.Tensor, p_MV: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of a confidence with the share of its draft's law that is accepted."""
    assert prediction.confidence is not None
    confidence_M = prediction.confidence(prediction.hidden_MH).sigmoid()
    share_M = torch.minimum(q_MV.softmax(-1), p_MV.softmax(-1)).sum(-1).detach()
    apart_M = -(share_M * confidence_M.log() + (1 - share_M) * (1 - confidence_M).log())
    return (prediction.weight * apart_M).sum()


@pytest.mark.parametrize("chunk", [7, 4096])
@pytest.mark.parametrize("name", ["medusa", "dflash2"])
def test_objective_mix_equals_weighted_sum_of_losses(name: str, chunk: int) -> None:
    target, mix = tiny_target(), {"ce": 0.1, "tvd": 1.8, "kl": 0.5}
    drafter = drafter_of(name, target).train()
    filled = Online(target, drafter.taps).fill(padded_batch())
    parameters = list(drafter.parameters())

    def found(options: LossOptions) -> tuple[torch.Tensor, ...]:
        total, _ = Objective(drafter, target, options)(filled)
        return total, *torch.autograd.grad(total, parameters, allow_unused=True)

    parts = [found(LossOptions(part, chunk)) for part in mix]
    for whole, *apart in zip(found(LossOptions("mix", chunk, mix)), *parts, strict=True):
        torch.testing.assert_close(whole, sum(w * x for w, x in zip(mix.values(), apart, strict=True)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OBJECTIVE)
def test_objective_without_rows_has_loss_and_gradients_of_the_others(name: str) -> None:
    """A row as padding counts for nothing, whatever its states were."""
    target = tiny_target()
    drafter, batch = drafter_of(name, target), Online(target, Taps(tuple(range(4)), final=True)).fill(padded_batch())
    objective = Objective(drafter, target, LossOptions())
    for key, state_BTH in batch.hidden.items():
        batch.hidden[key] = state_BTH.index_fill(0, torch.tensor([2]), torch.nan)
    found = [objective(part) for part in (batch.without([2], 5), rows_of(batch, 0, 2))]
    (loss, counts), (expected, expected_counts) = found
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5) and not bool(counts.nonfinite_2B.any())
    torch.testing.assert_close(counts.packed(), expected_counts.packed())
    loss.backward()
    assert all(bool(p.grad.isfinite().all()) for p in drafter.parameters() if p.grad is not None)


def test_objective_finds_rows_with_states_or_losses_that_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    batch = Online(target, Taps(final=True)).fill(padded_batch())
    objective = Objective(drafter_of("medusa", target), target, LossOptions())
    batch.hidden[FINAL][1, 2] = torch.inf
    assert objective(batch)[1].nonfinite_2B.tolist() == [[False, True, False], [False, True, False]]
    batch.hidden[FINAL][1, 2] = 1e30
    monkeypatch.setattr(HFTarget, "head", lambda self, x_UH: 1e9 * self.model.lm_head(x_UH))  # its product overflows
    assert objective(batch)[1].nonfinite_2B.tolist() == [[False, False, False], [False, True, False]]


def test_loss_options_whose_mix_does_not_fit_are_refused(subtests: pytest.Subtests) -> None:
    wrong: list[tuple[str, dict[str, float]]]
    wrong = [("mix", {}), ("kl", {"ce": 1.0}), ("mix", {"mse": 1.0}), ("mix", {"ce": 0.0})]
    for name, mix in wrong:
        with subtests.test(name=name, mix=mix), pytest.raises(UserError, match=r"loss\."):
            LossOptions(name, mix=mix).check()


@pytest.mark.sampled(name=OBJECTIVE)
@pytest.mark.parametrize("name", sorted(families()))
def test_objective_entropy_drop_leaves_hardest_positions_out_at_first(name: str) -> None:
    target = tiny_target()
    drafter = drafter_of(name, target).train()
    if not drafter.trained:
        pytest.skip("trains nothing: it has no loss")
    filled = Online(target, drafter.taps).fill(padded_batch())
    objective, plain = (Objective(drafter, target, LossOptions("kl", 7, entropy_drop=drop)) for drop in (0.8, 0.0))
    torch.testing.assert_close(objective(filled, 1.0)[0], plain(filled, 1.0)[0])
    predictions = list(drafter.predict(replace(filled, progress=0.5)))
    final, token = filled.hidden[FINAL].flatten(0, 1), filled.token_BT.flatten()
    positions = sorted({int(label) - 1 for p in predictions for label in p.label_M})
    entropy = {at: float(torch.distributions.Categorical(logits=target.head(final[at])).entropy()) for at in positions}
    hardest = sorted(positions, key=lambda at: -entropy[at])[: int(0.4 * len(positions))]
    expected = torch.zeros(())
    for prediction in predictions:
        q, p = prediction.head(prediction.hidden_MH), target.head(final[prediction.label_M - 1])
        kept = torch.tensor([float(int(label) - 1 not in hardest) for label in prediction.label_M])
        prediction = replace(prediction, weight=prediction.weight * kept)
        expected = expected + (prediction.weight * naive_loss("kl", q, p, token[prediction.label_M])).sum()
        expected = expected if prediction.aux is None else expected + prediction.aux
        if prediction.confidence is not None:
            expected = expected + doubt(prediction, q, p)
    total, counts = objective(filled, 0.5)
    torch.testing.assert_close(total, expected)
    assert torch.equal(counts.total, plain(filled, 0.5)[1].total)
    found, written_out = (
        torch.autograd.grad(loss, list(drafter.parameters()), materialize_grads=True) for loss in (total, expected)
    )
    torch.testing.assert_close(found, written_out, atol=1e-5, rtol=1e-4)


def test_objective_entropy_drop_of_e2e_tv_is_refused() -> None:
    with pytest.raises(UserError, match=r"loss\.entropy_drop is 0\.2"):
        LossOptions("e2e_tv", entropy_drop=0.2).check()


@pytest.mark.sampled(name=OBJECTIVE)
@pytest.mark.parametrize("chunk", [7, 4096])
@pytest.mark.parametrize("name", sorted(families()))
def test_objective_e2e_tv_loss_and_gradients_equal_naive(name: str, chunk: int) -> None:
    """Against a loop over sources and depths, with the laws computed whole."""
    target = tiny_target()
    drafter = drafter_of(name, target).train()
    if not drafter.trained:
        pytest.skip("trains nothing: it has no loss")
    filled = Online(target, drafter.taps).fill(padded_batch())
    total, counts = Objective(drafter, target, LossOptions("e2e_tv", chunk))(filled)
    total.backward()
    found = [p.grad.clone() for p in drafter.parameters()]
    drafter.zero_grad()
    naive, counted = naive_end_to_end(drafter, target, filled)
    naive.backward()
    torch.testing.assert_close(total, naive)
    torch.testing.assert_close(float(counts.loss.sum()), counted)
    for a, p in zip(found, drafter.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk", [7, 4096])
def test_objective_e2e_tv_draft_vocabulary_equals_whole_vocabulary_loss(chunk: int) -> None:
    """What the drafter has no token for counts as not accepted: nothing is renormalised, nothing left out."""
    target = tiny_target()
    drafter = drafter_of("eagle3", target, draft_vocab=20).train()
    filled = Online(target, drafter.taps).fill(padded_batch())
    total, _ = Objective(drafter, target, LossOptions("e2e_tv", chunk))(filled)
    naive, _ = naive_end_to_end(drafter, target, filled)
    torch.testing.assert_close(total, naive)
    parameters = list(drafter.parameters())
    for a, b in zip(torch.autograd.grad(total, parameters), torch.autograd.grad(naive, parameters), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def naive_end_to_end(drafter: Drafter, target: HFTarget, filled: TrainBatch) -> tuple[torch.Tensor, float]:
    """The loss with all its other parts, and what the log sums up of it."""
    final, K = filled.hidden[FINAL].flatten(0, 1), drafter.draft_length
    alpha: dict[tuple[int, int], torch.Tensor] = {}  # by source and depth
    other = torch.zeros(())
    whole = False
    for prediction in drafter.predict(filled):
        q = prediction.whole(prediction.head(prediction.hidden_MH), target.shape.vocab_size).softmax(-1)
        p = target.head(final[prediction.label_M - 1]).softmax(-1)
        accepted = torch.minimum(q, p).sum(-1)
        other = other if prediction.aux is None else other + prediction.aux
        if prediction.confidence is not None:
            other = other + doubt(prediction, q.log(), p.log())
        if not prediction.counted:
            other = other + (prediction.weight * (1 - accepted)).sum()
            continue
        whole = whole or prediction.every_step
        for i, (source, label) in enumerate(zip(prediction.source_M.tolist(), prediction.label_M.tolist(), strict=True)):
            for depth in range(K) if prediction.every_step else [prediction.step]:
                start = label - 2 - depth if prediction.every_step else source
                if start >= 0 and start // 14 == label // 14:
                    alpha[start, depth] = accepted[i]
    parts = []
    for start, depth in alpha:
        parts.append(1 - torch.stack([alpha[start, d] for d in range(depth + 1) if (start, d) in alpha]).prod())
    loss = torch.stack(parts).double().sum()  # as the log sums it up
    return other + (loss / K).float(), float(loss.detach()) * (K if whole else 1)


@pytest.mark.sampled(name=PACKED)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", sorted(families()))
def test_objective_packed_documents_have_losses_of_separate_ones(name: str, architecture: str) -> None:
    """A document's losses are the same alone and behind another one; so are the target's states."""
    target = tiny_target(architecture)
    if name == "mtp_native" and architecture != "llama":
        pytest.skip("refused, as the test below says")
    kept = {"retention": 1} if "retention" in families()[name].options.__dataclass_fields__ else {}  # all slots, none by lot
    drafter = drafter_of(name, target, **kept).train(architecture != "gpt2")  # whose copies have dropout
    if not drafter.trained:
        pytest.skip("trains nothing: it has no loss")
    generator = torch.Generator().manual_seed(5)
    first, second = torch.randint(0, 64, (1, 6), generator=generator), torch.randint(0, 64, (1, 7), generator=generator)
    states = [Online(target, drafter.taps).fill(one_document(t)) for t in (first, second)]
    packed = TrainBatch(
        torch.cat([first, second], 1),
        torch.cat([torch.arange(6), torch.arange(7)])[None],
        torch.tensor([[0] * 6 + [1] * 7]),
        torch.ones(1, 13, dtype=torch.bool),
    )
    packed = Online(target, drafter.taps).fill(packed)
    for key, state in packed.hidden.items():
        torch.testing.assert_close(state, torch.cat([s.hidden[key] for s in states], 1), rtol=1e-4, atol=1e-4)
    objective = Objective(drafter, target, LossOptions())
    alone = sum(objective(s)[0] for s in states)
    torch.testing.assert_close(objective(packed)[0], alone)


def test_mtp_native_without_plain_blocks_is_refused() -> None:
    """Its own words for blocks with windows, and for blocks without rotary positions."""
    for architecture, says in (("mistral-sliding", "sliding windows or chunks"), ("gpt2", "no block with plain attention and")):
        with pytest.raises(UserError, match=says):
            drafter_of("mtp_native", tiny_target(architecture))


def one_document(token: torch.Tensor) -> TrainBatch:
    return TrainBatch(
        token, torch.arange(token.shape[1])[None], torch.zeros_like(token), torch.ones_like(token, dtype=torch.bool)
    )


def test_teacher_forced_counts_only_sources_with_all_labels() -> None:
    target = tiny_target()
    drafter = drafter_of("medusa", target).eval()
    batch = Online(target, drafter.taps).fill(padded_batch())
    hits = teacher_forced(drafter, target, batch)
    mask, document = batch.mask_BT, batch.document_BT
    whole = [
        (b, t)
        for b in range(3)
        for t in range(14)
        if t + drafter.draft_length + 1 < 14
        and all(mask[b, t + k] and document[b, t + k] >= 0 for k in range(1, drafter.draft_length + 2))
    ]
    assert hits.rank_MK.shape == (len(whole), drafter.draft_length)
    assert hits.length_D == [n for n in (sum(b == row for b, _ in whole) for row in range(3)) if n]
    assert int(hits.rank_MK.min()) >= 0 and int(hits.rank_MK.max()) <= 10
    assert float(hits.acceptance_MK.min()) >= 0.0 and float(hits.acceptance_MK.max()) <= 1.0 + 1e-6
