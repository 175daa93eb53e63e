"""Parts of sequences: which columns a process has, what it predicts there, and what cannot be held together."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.drafters import families
from drafttrain.model.batch import TrainBatch
from drafttrain.objective.losses import LossOptions
from drafttrain.targets.hf import HFTarget
from drafttrain.train import TrainOptions
from drafttrain.train.sharding import check_sequence_parallel
from tests.helpers import tiny_model


class Alone:
    """One of `size` processes, without the others: for what asks them nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def to_heads(self, x_BXhD: Tensor) -> Tensor:
        raise AssertionError("asks the others")

    to_positions = to_heads


def packed(length: int) -> TrainBatch:
    generator = torch.Generator().manual_seed(length)
    token_BT = torch.randint(0, 50, (2, length), generator=generator)
    document_BT = torch.tensor([[0] * 4 + [1] * (length - 4), [0] * (length - 2) + [-1] * 2])
    mask_BT = (torch.rand(2, length, generator=generator) < 0.7) & (document_BT >= 0)
    return TrainBatch(token_BT, torch.arange(length).repeat(2, 1), document_BT, mask_BT)


def test_train_batch_parts_yield_same_predictions_as_whole_batch(subtests: pytest.Subtests) -> None:
    """Lengths that both, one and none of the numbers of parts divide."""
    halo = 5

    def pairs(batch: TrainBatch, first: int, k: int) -> list[tuple[int, ...]]:
        """(row, source's position, label, token after the source) of all pairs."""
        found, width, after_P = batch.future(k), batch.token_BT.shape[1], batch.after(1).flatten()
        rows = zip(found.source_M.tolist(), batch.token_BT.flatten()[found.label_M].tolist(), strict=True)
        return [(s // width, s % width + first, label, int(after_P[s])) for s, label in rows]

    for length, size in product((6, 9, 16), (2, 4)):
        with subtests.test(length=length, size=size):
            whole = packed(length)
            parts = [whole.part(Alone(rank, size), halo) for rank in range(size)]
            assert sum(part.supervised() for part in parts) == whole.supervised()
            assert {part.token_BT.shape for part in parts} == {(2, -(-length // size) + halo)}
            for k in range(1, halo + 1):
                together = [pair for part in parts for pair in pairs(part, part.span.first if part.span else 0, k)]
                assert sorted(together) == sorted(pairs(whole, 0, k))
            with pytest.raises(AssertionError, match=r"beyond the part"):
                parts[0].future(halo + 1)


@pytest.mark.parametrize("limit", [None, 3])
def test_train_batch_parts_draw_same_anchors_as_whole_batch(limit: int | None) -> None:
    whole, visible = packed(16), [0.2, 0.3, 0.5]
    drawn = whole.anchors(limit, visible)
    context = whole.context(drawn)
    found, everywhere = [], []
    for rank in range(4):
        part = whole.part(Alone(rank, 4), 5)
        own = part.anchors(limit, visible)
        assert own.share == drawn.share and part.span is not None and own.visible_BA is not None
        columns_BA = own.source_BA + part.span.first, own.token_BA, own.visible_BA
        found += [(row, *(int(x_BA[row, a]) for x_BA in columns_BA)) for row, a in own.real_BA.nonzero().tolist()]
        everywhere.append(part.context(own))
    assert drawn.visible_BA is not None
    columns_BA = drawn.source_BA, drawn.token_BA, drawn.visible_BA
    wanted = [(row, *(int(x_BA[row, a]) for x_BA in columns_BA)) for row, a in drawn.real_BA.nonzero().tolist()]
    assert sorted(found) == sorted(wanted)
    for seen in everywhere:  # the same for all processes
        assert torch.equal(seen.first_BA, everywhere[0].first_BA) and torch.equal(seen.last_BA, everywhere[0].last_BA)
    sights = {
        (row, int(last)): int(first)
        for row in range(2)
        for first, last in zip(context.first_BA[row], context.last_BA[row], strict=True)
    }
    for row in range(2):
        for first, last in zip(everywhere[0].first_BA[row].tolist(), everywhere[0].last_BA[row].tolist(), strict=True):
            assert sights.get((row, last), first) == first


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("eagle3", {"sequence_parallel": 3}, {}, "llama", r"does not divide the 4 attention heads of the target; set it to 2 or 4"),
    ("medusa", {"sequence_parallel": 2}, {}, "falcon", r"the target, FalconForCausalLM, needs attention masks"),
    ("draft_model", {"sequence_parallel": 2, "on_policy": 0.5}, {}, "llama", r"train.on_policy writes each reply"),
    ("draft_model", {"sequence_parallel": 2}, {"name": "e2e_tv"}, "llama", r"loss=e2e_tv needs .*; choose another loss"),
]


@pytest.mark.parametrize(("name", "train", "loss", "model", "message"), REFUSED)
def test_sequence_parallel_unsupported_target_or_option_is_refused(
    name: str, train: dict[str, Any], loss: dict[str, Any], model: str, message: str
) -> None:
    target = HFTarget(tiny_model(model))
    drafter = families()[name].build(families()[name].options(), target)
    with pytest.raises(UserError, match=message):
        check_sequence_parallel(TrainOptions(**train), LossOptions(**loss), target, drafter, None)
    check_sequence_parallel(TrainOptions(), LossOptions(**loss), target, drafter, None)
