"""DFlash against a reference written in loops: one anchor at a time, no chunks, no batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.decoding.settings import Controls
from drafttrain.drafters.common import block_drafter
from drafttrain.drafters.common.block_drafter import spread_taps
from drafttrain.drafters.dflash import FAMILY, DFlash, DFlashOptions
from drafttrain.drafters.options import BlockOptions
from drafttrain.features.online import Online
from drafttrain.model import blockwise_attention as blockwise
from drafttrain.model.batch import TrainBatch
from drafttrain.model.drafter import Commit
from drafttrain.model.layers import rotary
from drafttrain.model.target import FINAL
from drafttrain.objective.losses import LossOptions, Objective, teacher_forced
from drafttrain.ops.rotary import rotate
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.hf import HFTarget
from tests.helpers import prompts, tiny_model, tiny_target

LENGTHS = [[7, 9], [12], [3, 2, 8]]  # of the documents of each row
SMALL: dict[str, Any] = {"block_size": 4, "layers": 2, "target_layer_ids": [0, 2], "mask_token": 9}
Contexts = Callable[[Any, list[Tensor]], list[Tensor]]  # (drafter, tapped states [N, H]) -> each layer's context [N, H]


def built(target: HFTarget, **options: Any) -> DFlash:
    torch.manual_seed(1)
    drafter = DFlash(DFlashOptions(**SMALL | options), target)
    drafter.prepare(lambda: torch.arange(64) * 37 % 64)  # of a drafter of some tokens: those of the greatest counts
    for parameter in drafter.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return drafter


def packed(target: HFTarget, drafter: DFlash, seed: int = 0) -> TrainBatch:
    """Rows of several documents and padding, some tokens not supervised, with the states of each document alone."""
    generator, T = torch.Generator().manual_seed(seed), max(map(sum, LENGTHS)) + 2
    token_BT = torch.randint(0, 64, (len(LENGTHS), T), generator=generator)
    document_BT, position_BT = torch.full_like(token_BT, -1), torch.zeros_like(token_BT)
    hidden = {key: torch.zeros(*token_BT.shape, 32) for key in (*drafter.taps.keys, FINAL)}
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for number, length in enumerate(lengths):
            span = slice(start, start + length)
            document_BT[row, span], position_BT[row, span] = number, torch.arange(length)
            text = TrainBatch(
                *(x[row : row + 1, span] for x in (token_BT, position_BT, document_BT)), torch.ones(1, length) > 0
            )
            for key, state in Online(target, drafter.taps).fill(text).hidden.items():
                hidden[key][row, span] = state[0]
            start += length
    mask_BT = torch.rand(token_BT.shape, generator=generator) < 0.8
    return TrainBatch(token_BT, position_BT, document_BT, mask_BT, hidden)


def attended(layer: Any, x_SH: Tensor, root: int, context_NH: Tensor, position_N: Tensor, causal: bool) -> Tensor:
    """[S, H] a layer's attention for one block whose root stands at `root`, one head and slot at a time.

    causal: a slot sees no later slot. A layer may have other maps for the context's keys and values.
    """
    attention, shape = layer.self_attn, layer.self_attn.shape
    x_SH = layer.input_layernorm(x_SH)
    own, names = (attention.k_proj, attention.v_proj), ("k_proj_target", "v_proj_target")
    of_context = [getattr(attention, name, map_) for name, map_ in zip(names, own, strict=True)]
    S, (key_Px, value_Px) = len(x_SH), (torch.cat([c(context_NH), b(x_SH)]) for c, b in zip(of_context, own, strict=True))
    position_P = torch.cat([position_N, root + torch.arange(S)])

    def turned(x_Nx: Tensor, norm: Any, position: Tensor) -> Tensor:
        x_NhD = norm(x_Nx.view(len(x_Nx), -1, shape.head_dim))
        return rotate(x_NhD.transpose(0, 1)[None], *rotary(position[None], shape.head_dim, shape.rope_theta, x_NhD.dtype))[0]

    q_hSD = turned(attention.q_proj(x_SH), attention.q_norm, position_P[-S:])
    k_hPD = turned(key_Px, attention.k_norm, position_P)
    v_PhD = value_Px.view(len(value_Px), -1, shape.head_dim)
    rows = []
    for slot in range(S):
        heads = []
        for head in range(shape.heads):
            kv = head // (shape.heads // shape.kv_heads)
            seen = len(context_NH) + (slot + 1 if causal else S)
            score_P = k_hPD[kv, :seen] @ q_hSD[head, slot] / math.sqrt(shape.head_dim)
            sink = score_P[:0] if attention.sinks is None else attention.sinks[head, None]
            heads.append(torch.cat([score_P, sink]).softmax(0)[:seen] @ v_PhD[:seen, kv])
        rows.append(torch.cat(heads))
    return attention.o_proj(torch.stack(rows))


def shared(drafter: Any, tapped: list[Tensor]) -> list[Tensor]:
    return [drafter.hidden_norm(drafter.fc(torch.cat(tapped, -1)))] * drafter.shape.layers


def slot_states(
    drafter: Any,
    target: HFTarget,
    batch: TrainBatch,
    row: int,
    source: int,
    causal: bool = False,
    contexts: Contexts = shared,
    visible: int = 1,
) -> Tensor:
    """[S, H] of the block behind one source, from the definition. visible: true tokens that it begins with."""
    document = batch.document_BT[row, source]
    sees = [t for t in range(source + 1) if batch.document_BT[row, t] == document]
    tapped, position_N = [batch.hidden[b][row, sees] for b in drafter.shape.taps], batch.position_BT[row, sees]
    true_tokens = batch.token_BT[row, source + 1 : source + 1 + visible].tolist()
    tokens = true_tokens + [drafter.shape.mask_token] * (drafter.shape.size - len(true_tokens))
    x_SH, root = target.embed(torch.tensor(tokens)), int(batch.position_BT[row, source]) + 1
    for layer, context_NH in zip(drafter.all_layers(), contexts(drafter, tapped), strict=True):
        x_SH = x_SH + attended(layer, x_SH, root, context_NH, position_N, causal)
        x_SH = x_SH + layer.mlp(layer.post_attention_layernorm(x_SH))
    out_SH: Tensor = drafter.norm(x_SH)
    return out_SH


def naive(
    drafter: Any,
    target: HFTarget,
    batch: TrainBatch,
    options: BlockOptions,
    loss: str,
    contexts: Contexts = shared,
    corrected: Callable[[Tensor, int], Tensor] = lambda state_H, before: state_H,
    visible: dict[tuple[int, int], int] | None = None,
) -> Tensor:
    """The objective over all anchors, slot by slot. corrected: what the head reads of a slot's state and the token before.
    visible: true tokens of the block behind each row and source; None: the root alone."""
    B, T = batch.token_BT.shape
    first = 1 if options.slots == "in_place" else 0
    K, total = options.block_size - first, torch.zeros(())
    decay = [math.exp(-step / 4.0) for step in range(K)]

    def supervised(row: int, source: int, ahead: int) -> bool:
        at = source + ahead
        inside = at < T and batch.document_BT[row, at] == batch.document_BT[row, source] >= 0
        return bool(inside and batch.mask_BT[row, at])

    for row in range(B):
        for source in range(T):
            if not (supervised(row, source, 1) and supervised(row, source, 2)):
                continue
            known = 1 if visible is None else visible[row, source]
            states = slot_states(drafter, target, batch, row, source, contexts=contexts, visible=known)
            losses, sure, has = [], [], []
            for step in range(K):
                has.append(step >= known - 1 and supervised(row, source, step + 2))
                if not has[-1]:
                    losses.append(torch.zeros(())), sure.append(1.0)
                    continue
                label = source + step + 2
                state_H = corrected(states[first + step], int(batch.token_BT[row, label - 1]))
                ids = torch.arange(64) if drafter.ids is None else drafter.ids
                log_q = (target.head(state_H) if drafter.ids is None else drafter.lm_head(state_H)).log_softmax(-1)
                p = target.head(batch.hidden[FINAL][row, label - 1]).softmax(-1)
                place = (ids == batch.token_BT[row, label]).nonzero()[:, 0]
                sure.append((1 - options.alpha) * float(log_q[place].detach().exp().sum()) + options.alpha)
                trained, p = bool(len(place)) if loss == "ce" else p.argmax() in ids, p[ids] / p[ids].sum()
                one = -log_q[place].sum() if loss == "ce" else (p * (p.log() - log_q)).sum()
                losses.append(one if trained else torch.zeros(()))
            for j in range(K):
                weight = decay[max(0, j + 1 - known)] / sum(decay)
                if options.weights == "dpace":
                    weight = sum(math.prod(sure[: m + 1]) for m in range(j, K) if has[m])
                total = total + weight * losses[j]
    return total


@pytest.mark.sampled
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("vocab", [None, 40])
@pytest.mark.parametrize("weights", ["decay", "dpace"])
@pytest.mark.parametrize("slots", ["in_place", "shifted"])
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_dflash_loss_and_gradients_equal_reference(
    loss: str, slots: str, weights: str, vocab: int | None, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles of two blocks, computed again in the backward pass."""
    monkeypatch.setattr(blockwise, "LEAST_TILE", 8)
    monkeypatch.setattr(blockwise, "MOST_TILE", 8)
    target = tiny_target()
    options = DFlashOptions(**SMALL, slots=slots, weights=weights, draft_vocab=vocab)
    layer = {"attention_sinks": sinks}
    drafter = built(target, slots=slots, weights=weights, draft_vocab=vocab, layer=layer).train()
    batch = packed(target, drafter)
    wanted = naive(drafter, target, batch, options, loss)
    gradients = torch.autograd.grad(wanted, list(drafter.parameters()))
    found, counts = Objective(drafter, target, LossOptions(loss, chunk=16))(batch)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert len(counts.total) == drafter.draft_length
    for ours, theirs in zip(torch.autograd.grad(found, list(drafter.parameters())), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-4)


@pytest.mark.sampled
@pytest.mark.parametrize("weights", ["decay", "dpace"])
@pytest.mark.parametrize("slots", ["in_place", "shifted"])
@pytest.mark.parametrize("least", [1, 2])
def test_dflash_visible_prefix_loss_and_gradients_equal_reference(least: int, slots: str, weights: str) -> None:
    """Blocks begin with true tokens, which are not learnt; the decay begins at the first draft after them."""
    target, more = tiny_target(), {"slots": slots, "weights": weights, "prefix_base": 0.9, "prefix_least": least}
    drafter = built(target, **more).train()
    batch = packed(target, drafter)
    anchors = batch.anchors(None, drafter.visible)
    assert anchors.visible_BA is not None and torch.equal(anchors.visible_BA, batch.anchors(None, drafter.visible).visible_BA)
    places = anchors.real_BA.nonzero().tolist()
    visible = {(row, int(anchors.source_BA[row, a])): int(anchors.visible_BA[row, a]) for row, a in places}
    assert set(visible.values()) == set(range(least, 4))
    wanted = naive(drafter, target, batch, DFlashOptions(**SMALL, **more), "kl", visible=visible)
    gradients = torch.autograd.grad(wanted, list(drafter.parameters()))
    found = Objective(drafter, target, LossOptions("kl", chunk=16))(batch)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(torch.autograd.grad(found, list(drafter.parameters())), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-4)
    scored, plain = (teacher_forced(d.eval(), target, batch) for d in (drafter, built(target, slots=slots)))
    assert torch.equal(scored.rank_MK, plain.rank_MK), "a block begins with the root alone where nothing is trained"


def test_dflash_drawn_anchors_are_deterministic_subset_of_all_anchors() -> None:
    target = tiny_target()
    drafter, everything = built(target, anchors=3).train(), built(target).train()
    batch = packed(target, drafter)
    draws = [batch.anchors(3), batch.anchors(3), replace(batch, token_BT=batch.token_BT.roll(1, 0)).anchors(3)]
    whole = batch.anchors()
    assert torch.equal(draws[0].source_BA, draws[1].source_BA) and not torch.equal(draws[0].source_BA, draws[2].source_BA)
    assert draws[0].real_BA.sum(1).tolist() == [min(3, n) for n in whole.real_BA.sum(1).tolist()]
    assert draws[0].share == pytest.approx(float(draws[0].real_BA.sum() / whole.real_BA.sum()))
    for row in range(len(batch.token_BT)):
        drawn = draws[0].source_BA[row][draws[0].real_BA[row]].tolist()
        assert drawn == sorted(set(drawn)) and set(drawn) <= set(whole.source_BA[row][whole.real_BA[row]].tolist())
    few, all_ = ({(p.step, s): h for p in d.predict(batch) for s, h in zip(p.source_M.tolist(), p.hidden_MH, strict=True)}
                 for d in (drafter, everything))  # fmt: skip
    assert 0 < len(few) < len(all_)
    for key, state in few.items():
        torch.testing.assert_close(state, all_[key], rtol=1e-4, atol=1e-5)


def test_dflash_batch_without_labels_gives_zero_loss() -> None:
    target = tiny_target()
    drafter = built(target).train()
    batch = packed(target, drafter)
    loss, counts = Objective(drafter, target, LossOptions())(replace(batch, mask_BT=torch.zeros_like(batch.mask_BT)))
    loss.backward()
    assert float(loss.detach()) == 0.0 and int(counts.total.sum()) == 0


def test_dflash_evaluation_in_pieces_scores_every_position(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    drafter = built(target, anchors=2).eval()
    batch = replace(packed(target, drafter), mask_BT=torch.ones(3, 18, dtype=torch.bool))
    whole = teacher_forced(drafter, target, batch)
    monkeypatch.setattr(block_drafter, "EVALUATED", 12)  # three blocks at once
    pieces = teacher_forced(drafter, target, batch)
    assert whole.length_D == [n - drafter.draft_length - 1 for lengths in LENGTHS for n in lengths if n > 4]
    assert torch.equal(whole.rank_MK, pieces.rank_MK)
    torch.testing.assert_close(whole.acceptance_MK, pieces.acceptance_MK, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("slots", ["in_place", "shifted"])
@pytest.mark.parametrize("bound", [None, 64])
def test_dflash_proposal_equals_reference_block(slots: str, bound: int | None) -> None:
    """Ragged rows, read in two pieces, then rounds of accepted positions; with the cache's lengths bounded too."""
    target = tiny_target()
    drafter = built(target, slots=slots).eval()
    texts = [prompts(1, seed=s, longest=4)[0] + list(range(20 + s, 34 + s)) for s in (1, 2)]
    length, first = min(map(len, texts)), drafter.shape.first
    token_BT = torch.tensor([t[:length] for t in texts])
    batch = TrainBatch(token_BT, torch.arange(length).expand(2, -1), torch.zeros_like(token_BT), token_BT >= 0)
    batch = Online(target, drafter.taps).fill(batch)
    slot_B, state, held = torch.arange(2), drafter.open(2, 64), [0, 0]

    def bring(counts: list[int], read: bool) -> None:
        columns = torch.tensor([[min(held[b] + i, length - 2) for i in range(max(counts))] for b in range(2)])
        hidden = {k: h.gather(1, columns[..., None].expand(-1, -1, 32)) for k, h in batch.hidden.items()}
        commit = Commit(token_BT.gather(1, columns), token_BT.gather(1, columns + 1), hidden, torch.tensor(counts))
        (state.observe_prompt if read else state.observe)(commit, slot_B)
        held[:] = [h + c for h, c in zip(held, counts, strict=True)]

    with torch.no_grad():
        bring([4, 2], read=True)
        bring([0, 3], read=True)
        for counts in ([1, 3], [2, 1]):
            state.kv.use_static_length(bound)
            bring(counts, read=False)
            tree = state.propose(slot_B, Sampling(0.7))
            assert tree.q_BNV is None
            for b in range(2):
                states = slot_states(drafter, target, batch, b, held[b] - 1)
                drafts = target.head(states).argmax(-1)[first : first + drafter.draft_length].tolist()
                assert tree.token_BN[b].tolist() == [int(token_BT[b, held[b]]), *drafts]
        assert state.kv.lengths(slot_B).tolist() == held


@pytest.mark.parametrize("every", [None, 2])
def test_dflash_shifted_slots_greedy_output_equals_plain_decoding(every: int | None) -> None:
    target, asked = FastTarget(tiny_model()), prompts(5, seed=3)
    drafter = built(target, slots="shifted").eval()
    plain = Decoder(target, None, "greedy", Sampling(), max_new_tokens=30).run(asked, 1).results
    ours = Decoder(target, drafter, "greedy", Sampling(), max_new_tokens=30, controls=Controls(read_every=every)).run(asked, 3)
    assert [r.tokens for r in ours.results] == [r.tokens for r in plain]


def test_dflash_state_dict_has_official_names_and_spread_target_layers() -> None:
    drafter = built(tiny_target())
    assert spread_taps(36) == (1, 9, 17, 25, 33) and spread_taps(1) == (0,) and spread_taps(4) == (2,)
    names = set(drafter.state_dict())
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.k_norm.weight"} <= names
    assert {n.split(".")[2] for n in names if n.startswith("layers.")} == {
        "input_layernorm", "self_attn", "post_attention_layernorm", "mlp",
    }  # fmt: skip


def test_dflash_invalid_block_options_are_refused(subtests: pytest.Subtests) -> None:
    target = tiny_target()
    wrong: dict[str, list[Any]] = {
        "slots": ["both"],
        "block_size": [1, 257],
        "layers": [0],
        "target_layer_ids": [[]],
        "mask_token": [64],
    }
    wrong |= {"anchors": [0], "weights": ["none"], "gamma": [0.0], "alpha": [0.0], "prefix_base": [0.0, 1.5]}
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        with subtests.test(name=name, value=value), pytest.raises(UserError, match=rf"drafter\.{name}"):
            FAMILY.build(DFlashOptions(**SMALL | {name: value}), target)
    with pytest.raises(UserError, match=r"drafter\.prefix_least is 4, drafter\.block_size 4"):
        FAMILY.build(DFlashOptions(**SMALL, prefix_base=0.9, prefix_least=4), target)


@pytest.mark.parametrize("slots", ["in_place", "shifted"])
def test_dflash_top1_confidence_equals_calibrated_token_probability(slots: str) -> None:
    """Through the fitted lines; and fitted to the same probabilities, teacher-forced."""
    target = tiny_target()
    drafter = built(target, confidence="top1", slots=slots).eval().requires_grad_(False)
    drafter.use_decode_settings({"calibration": [[[2.0, 0.25 * k] for k in range(drafter.draft_length)]] * 2})
    batch = packed(target, drafter)
    text = TrainBatch(*(x[1:2, :12] for x in (batch.token_BT, batch.position_BT, batch.document_BT)), torch.ones(1, 12) > 0)
    text = Online(target, drafter.taps).fill(text)
    state, slot_B = drafter.open(1, 64), torch.zeros(1, dtype=torch.long)
    hidden = {k: h[:, :4] for k, h in text.hidden.items()}
    state.observe_prompt(Commit(text.token_BT[:, :4], text.token_BT[:, 1:5], hidden, torch.tensor([4])), slot_B)
    tree = state.propose(slot_B, Sampling())
    logits_KV = target.head(slot_states(drafter, target, text, 0, 3)[drafter.shape.first :])
    best_K = logits_KV.softmax(-1).amax(-1)
    line_K = (2.0 * best_K.logit() + 0.25 * torch.arange(drafter.draft_length)).sigmoid()
    assert tree.confidence_BN is not None and float(tree.confidence_BN[0, 0]) == 1.0
    torch.testing.assert_close(tree.confidence_BN[0, 1:], line_K, rtol=1e-3, atol=1e-5)
    confidence_MK = teacher_forced(drafter, target, text).confidence_MK
    assert confidence_MK is not None
    torch.testing.assert_close(confidence_MK[3], best_K.logit(), rtol=1e-3, atol=1e-4)


def test_dflash_unavailable_confidence_is_refused() -> None:
    with pytest.raises(UserError, match=r"drafter\.confidence is 'head'; choose one of top1, or null"):
        FAMILY.build(DFlashOptions(**SMALL, confidence="head"), tiny_target())
    with pytest.raises(UserError, match=r"drafter\.confidence is top1 and drafter\.tree static; set drafter\.tree=chain"):
        built(tiny_target(), confidence="top1", tree="static")
