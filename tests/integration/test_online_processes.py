"""A loop of two processes: the drafter's gradients are those of the whole batch, and both have the same weights."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import drafttrain as dt
from drafttrain.api import online as api
from drafttrain.runs.options import LauncherOptions, RunOptions
from tests.forked import launch
from tests.helpers import tiny_model
from tests.unit.api.test_online import follower, tokens


def loop(options: RunOptions, resolved: dict[str, Any]) -> None:
    """Three steps and one without a batch in all but the first process; figures of each step and the sum of all weights."""
    rank, size = int(os.environ.get("RANK", 0)), options.launcher.nproc
    if size > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(rank)  # nothing may follow from it
    model = tiny_model()
    drafter = follower(model, "eagle3", f"train.seed={rank}")
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if size > 1 else model
    optimizer, figures = torch.optim.SGD(wrapped.parameters(), lr=0.1), []
    for step in range(3):
        token_BT = tokens(4, 12, step)
        mask_BT = torch.ones(4, 12)
        mask_BT[1:3, :7] = 0  # the processes have unlike numbers of supervised tokens
        rows = slice(rank * 4 // size, (rank + 1) * 4 // size)
        wrapped(input_ids=token_BT[rows], labels=token_BT[rows]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = drafter.step(token_BT[rows], mask=mask_BT[rows])
        figures.append([found.loss, found.expected_tau, found.grad_norm, found.supervised])
    empty = drafter.step(tokens(2, 12, 9) if rank == 0 else None)
    figures.append([empty.loss, empty.expected_tau, empty.grad_norm, empty.supervised])
    total = sum(float(x.double().abs().sum()) for x in drafter.module.state_dict().values())
    Path(resolved["folder"], f"{size}-{rank}.json").write_text(json.dumps([figures, total]))
    pauses = in_pauses(drafter, rank) if size > 1 else []
    Path(resolved["folder"], f"pauses-{rank}.json").write_text(json.dumps(pauses))
    if size > 1:  # gloo's threads may abort a process that exits while it has a group
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def in_pauses(drafter: dt.OnlineDrafter, rank: int) -> list[int]:
    """Steps in each of three pauses. Only the second process is slow, and it alone has nothing to draw at first."""
    now = itertools.count(step=30 if rank else 1)
    api.perf_counter = lambda: next(now) / 1000  # type: ignore[assignment]
    if not rank:
        drafter.feed(tokens(2, 12, 10))
    steps = [len(drafter.replay(milliseconds=200))]
    drafter.feed(tokens(2, 12, 11 + rank))
    return [*steps, *(len(drafter.replay(milliseconds=200)) for _ in range(2))]


@pytest.mark.slow
def test_online_drafter_two_process_steps_equal_one_process(tmp_path: Path) -> None:
    for size in (1, 2):
        launch(loop, RunOptions(launcher=LauncherOptions(nproc=size)), {"folder": str(tmp_path)})
    one, first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("1-0", "2-0", "2-1"))
    assert first == second
    pauses = [json.loads((tmp_path / f"pauses-{rank}.json").read_text()) for rank in (0, 1)]
    assert pauses[0] == pauses[1] and all(0 < steps < 6 for steps in pauses[0]), "the slow one decides for both"
    for ours, alone in zip(first[0], one[0], strict=True):
        assert ours == pytest.approx(alone, rel=2e-4)
    assert first[1] == pytest.approx(one[1], rel=1e-5)
