"""The only token shifts there are, against loops."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.model.batch import TrainBatch


def batch_of(documents: list[list[int]], mask: list[list[bool]]) -> TrainBatch:
    document = torch.tensor(documents)
    token = torch.arange(document.numel()).view_as(document)
    return TrainBatch(token, torch.arange(document.shape[1]).expand_as(document), document, torch.tensor(mask))


def test_worked_example() -> None:
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


def test_a_sequence_with_few_places_gives_no_others() -> None:
    """Beside one whose places are drawn from: what is not supervised is no anchor, and the share is of what is."""
    batch = batch_of([[0] * 9, [0] * 9], [[True] * 9, [False] * 6 + [True] * 3])
    every, drawn = batch.anchors(), batch.anchors(4)
    assert every.real_BA.sum(1).tolist() == [7, 2]
    assert drawn.real_BA.sum(1).tolist() == [4, 2] and drawn.share == 6 / 9
    assert drawn.source_BA[1][drawn.real_BA[1]].tolist() == every.source_BA[1][every.real_BA[1]].tolist()


@given(st.integers(1, 3), st.integers(1, 9), st.integers(0, 10), st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_future_stays_in_its_document_and_mask(rows: int, width: int, k: int, random: object) -> None:
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
