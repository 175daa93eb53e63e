"""Packed conversations: full rows, and the states and losses of each conversation by itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.data import DataOptions
from drafttrain.data.chat import Encoded
from drafttrain.data.dataset import Dataset, collate, load_dataset, pack
from drafttrain.features.online import Online
from drafttrain.model.batch import TrainBatch
from drafttrain.model.target import FINAL, Taps
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.hf import HFTarget
from tests.contract.test_families import build
from tests.helpers import tiny_model, tiny_target
from tests.unit.data.test_dataset import encoded, word_tokenizer, write


@settings(deadline=None)
@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=60))
def test_pack_rows_hold_each_conversation_once_within_length(lengths: list[int]) -> None:
    conversations = encoded(*lengths)
    rows = pack(conversations, 40)
    assert all(len(row.token_ids) <= 40 for row in rows)
    found = Counter(tuple(ids.tolist()) for row in rows for ids in row.documents)
    assert found == Counter(tuple(c.token_ids.tolist()) for c in conversations)
    assert sum(row.supervised for row in rows) == sum(c.supervised for c in conversations)
    assert all(not row.mask[list(row.starts)].any() for row in rows)
    # best fit leaves no two rows that would fit into one
    filled = sorted(len(row.token_ids) for row in rows)
    assert len(filled) < 2 or filled[0] + filled[1] > 40
    assert [r.token_ids.tolist() for r in pack(conversations, 40)] == [r.token_ids.tolist() for r in rows]


def test_pack_many_conversations_fills_rows_above_99_percent() -> None:
    generator = np.random.default_rng(0)
    rows = pack(encoded(*generator.integers(20, 900, 20_000).tolist()), 1024)
    assert sum(len(row.token_ids) for row in rows) / (1024 * len(rows)) > 0.99


def test_collate_packed_row_restarts_positions_per_document() -> None:
    (row,) = pack(encoded(3, 2), 5)
    batch = collate([row, *encoded(2)], pad_id=9)
    assert batch.token_BT.tolist() == [[10, 11, 12, 20, 21], [10, 11, 9, 9, 9]]
    assert batch.document_BT.tolist() == [[0, 0, 0, 1, 1], [0, 0, -1, -1, -1]]
    assert batch.position_BT.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]
    assert batch.mask_BT.tolist() == [[False, True, True, False, True], [False, True, False, False, False]]


def test_load_dataset_pack_leaves_held_out_rows_unpacked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 30)
    plain, packed = (
        load_dataset(DataOptions(path=path, held_out=5, max_length=22, pack=p), word_tokenizer()) for p in (False, True)
    )
    assert packed.summary["packing"] == {"rows": 9, "efficiency": 25 * 7 / (9 * 22)}
    assert len(packed.train) == 9 and [len(row.starts) for row in packed.train] == [3] * 8 + [1]
    assert [e.token_ids.tolist() for e in packed.held_out] == [e.token_ids.tolist() for e in plain.held_out]
    assert {k: v for k, v in packed.summary.items() if k != "packing"} == plain.summary


def test_dataset_group_by_length_pads_less_than_random_order() -> None:
    lengths = np.random.default_rng(0).integers(2, 200, 400).tolist()
    grouped, random = (Dataset(encoded(*lengths), [], {}, 3, group_by_length=g) for g in (True, False))

    def padding(data: Dataset) -> int:
        batches = [[len(row.token_ids) for row in data.global_batch(step, 8)] for step in range(50)]
        assert sorted(n for b in batches for n in b) == sorted(lengths)
        return sum(8 * max(b) - sum(b) for b in batches)

    assert padding(grouped) < 0.2 * padding(random)
    assert random.order(0, 8) == Dataset(encoded(*lengths), [], {}, 3, group_by_length=False).order(0, 16)
    assert random.order(0, 8) != random.order(1, 8)


def conversations(vocab: int = 64) -> list[Encoded]:
    generator = np.random.default_rng(5)
    return [Encoded(generator.integers(0, vocab, n).astype(np.int32), np.arange(n) > n // 3) for n in (9, 14, 5, 11, 20, 3)]


def states(target: HFTarget, batch: TrainBatch) -> dict[tuple[int, ...], torch.Tensor]:
    """Every document's post-norm states, by its tokens."""
    final_BTH = Online(target, Taps()).fill(batch).hidden[FINAL]
    found = {}
    for row, document_T in enumerate(batch.document_BT):
        for number in document_T[document_T >= 0].unique().tolist():
            at = document_T == number
            found[tuple(batch.token_BT[row][at].tolist())] = final_BTH[row][at]
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("runner", [HFTarget, FastTarget])
@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "qwen3"])
def test_packed_conversation_hidden_states_equal_unpacked(name: str, runner: type[HFTarget]) -> None:
    target, some = runner(tiny_model(name)), conversations()
    packed = collate(pack(some, 32), 0)
    assert packed.sees() is not None and len(packed.token_BT) == 2
    found = states(target, packed)
    for conversation in some:
        alone = states(target, collate([conversation], 0))[tuple(conversation.token_ids.tolist())]
        torch.testing.assert_close(found[tuple(conversation.token_ids.tolist())], alone, atol=1e-5, rtol=1e-4)


LEARNERS = [
    "medusa",
    "hydra",
    "eagle",
    "eagle3",
    "redrafter",
    "draft_model",
    "dflash",
    "dspark",
    "dflash2",
    "xpress",
    "lilicorr",
    "domino",
    "jetspec",
    "dflare",
    "dfly",
]


# heads, recurrent steps, a recurrent network, a model, blocks, shifted ones, a recurrent state over drafts, causal blocks
@pytest.mark.sampled(name=["medusa", "eagle3", "redrafter", "draft_model", "dflash", "dspark", "domino", "jetspec"])
@pytest.mark.parametrize("name", LEARNERS)
def test_packed_batch_losses_and_gradients_equal_padded(name: str) -> None:
    target, some = tiny_target(), conversations()
    sums, gradients = [], []
    for batch in (collate(some, 0, multiple=64), collate(pack(some, 32), 0)):  # padded as on a GPU, where it must not count
        torch.manual_seed(0)
        drafter = build(name, target).train()
        filled = Online(target, drafter.taps).fill(batch)
        total, counts = Objective(drafter, target, LossOptions())(filled)
        total.backward()
        sums.append((total.detach(), counts.loss, counts.total, counts.correct, counts.alive_correct))
        gradients.append([p.grad for p in drafter.parameters() if p.grad is not None])
    for padded, packed in zip(*sums, strict=True):
        torch.testing.assert_close(packed, padded, rtol=1e-5, atol=1e-5)
    for padded, packed in zip(*gradients, strict=True):
        torch.testing.assert_close(packed, padded, rtol=1e-3, atol=1e-4)
