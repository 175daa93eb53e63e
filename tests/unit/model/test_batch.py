"""The only token shifts there are, against loops."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.features.online import tensors
from drafttrain.model.batch import TrainBatch, moved
from drafttrain.objective.chunks import chunks


def batch_of(documents: list[list[int]], mask: list[list[bool]]) -> TrainBatch:
    document = torch.tensor(documents)
    token = torch.arange(document.numel()).view_as(document)
    return TrainBatch(token, torch.arange(document.shape[1]).expand_as(document), document, torch.tensor(mask))


def test_train_batch_small_example_gives_expected_pairs_and_anchors() -> None:
    batch = batch_of([[0, 0, 0, 0, 0]], [[True] * 5])
    pairs = batch.future(2)
    assert pairs.source_M.tolist() == [0, 1, 2] and pairs.label_M.tolist() == [2, 3, 4]
    assert batch.after(1).tolist() == [[1, 2, 3, 4, 0]]
    assert batch.teacher_index(pairs.label_M).tolist() == [1, 2, 3]
    anchors = batch.anchors()
    assert anchors.source_BA.tolist() == [[0, 1, 2]] and anchors.share == 1.0
    assert anchors.token_BA.tolist() == anchors.position_BA.tolist() == [[1, 2, 3]]  # here a token is its own position
    place_M, pairs = batch.future_of(anchors, 3)
    assert (place_M.tolist(), pairs.source_M.tolist(), pairs.label_M.tolist()) == ([0, 1], [0, 1], [3, 4])
    assert batch.context(anchors).seen(5).int().tolist() == [[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]]


def test_train_batch_nonfinite_rows_become_padding() -> None:
    batch = batch_of([[0, 0, 0], [0, 0, -1], [0, 0, 0]], [[True] * 3, [True, True, False], [True] * 3])
    state = torch.ones(3, 3, 2, dtype=torch.bfloat16)
    state[0, 1, 0], state[1, 2, 1] = torch.inf, torch.nan  # the second is of padding
    filled = replace(batch, hidden={4: torch.ones(3, 3, 2), 2: state})
    assert filled.nonfinite().tolist() == [True, False, False]
    left = filled.without([0], 7)
    assert left.token_BT.tolist() == [[7, 7, 7], [3, 4, 5], [6, 7, 8]] and left.document_BT[0].tolist() == [-1] * 3
    assert left.supervised() == batch.supervised() - 3 and not left.hidden[2][0].any() and bool(left.hidden[4][1:].all())
    assert left.future(1).source_M.tolist() == [3, 6, 7]


def test_train_batch_drawn_anchors_are_limited_to_supervised_positions() -> None:
    """Beside one whose places are drawn from: what is not supervised is no anchor, and the share is of what is."""
    batch = batch_of([[0] * 9, [0] * 9], [[True] * 9, [False] * 6 + [True] * 3])
    every, drawn = batch.anchors(), batch.anchors(4)
    assert every.real_BA.sum(1).tolist() == [7, 2]
    assert drawn.real_BA.sum(1).tolist() == [4, 2] and drawn.share == 6 / 9
    assert drawn.source_BA[1][drawn.real_BA[1]].tolist() == every.source_BA[1][every.real_BA[1]].tolist()


@given(st.integers(1, 3), st.integers(1, 9), st.integers(0, 10), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None, derandomize=True)  # the same in each run
def test_train_batch_future_pairs_stay_in_document_and_mask(rows: int, width: int, k: int, random: object) -> None:
    documents = [sorted(random.choice([0, 1, 2]) for _ in range(width)) for _ in range(rows)]
    for row in documents:
        for i in range(random.randint(0, width // 2)):
            row[-1 - i] = -1
    mask = [[random.random() < 0.6 for _ in range(width)] for _ in range(rows)]
    pairs = batch_of(documents, mask).future(k)
    expected = [
        (b * width + t, b * width + t + k)
        for b in range(rows)
        for t in range(width)
        if t + k < width and documents[b][t] == documents[b][t + k] >= 0 and mask[b][t + k]
    ]
    assert list(zip(pairs.source_M.tolist(), pairs.label_M.tolist(), strict=True)) == expected


VISIBLE = [0.0, 0.5, 0.5]  # blocks begin with two or three true tokens
DEVICE = torch.device("meta")  # it has no data: whatever asks it for some fails


def packed_batch() -> TrainBatch:
    token_BT = torch.arange(24).view(2, 12)
    document_BT = torch.tensor([[0] * 5 + [1] * 7, [0] * 10 + [-1] * 2])
    mask_BT = torch.rand(2, 12, generator=torch.Generator().manual_seed(0)) < 0.8
    return TrainBatch(token_BT, torch.arange(12).expand(2, 12), document_BT, mask_BT)


def test_train_batch_on_device_needs_no_device_reads() -> None:
    host, there = packed_batch(), packed_batch().to(DEVICE)
    for k in (1, 2, 5):
        pairs, moved = host.future(k), there.future(k)
        assert moved.label_M.device == DEVICE
        assert torch.equal(there.on_host(moved.source_M), pairs.source_M)
        assert torch.equal(there.on_host(moved.label_M), pairs.label_M)
    for anchors, moved in (
        (host.anchors(3), there.anchors(3)),
        (host.anchors(3, VISIBLE), there.anchors(3, VISIBLE)),
        (host.nested([0.8, 0.5])[-1][1], there.nested([0.8, 0.5])[-1][1]),
    ):
        assert moved.source_BA.device == DEVICE and moved.share == anchors.share
        place_M, pairs = host.future_of(anchors, 2)
        place_there, pairs_there = there.future_of(moved, 2)
        assert torch.equal(there.on_host(place_there), place_M)
        assert torch.equal(there.on_host(pairs_there.label_M), pairs.label_M)
    assert there.supervised() == host.supervised() and there.digest == host.digest
    seen, wanted = there.sees(), host.sees()
    assert seen is not None and wanted is not None and seen.number_BT.device == DEVICE and seen.lengths == wanted.lengths
    assert there.to(torch.device("meta")).host is there.host


def test_moved_expanded_tensor_is_copied_before_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11 pins memory: a tensor with two elements in one place is refused."""

    def pin(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, device, non_blocking: x)
    position_BT = torch.arange(5).expand(3, 5)
    with pytest.raises(RuntimeError, match="single memory location"):
        pin(position_BT)
    assert torch.equal(moved(position_BT, torch.device("cuda")), position_BT)


def test_chunks_on_device_need_no_device_reads() -> None:
    host, there = packed_batch(), packed_batch().to(DEVICE)
    places = [there.teacher_index(there.on_host(there.future(k).label_M)) for k in (2, 3)]
    wanted = list(chunks([host.teacher_index(host.future(k).label_M) for k in (2, 3)], ["a", "a"], 4))
    found = list(chunks(places, ["a", "a"], 4, DEVICE))
    assert [len(c.position_U) for c in found] == [len(c.position_U) for c in wanted] and len(found) > 2
    assert all(c.position_U.device == DEVICE for c in found)
    assert [[[p.count for p in piece] for piece in c.pieces] for c in found] == [
        [[p.count for p in piece] for piece in c.pieces] for c in wanted
    ]


def test_prefetch_tensors_include_indices_placed_on_device() -> None:
    """Another stream keeps their memory (`features.online.Prefetch`)."""
    there = packed_batch().to(DEVICE)
    pairs = there.future(2)
    found = list(tensors(there))
    assert any(x is pairs.label_M for x in found) and any(x is there.token_BT for x in found)
    assert len(found) == 4 + 2 and all(x.device == DEVICE for x in found)
