"""LiLiCorr's network, walk and losses against loops."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.drafters.dflash import DFlash, DFlashOptions
from drafttrain.drafters.lilicorr import FAMILY, LiLiCorr, LiLiCorrOptions
from drafttrain.model.batch import Top, TrainBatch
from drafttrain.model.drafter import Commit
from drafttrain.model.target import FINAL
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.targets.hf import HFTarget
from tests.helpers import tiny_target
from tests.unit.drafters.test_dflash import packed, slot_states
from tests.unit.drafters.test_dspark import proposed, read
from tests.unit.drafters.test_dynamic_tree import likeliest, token_paths

C, D, FACTORS, HEADS, SCALE = 4, 16, 12, 2, 5.0
SMALL: dict[str, Any] = {"block_size": 5, "layers": 2, "target_layer_ids": [0, 2], "mask_token": 9}
OWN: dict[str, Any] = {"candidates": C, "hidden_size": D, "factor_dim": FACTORS, "heads": HEADS, "logit_scale": SCALE}
Weights = dict[str, Tensor]


def built(target: HFTarget, **options: Any) -> LiLiCorr:
    torch.manual_seed(1)
    drafter = LiLiCorr(LiLiCorrOptions(**SMALL | OWN | options), target).eval().requires_grad_(False)
    for parameter in drafter.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return drafter


def rms(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return x_D / (x_D.square().mean() + eps).sqrt() * weight_D


def naive_scores(
    drafter: LiLiCorr, target: HFTarget, state_KH: Tensor, context_H: Tensor
) -> tuple[list[list[int]], list[list[list[float]]]]:
    """(tokens[k][c], scores[k][i][j]) of one block, one candidate at a time; of the first slot all rows i are the start's."""
    w = {name.removeprefix("lilicorr."): x for name, x in drafter.named_parameters() if name.startswith("lilicorr.")}
    eps = drafter.layer_shape.norm_eps if drafter.layer_shape is not None else 0.0

    def linear(name: str, x: Tensor) -> Tensor:
        return w[f"{name}.weight"] @ x + w[f"{name}.bias"]

    tokens, x = [], []
    for k, state_H in enumerate(state_KH):
        log_q_V = target.head(state_H).log_softmax(-1)
        best = sorted(range(64), key=lambda token, of=log_q_V: -float(of[token]))[:C]  # type: ignore[misc]
        tokens.append(best)
        for rank, token in enumerate(best):
            log_q, most = float(log_q_V[token]), float(log_q_V[best[0]])
            five = torch.tensor([log_q, math.exp(log_q), log_q - most, rank / (C - 1), float(rank == 0)])
            normed = (five - five.mean()) / (five.var(unbiased=False) + 1e-5).sqrt()
            normed = normed * w["feature_norm.weight"] + w["feature_norm.bias"]
            one = linear("token_proj", target.embed(torch.tensor(token))) + linear("pass_hidden_proj", state_H)
            one = one + linear("feature_mlp.down_proj", F.silu(linear("feature_mlp.up_proj", normed)))
            x.append(one + w["slot_embedding"][0, 0, k, 0] + w["rank_embedding"][0, 0, 0, rank])
    for i in range(2):
        x = naive_layer(w, f"layers.{i}", x, eps)
    anchor = rms(linear("context_proj", context_H), w["anchor_norm.weight"], eps)
    outs, ins = [], []
    for one in x:
        y = rms(one, w["output_norm.weight"], eps)
        factor = F.silu(linear("factor_input_proj", torch.cat([y, anchor, y * anchor])))
        outs.append(unit(linear("out_head", factor)))
        ins.append(unit(linear("in_head", factor)))
    begin, scores = unit(linear("anchor_out_head", anchor)), []
    for k in range(len(state_KH)):
        here = ins[k * C : (k + 1) * C]
        before = outs[(k - 1) * C : k * C] if k else [begin] * C
        scores.append([[SCALE * float(a @ b) for b in here] for a in before])
    return tokens, scores


def unit(x: Tensor) -> Tensor:
    return x / max(float(x.norm()), 1e-4)


def naive_layer(w: Weights, name: str, x: list[Tensor], eps: float) -> list[Tensor]:
    """One head and one pair of candidates at a time."""
    normed = [rms(one, w[f"{name}.attn_norm.weight"], eps) for one in x]
    joint = [w[f"{name}.attn.in_proj.weight"] @ one + w[f"{name}.attn.in_proj.bias"] for one in normed]
    wide, out = D // HEADS, []
    for i, one in enumerate(x):
        mixed = []
        for head in range(HEADS):
            at = slice(head * wide, (head + 1) * wide)
            weights = []
            for j in range(len(x)):
                apart = i // C - j // C
                bias = w["relative_slot_bias"][head, apart + SMALL["block_size"] - 1]
                bias = bias + (w["same_slot_bias"][head] if apart == 0 else 0.0)
                weights.append(joint[i][at] @ joint[j][D:][at] / math.sqrt(wide) + bias)
            share = torch.stack(weights).softmax(0)
            mixed.append(sum(share[j] * joint[j][2 * D :][at] for j in range(len(x))))
        one = one + w[f"{name}.attn.out_proj.weight"] @ torch.cat(mixed) + w[f"{name}.attn.out_proj.bias"]
        inner = rms(one, w[f"{name}.mlp_norm.weight"], eps)
        inner = F.silu(w[f"{name}.mlp.up_proj.weight"] @ inner + w[f"{name}.mlp.up_proj.bias"])
        out.append(one + w[f"{name}.mlp.down_proj.weight"] @ inner + w[f"{name}.mlp.down_proj.bias"])
    return out


def of_source(drafter: LiLiCorr, target: HFTarget, batch: TrainBatch, row: int, source: int) -> Any:
    """`naive_scores` of the block after one source."""
    state_SH = slot_states(drafter, target, batch, row, source)  # type: ignore[arg-type]
    fused = torch.cat([batch.hidden[b][row, source] for b in drafter.shape.taps])
    return naive_scores(drafter, target, state_SH[1:], drafter.hidden_norm(drafter.fc(fused)))


def after(tokens: list[int], scores: list[list[float]], before: list[int] | None, token: int) -> list[float]:
    """The scores of a slot's candidates after a token of the slot before; the first of these where it is none."""
    return scores[before.index(token) if before is not None and token in before else 0]


def test_lilicorr_predictions_equal_pair_scores_after_true_token() -> None:
    target = tiny_target()
    drafter = built(target)
    batch, at = read(target, drafter), 4  # type: ignore[arg-type]
    tokens, scores = of_source(drafter, target, batch, 0, at)
    counted = [p for p in drafter.predict(batch) if p.counted]
    assert [p.step for p in counted] == [0, 1, 2, 3]
    for p in counted:
        where = p.source_M.tolist().index(at)
        before = int(batch.token_BT[0, int(p.label_M[where]) - 1])
        row = after(tokens[p.step], scores[p.step], tokens[p.step - 1] if p.step else None, before)
        wanted_V = torch.full((64,), -torch.inf).scatter(0, torch.tensor(tokens[p.step]), torch.tensor(row))
        torch.testing.assert_close(p.head(p.hidden_MH)[where], wanted_V, rtol=1e-4, atol=1e-4)


def test_lilicorr_base_predictions_equal_dflash() -> None:
    target = tiny_target()
    drafter, plain = built(target), DFlash(DFlashOptions(**SMALL), target).eval().requires_grad_(False)
    own = drafter.state_dict()
    plain.load_state_dict({name: own[name] for name in plain.state_dict()})
    batch = read(target, drafter)  # type: ignore[arg-type]
    ours = [p for p in drafter.predict(batch) if not p.counted]
    for a, b in zip(ours, plain.predict(batch), strict=True):
        torch.testing.assert_close(a.head(a.hidden_MH), b.head(b.hidden_MH))
        assert a.weight == b.weight


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_lilicorr_drafts_follow_pair_scores_after_previous_draft(temperature: float) -> None:
    target = tiny_target()
    drafter, sampling = built(target), Sampling(temperature, seed=3)
    batch = read(target, drafter)  # type: ignore[arg-type]
    tree = proposed(drafter, batch, sampling)  # type: ignore[arg-type]
    drafts = tree.token_BN[0].tolist()
    tokens, scores = of_source(drafter, target, batch, 0, batch.token_BT.shape[1] - 2)
    assert len(drafts) == 5
    for k in range(4):
        row = torch.tensor(after(tokens[k], scores[k], tokens[k - 1] if k else None, drafts[k]))
        if tree.q_BNV is None:
            assert drafts[k + 1] == tokens[k][int(row.argmax())]
        else:
            q_V = torch.zeros(64).scatter(0, torch.tensor(tokens[k]), (row / temperature).softmax(0))
            torch.testing.assert_close(tree.q_BNV[0, k], q_V, rtol=1e-4, atol=1e-5)
            assert drafts[k + 1] in tokens[k]


def test_lilicorr_dynamic_tree_keeps_likeliest_paths() -> None:
    """With as many paths fed and candidates offered as there are, the tree's nodes are the best of every path."""
    target = tiny_target()
    drafter = built(target, tree="dynamic", width=16, nodes=9, block_size=3)
    batch = read(target, drafter)  # type: ignore[arg-type]
    tree = proposed(drafter, batch, Sampling())  # type: ignore[arg-type]
    state_SH = slot_states(drafter, target, batch, 0, batch.token_BT.shape[1] - 2)  # type: ignore[arg-type]
    context = drafter.context({b: batch.hidden[b][0, batch.token_BT.shape[1] - 2] for b in drafter.shape.taps})
    wanted = likeliest(scored_paths(drafter, state_SH, context), tree.token_BN.shape[1] - 1)
    assert sorted(token_paths(tree, 0)) == sorted(wanted) and len(wanted) == 9


def scored_paths(drafter: LiLiCorr, state_SH: Tensor, context_H: Tensor) -> dict[tuple[int, ...], float]:
    """All paths of a block of three slots with their log-probabilities."""
    lattice = drafter.lattice(state_SH[None, 1:], context_H[None])
    tokens, first = lattice.token_NKC[0].tolist(), lattice.start_NC[0].log_softmax(0)
    paths = {(tokens[0][i],): float(first[i]) for i in range(C)}
    for i, j in itertools.product(range(C), range(C)):
        paths[tokens[0][i], tokens[1][j]] = float(first[i] + lattice.pair_NJCC[0, 0, i].log_softmax(0)[j])
    return paths


def test_lilicorr_candidates_see_later_slots_and_depth_limit_keeps_drafts() -> None:
    target = tiny_target()
    drafter = built(target)
    state_NKH, context_NH = torch.randn(2, 4, 32), torch.randn(2, 32)
    first = drafter.lattice(state_NKH, context_NH)
    changed_NKH = state_NKH.clone()
    changed_NKH[0, 3] += 0.5
    second = drafter.lattice(changed_NKH, context_NH)
    assert not torch.allclose(first.start_NC[0], second.start_NC[0]), "candidates see those of later slots"
    torch.testing.assert_close(first.start_NC[1], second.start_NC[1])
    torch.testing.assert_close(first.pair_NJCC[1], second.pair_NJCC[1])
    batch = read(target, drafter)  # type: ignore[arg-type]
    whole, cut = (proposed(drafter, batch, Sampling(), depth) for depth in (None, 2))  # type: ignore[arg-type]
    assert torch.equal(cut.token_BN, whole.token_BN[:, :3])


def test_lilicorr_proposal_after_separate_commits_equals_whole_prompt() -> None:
    """Positions that were processed with earlier proposals are not read again."""
    target = tiny_target()
    drafter = built(target)
    batch = read(target, drafter)  # type: ignore[arg-type]
    last, slot_B = batch.token_BT.shape[1] - 1, torch.zeros(1, dtype=torch.long)
    whole = proposed(drafter, batch, Sampling())  # type: ignore[arg-type]
    state = drafter.open(1, 64)
    for a, b in ((0, last - 2), (last - 2, last)):
        hidden = {k: h[:, a:b] for k, h in batch.hidden.items()}
        commit = Commit(batch.token_BT[:, a:b], batch.token_BT[:, a + 1 : b + 1], hidden, torch.tensor([b - a]))
        state.observe(commit, slot_B)
        tree = state.propose(slot_B, Sampling())
    assert torch.equal(tree.token_BN, whole.token_BN)


def naive_loss(drafter: LiLiCorr, target: HFTarget, batch: TrainBatch) -> float:
    """The loss of the lattice, block by block and slot by slot."""
    K, total = drafter.draft_length, 0.0
    anchors = batch.anchors(None)
    for row in range(len(batch.token_BT)):
        for source in anchors.source_BA[row][anchors.real_BA[row]].tolist():
            labels = [source + 2 + k for k in range(K)]
            known = [
                label < batch.token_BT.shape[1]
                and bool(batch.mask_BT[row, label])
                and batch.document_BT[row, label] == batch.document_BT[row, source]
                for label in labels
            ]
            if not all(known):
                continue
            tokens, scores = of_source(drafter, target, batch, row, source)
            for k, label in enumerate(labels):
                true = int(batch.token_BT[row, label])
                if true not in tokens[k]:
                    break
                before = int(batch.token_BT[row, label - 1])
                q = torch.tensor(after(tokens[k], scores[k], tokens[k - 1] if k else None, before)).softmax(0)
                z_V = target.head(batch.hidden[FINAL][row, label - 1])
                below = [max(0.0, float(z_V[true] - z_V[token])) for token in tokens[k]]
                total -= 0.25 * math.log(float(q[tokens[k].index(true)])) / K
                total += 0.25 * sum(float(a) * b for a, b in zip(q, below, strict=True)) / K
    return total


def likely(target: HFTarget, drafter: LiLiCorr) -> TrainBatch:
    """Documents whose true tokens are often candidates."""
    batch = packed(target, drafter)  # type: ignore[arg-type]
    mask_BT, token_BT = batch.document_BT >= 0, batch.token_BT.clone()
    for row, document in enumerate(batch.document_BT.tolist()):
        for t in range(2, len(document)):
            if document[t] >= 0 and (row + t) % 4:
                state_SH = slot_states(drafter, target, batch, row, t - 2)  # type: ignore[arg-type]
                token_BT[row, t] = int(target.head(state_SH[1]).topk(C).indices[(row + t) % C])
    mask_BT[0, 4] = False
    return replace(batch, token_BT=token_BT, mask_BT=mask_BT)


def test_lilicorr_lattice_loss_equals_loop() -> None:
    target = tiny_target()
    drafter = built(target)
    batch = likely(target, drafter)
    found = [float(p.aux) for p in drafter.predict(batch) if p.aux is not None]
    wanted = naive_loss(drafter, target, batch)
    assert len(found) == 1 and wanted > 0
    assert found[0] == pytest.approx(wanted, rel=1e-4)


def test_lilicorr_penalty_from_stored_top_k_matches_full_distribution() -> None:
    """The penalty with all tokens but one stored is that of the whole distribution; with few, others are below them."""
    target = tiny_target()
    drafter = built(target)
    batch = likely(target, drafter)
    log_p = target.head(batch.hidden[FINAL]).log_softmax(-1)

    def stored(count: int) -> float:
        best = log_p.topk(count)
        top = Top(best.indices, best.values, (1 - best.values.exp().sum(-1)).clamp_min(1e-9).log())
        return next(float(p.aux) for p in drafter.predict(replace(batch, top=top)) if p.aux is not None)

    whole = next(float(p.aux) for p in drafter.predict(batch) if p.aux is not None)
    assert stored(63) == pytest.approx(whole, rel=1e-3)
    position_M, token_MC = torch.tensor([3]), torch.arange(64)[None]
    best = log_p.topk(5)
    top = Top(best.indices, best.values, (1 - best.values.exp().sum(-1)).log())
    found = drafter.target_logits(replace(batch, top=top), position_M, token_MC)[0]
    kept = best.indices.flatten(0, 1)[3]
    torch.testing.assert_close(found[kept], best.values.flatten(0, 1)[3])
    torch.testing.assert_close(found.exp().sum(), torch.tensor(1.0))


def test_lilicorr_gradients_reach_all_parameters_and_chunks_keep_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    drafter = built(target, divergence_weight=0.5).train().requires_grad_(True)
    batch = likely(target, drafter)
    aux = next(p.aux for p in drafter.predict(batch) if p.aux is not None)
    aux.backward()
    assert all(p.grad is not None and bool(p.grad.any()) for name, p in drafter.named_parameters())
    state_NKH = torch.randn(1, 4, 32, requires_grad=True)
    log_q_NKC, _ = drafter.best(state_NKH)
    (slope,) = torch.autograd.grad(log_q_NKC.sum(), state_NKH)
    wanted = torch.autograd.grad(target.head(state_NKH).log_softmax(-1).topk(C).values.sum(), state_NKH)[0]
    torch.testing.assert_close(slope, wanted, rtol=1e-4, atol=1e-5)
    whole = Objective(drafter, target, LossOptions())(batch)[0]
    monkeypatch.setattr("drafttrain.drafters.lilicorr.MAX_LOGITS", 3 * 64)
    monkeypatch.setattr("drafttrain.drafters.lilicorr.EVALUATED", 10)
    torch.testing.assert_close(Objective(drafter, target, LossOptions())(batch)[0], whole)
    drafter.recompute()
    torch.testing.assert_close(Objective(drafter, target, LossOptions())(batch)[0], whole)


def test_lilicorr_fresh_network_has_small_weights_and_zero_biases() -> None:
    torch.manual_seed(0)
    drafter = LiLiCorr(LiLiCorrOptions(**SMALL | OWN | {"hidden_size": 32}), tiny_target())
    network = drafter.lilicorr
    assert isinstance(network.token_proj, torch.nn.Identity), "as wide as the target"
    for name in ("slot_embedding", "rank_embedding", "relative_slot_bias", "same_slot_bias"):
        assert not getattr(network, name).any()
    assert all(not p.any() for name, p in network.named_parameters() if name.endswith("bias") and p.ndim == 1)
    assert float(network.factor_input_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_lilicorr_invalid_options_are_refused_in_one_line(subtests: pytest.Subtests) -> None:
    target = tiny_target()
    wrong: tuple[dict[str, Any], ...] = (
        {"slots": "shifted"},
        {"candidates": 1},
        {"candidates": 6},
        {"candidates": 32},
        {"heads": 3},
        {"factor_dim": 0},
        {"corrector_layers": 0},
        {"mlp_ratio": 0.0},
        {"logit_scale": 0.0},
        {"vector_eps": 0.5},
        {"penalty_weight": -1.0},
        {"tree": "best_first"},
    )
    for options in wrong:
        with subtests.test(options=options):
            with pytest.raises(UserError, match=r"drafter\.") as caught:
                FAMILY.build(LiLiCorrOptions(**SMALL | OWN | options), target)
            assert "\n" not in str(caught.value)
