"""Parallel drafters against the definition: one anchor and one depth at a time, with a dense mask written out in loops."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.decoding.settings import Controls
from drafttrain.drafters import families
from drafttrain.drafters.common.dynamic_tree import StaticTree
from drafttrain.features.online import Online
from drafttrain.model import blockwise_attention as blockwise
from drafttrain.model.batch import TrainBatch
from drafttrain.model.drafter import Commit, Drafter
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.mask_chains import Chains, Retention, attended, reference
from drafttrain.objective.losses import LossOptions, Objective, teacher_forced
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.hf import HFTarget
from tests.helpers import prompts, tiny_model, tiny_target

LENGTHS = [[7, 9], [12], [3, 2, 8]]  # of the documents of each row
SMALL: dict[str, dict[str, Any]] = {
    "peagle": {"target_layer_ids": [0, 2], "layers": 2, "draft_length": 4, "mask_token": 9},
    "pard": {"blocks": 2, "draft_length": 4, "mask_token": 9},
}
NAMES = sorted(SMALL)


def built(name: str, target: HFTarget, **options: Any) -> Any:
    torch.manual_seed(1)
    family = families()[name]
    drafter = family.build(family.options(**SMALL[name] | options), target)
    for parameter in drafter.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return drafter


def packed(target: HFTarget, drafter: Drafter, seed: int = 0) -> TrainBatch:
    """Rows of several documents and padding, some tokens not supervised."""
    generator, T = torch.Generator().manual_seed(seed), max(map(sum, LENGTHS)) + 2
    token_BT = torch.randint(0, 64, (len(LENGTHS), T), generator=generator)
    document_BT, position_BT = torch.full_like(token_BT, -1), torch.zeros_like(token_BT)
    for row, lengths in enumerate(LENGTHS):
        document_BT[row, : sum(lengths)] = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        position_BT[row, : sum(lengths)] = torch.cat([torch.arange(n) for n in lengths])
    mask_BT = torch.rand(token_BT.shape, generator=generator) < 0.8
    return Online(target, drafter.taps).fill(TrainBatch(token_BT, position_BT, document_BT, mask_BT & (document_BT >= 0)))


def entries(chains: Chains, row: int) -> list[tuple[int, int]]:
    """(anchor's source, depth) of every column; of a column of text its own place, and depth 0."""
    found = [(t, 0) for t in range(chains.columns)]
    for group in chains.groups:
        for source in group.anchors.source_BA[row].tolist():
            found += [(source, depth) for depth in range(1, group.size + 1)]
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("rate", [1.0, 0.6])
def test_mask_chains_visibility_equals_definition_and_dense_attention(
    root: bool, rate: float, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Depth 0 up to the anchor, or the same anchor and no greater depth; of one document; in tiles of a few slots."""
    monkeypatch.setattr(blockwise, "LEAST_TILE", 6)
    monkeypatch.setattr(blockwise, "MOST_TILE", 6)
    target = tiny_target()
    batch = packed(target, built("pard", target))
    chains = Chains.append_to(batch, Retention(rate, 0.2).shares(3), 3, root)
    B, N = chains.position_BN.shape
    wanted = torch.zeros(B, N, N, dtype=torch.bool)
    for row in range(B):
        number, columns = batch.document_BT[row].tolist(), entries(chains, row)
        for q, (anchor_q, d_q) in enumerate(columns):
            reach = anchor_q + (1 if root and d_q else 0)  # the root, for those that read tokens themselves
            for k, (anchor_k, d_k) in enumerate(columns):
                before = d_k == 0 and anchor_k <= reach and number[anchor_k] == number[anchor_q]
                wanted[row, q, k] = before or (q >= chains.columns <= k and k <= q and k > q - d_q and anchor_k == anchor_q)
    real_BN = torch.cat([batch.document_BT >= 0, *(real(group).flatten(1) for group in chains.groups)], 1)
    assert torch.equal(chains.dense() & real_BN[..., None], wanted & real_BN[..., None])

    torch.manual_seed(0)
    q, k, v = torch.randn(B, 4, N, 8), torch.randn(B, 2, N, 8), torch.randn(B, 2, N, 8)
    found, dense = attended(q, k, v, chains, window, 0.3), reference(q, k, v, chains, window, 0.3)
    at = real_BN[:, None, :, None]
    torch.testing.assert_close(found.where(at, 0.0), dense.where(at, 0.0))


def real(group: Any) -> Tensor:
    return group.anchors.real_BA[..., None].expand(-1, -1, group.size)


def test_retention_anchor_sets_are_nested_and_have_requested_shares() -> None:
    target = tiny_target()
    batch = packed(target, built("pard", target))
    shares = Retention(0.7, 0.3).shares(4)
    assert shares == pytest.approx([0.7, 0.49, 0.343, 0.3])
    groups, whole = batch.nested(shares), batch.anchors()
    assert [size for size, _ in groups] == [1, 2, 3, 4]
    again = [anchors.source_BA.tolist() for _, anchors in batch.nested(shares)]
    other = [anchors.source_BA.tolist() for _, anchors in replace(batch, token_BT=batch.token_BT.roll(1, 0)).nested(shares)]
    assert again == [anchors.source_BA.tolist() for _, anchors in groups] != other
    for row in range(3):
        everything = whole.source_BA[row][whole.real_BA[row]].tolist()
        ends = [anchors.source_BA[row][anchors.real_BA[row]].tolist() for _, anchors in groups]
        kept = [[s for end in ends[depth:] for s in end] for depth in range(4)]
        assert [len(set(sources)) for sources in kept] == [int(len(everything) * share) for share in shares]
        assert set(kept[3]) <= set(kept[2]) <= set(kept[1]) <= set(kept[0]) <= set(everything)
    assert [size for size, _ in batch.nested([0.5, 0.2, 0.2])] == [1, 3]


def logits_of(drafter: Any, target: HFTarget, batch: TrainBatch, row: int, source: int, slots: int) -> Tensor:
    """[K, V] of one anchor alone: its document up to the root, and its masks; by the drafter's own decoding."""
    number = batch.document_BT[row]
    start = int((number == number[source]).nonzero()[0])
    text = batch.token_BT[row, start : source + 2].tolist()  # the root last
    seen: list[Tensor] = []
    chosen = StaticTree.from_slots

    def spy(self: Any, root_B: Tensor, logits_BKV: Tensor, *others: Any) -> Any:
        seen.append(logits_BKV[0, : slots + 1])
        return chosen(self, root_B, logits_BKV, *others)

    token_1A = torch.tensor([text[:-1]])
    filled = Online(target, drafter.taps).fill(
        TrainBatch(token_1A, torch.arange(len(text) - 1)[None], torch.zeros_like(token_1A), token_1A >= 0)
    )
    state, slot_B = drafter.open(1, 64), torch.arange(1)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(StaticTree, "from_slots", spy)
        hidden = {key: filled.hidden[key] for key in drafter.taps.keys}
        state.observe_prompt(Commit(token_1A, torch.tensor([text[1:]]), hidden, torch.tensor([len(text) - 1])), slot_B)
        state.propose(slot_B, Sampling(0.8))
    return seen[0]


@pytest.mark.sampled
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_parallel_drafter_training_logits_equal_decoding_logits(name: str, training: bool) -> None:
    """Of packed rows with padding, dropped or not: a slot knows nothing but its own document up to its anchor."""
    target = FastTarget(tiny_model())
    drafter = built(name, target, retention=0.6).train(training)
    batch, found = packed(target, drafter), list[dict[int, Tensor]]()
    with torch.no_grad():
        for p in drafter.predict(batch):
            found.append(dict(zip(p.source_M.tolist(), p.head(p.hidden_MH), strict=True)))
            assert (p.label_M - p.source_M == p.step + 2).all()
    anchors = batch.anchors()
    flat = [row * 18 + s for row in range(3) for s in anchors.source_BA[row][anchors.real_BA[row]].tolist()]
    assert [bool(set(step) - set(flat)) for step in found[1:]] == [False] * 3
    if not training:
        for depth in range(1, 4):
            assert len(found[depth]) == len(batch.future_of(anchors, depth + 2)[0])
    drafter.eval()
    for source in flat:
        wanted = logits_of(drafter, target, batch, source // 18, source % 18, 3)
        for depth in range(4):
            if source in found[depth]:
                torch.testing.assert_close(found[depth][source], wanted[depth], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_parallel_drafter_recompute_and_dense_mask_keep_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, gradients = tiny_target(), []
    for way in ("plain", "recomputed", "dense"):
        drafter = built(name, target).train()
        if way == "recomputed":
            monkeypatch.setattr(blockwise, "MOST_TILE", 8)
            drafter.recompute()
        if way == "dense" and name == "pard":
            drafter.lm.unmasked = False  # as of a model whose attention is not ours
        loss, _ = Objective(drafter, target, LossOptions(chunk=16))(packed(target, drafter))
        gradients.append([loss, *torch.autograd.grad(loss, list(drafter.parameters()), materialize_grads=True)])
    assert sum(float(g.abs().sum() > 0) for g in gradients[0][1:]) > len(gradients[0]) / 2
    for other in gradients[1:]:
        for a, b in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_parallel_drafter_with_dropped_anchors_loss_decreases(name: str) -> None:
    target = tiny_target()
    drafter = built(name, target, retention=0.5).train()
    objective, batch = Objective(drafter, target, LossOptions("ce")), packed(target, drafter)
    optimizer, seen = torch.optim.AdamW(drafter.parameters(), lr=1e-2), []
    for _ in range(20):
        loss, counts = objective(batch)
        optimizer.zero_grad()
        (loss / batch.supervised()).backward()
        optimizer.step()
        seen.append(float(loss.detach()))
    assert counts.total.tolist() == sorted(counts.total.tolist(), reverse=True) and counts.total[3] > 0
    assert seen[-1] < 0.2 * seen[0]


@pytest.mark.parametrize("name", NAMES)
def test_parallel_drafter_without_supervised_tokens_gives_zero_loss(name: str) -> None:
    target = tiny_target()
    drafter = built(name, target).train()
    batch = packed(target, drafter)
    loss, counts = Objective(drafter, target, LossOptions())(replace(batch, mask_BT=torch.zeros_like(batch.mask_BT)))
    loss.backward()
    assert float(loss.detach()) == 0.0 and int(counts.total.sum()) == 0
    assert len(teacher_forced(drafter.eval(), target, batch).length_D) > 0


@pytest.mark.sampled
@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize("tree", [{}, {"tree": "static", "paths": [[0], [1], [0, 0]]}, {"tree": "dynamic", "nodes": 9}])
@pytest.mark.parametrize("name", NAMES)
def test_parallel_drafter_decode_steps_ahead_of_host_equal_plain_decoding(
    name: str, tree: dict[str, Any], every: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With cache lengths bounded, where what was accepted and the masks behind it go through the layers at once."""
    target, asked = FastTarget(tiny_model()), prompts(5, seed=3)
    drafter = built(name, target, **tree).eval()
    plain = Decoder(target, None, "greedy", Sampling(), max_new_tokens=40).run(asked, 3).results
    append = KVCache.append

    def within(kv: KVCache, layer: int, k: Tensor, v: Tensor) -> None:
        assert kv.static_length is None or kv.static_length + k.shape[2] <= kv.storage.capacity
        append(kv, layer, k, v)

    monkeypatch.setattr(KVCache, "append", within)
    ours = Decoder(target, drafter, "greedy", Sampling(), max_new_tokens=40, controls=Controls(read_every=every)).run(asked, 3)
    host = Decoder(target, drafter, "greedy", Sampling(), max_new_tokens=40).run(asked, 1)
    assert [r.tokens for r in ours.results] == [r.tokens for r in plain]
    assert [r.accepted for r in ours.results] == [r.accepted for r in host.results]


def test_peagle_draft_vocab_gives_narrow_logits_and_plain_tokens() -> None:
    target, asked = tiny_target(), prompts(3, seed=5)
    drafter = built("peagle", target, draft_vocab=20)
    drafter.prepare(lambda: torch.arange(64) % 7)
    assert drafter.lm_head.weight.shape[0] == 20 and int(drafter.t2d.sum()) == 20
    plain = Decoder(target, None, "greedy", Sampling(), max_new_tokens=20).run(asked, 1).results
    ours = Decoder(target, drafter.eval(), "greedy", Sampling(), max_new_tokens=20).run(asked, 2).results
    assert [r.tokens for r in ours] == [r.tokens for r in plain]
    batch = packed(target, drafter)
    assert all(p.vocab_D is not None and p.head(p.hidden_MH).shape[1] == 20 for p in drafter.predict(batch))


def test_parallel_drafter_state_dict_names_and_options_match_published() -> None:
    drafter = built("peagle", tiny_target())
    names = set(drafter.state_dict())
    assert {"fc.weight", "mask.hidden", "embed_tokens.weight", "norm.weight", "lm_head.weight"} <= names
    assert drafter.layers[0].self_attn.q_proj.in_features == 64 and drafter.layers[1].self_attn.q_proj.in_features == 32
    assert drafter.resolved_options() | {"layer": None} == {"target_layer_ids": [0, 2], "mask_token": 9, "layer": None}
    assert drafter.embed_tokens.weight.requires_grad and drafter.mask.hidden.shape == (1, 1, 64)
    assert built("pard", tiny_target(), mask_token=None).resolved_options() == {"mask_token": 63}


def test_parallel_drafter_options_out_of_range_are_refused(subtests: pytest.Subtests) -> None:
    wrongs: dict[str, dict[str, Any]] = {
        "drafter.retention is 0": {"retention": 0.0},
        "drafter.least_retention is 1.5; set it within 0 and 1": {"least_retention": 1.5},
        "embeds 0..63": {"mask_token": 64},
        "draft_length": {"draft_length": 0},
    }
    target = tiny_target()
    for name, (line, wrong) in product(NAMES, wrongs.items()):
        with subtests.test(name=name, **wrong):
            with pytest.raises(UserError, match=line) as refused:
                built(name, target, **wrong)
            assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", NAMES)
def test_parallel_drafter_single_draft_token_equals_plain_decoding(name: str) -> None:
    target, asked = tiny_target(), prompts(3, seed=5)
    drafter = built(name, target, draft_length=1)
    assert len(list(drafter.predict(packed(target, drafter)))) == 1
    plain = Decoder(target, None, "greedy", Sampling(), max_new_tokens=12).run(asked, 1).results
    assert [
        r.tokens for r in Decoder(target, drafter.eval(), "greedy", Sampling(), max_new_tokens=12).run(asked, 2).results
    ] == [r.tokens for r in plain]
