"""Which GPU is a process's own, by the variables that torchrun, Slurm and a user set; how tests compare their calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.targets.devices import bind, device_of
from tests import devices

VARIABLES = ("WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")


def sees(monkeypatch: pytest.MonkeyPatch, gpus: int, **variables: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_device_of_process_is_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    cases: list[tuple[str, int, dict[str, str], str]] = [
        ("auto", 0, {}, "cpu"),
        ("auto", 0, {"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "cpu"),
        ("auto", 2, {}, "cuda:0"),
        ("auto", 2, {"WORLD_SIZE": "4", "LOCAL_RANK": "1"}, "cuda:1"),
        ("cuda", 2, {"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "cuda:1"),
        ("cuda:1", 2, {"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "cuda:1"),
        ("cuda:1", 2, {}, "cuda:1"),
        ("cpu", 2, {"WORLD_SIZE": "3", "LOCAL_RANK": "2"}, "cpu"),
        ("auto", 1, {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "5"}, "cuda:0"),
        ("auto", 1, {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "GPU-8932f937"}, "cuda:0"),
    ]
    for name, gpus, variables, found in cases:
        with subtests.test(name=name, gpus=gpus, **variables):
            sees(monkeypatch, gpus, **variables)
            assert str(device_of(name)) == found


def test_device_of_missing_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    cases: list[tuple[str, int, dict[str, str], str]] = [
        (
            "auto",
            2,
            {"WORLD_SIZE": "3", "LOCAL_RANK": "2"},
            "LOCAL_RANK is 2, this process sees 2 GPUs; start as many processes",
        ),
        ("auto", 1, {"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "LOCAL_RANK is 1, this process sees 1 GPU; start"),
        (
            "auto",
            2,
            {"WORLD_SIZE": "4", "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "0,1"},
            "LOCAL_RANK is 3, this process sees 2",
        ),
        ("auto", 2, {"WORLD_SIZE": "2"}, "WORLD_SIZE is set, LOCAL_RANK is not"),
        (
            "cuda:1",
            2,
            {"WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            "each of several processes needs its own GPU; set target.device=auto",
        ),
        ("cuda:2", 2, {}, "target.device is 'cuda:2', this process sees 2 GPUs"),
        ("cuda", 0, {}, "no CUDA device is available"),
        ("gpu", 2, {}, "choose auto, cpu, cuda"),
    ]
    for name, gpus, variables, line in cases:
        with subtests.test(name=name, gpus=gpus, **variables):
            sees(monkeypatch, gpus, **variables)
            with pytest.raises(UserError, match=line) as caught:
                device_of(name)
            assert "\n" not in str(caught.value)


def test_bind_sets_cuda_device_and_ignores_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    bind(torch.device("cpu"))
    bind(torch.device("cuda", 1))
    assert chosen == [torch.device("cuda", 1)]


REDUCED = [[0, 1, 2], "all_reduce", [[8]], "torch.float32"]


def swapped(received: list[int], sent: list[int], **other: Any) -> list[Any]:
    """A line of an all-to-all of rows of 4."""
    line = {"group": [0, 1, 2], "width": 4, "kind": "torch.bfloat16"} | other
    shapes = [[sum(rows), line["width"]] for rows in (received, sent)]
    return [line["group"], devices.ALL_TO_ALL, shapes, line["kind"], received, sent]


SWAPPED = [swapped([1, 0, 7], [1, 4, 2]), swapped([4, 0, 0], [0, 0, 3]), swapped([2, 3, 0], [7, 0, 0])]


def test_check_order_of_all_to_all_compares_sent_with_expected(tmp_path: Path, subtests: pytest.Subtests) -> None:
    cases: list[tuple[int, list[Any], bool]] = [
        (0, SWAPPED[0], True),
        (1, swapped([5, 0, 0], [0, 0, 3]), False),
        (2, swapped([2, 2, 0], [7, 0, 0]), False),
        (0, swapped([1, 0, 7], [2, 4, 2]), False),  # to itself
        (1, swapped([4, 0, 0], [0, 0, 3], kind="torch.float32"), False),
        (1, swapped([4, 0, 0], [0, 0, 3], width=2), False),
        (2, swapped([2, 3, 0], [7, 0, 0], group=[0, 2, 1]), False),
        (1, REDUCED, False),
    ]
    for rank, other, fits in cases:
        for process, line in enumerate(SWAPPED):
            called = [REDUCED, other if process == rank else line, REDUCED]
            (tmp_path / f"rank-{process}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in called))
        with subtests.test(rank=rank, other=other):
            if fits:
                assert devices.check_order(tmp_path, 3) == [REDUCED, SWAPPED[0], REDUCED]
            else:
                with pytest.raises(AssertionError, match="collective 1: "):
                    devices.check_order(tmp_path, 3)


def test_check_order_collective_missing_on_one_rank_is_reported(tmp_path: Path) -> None:
    for process, called in enumerate((2, 2, 1)):
        (tmp_path / f"rank-{process}.jsonl").write_text(f"{json.dumps(REDUCED)}\n" * called)
    with pytest.raises(AssertionError, match=r"collective 1: .*all_reduce.* on 0, \[\] on 2"):
        devices.check_order(tmp_path, 3)


def test_device_of_other_kinds_is_refused_where_it_cannot_train(monkeypatch: pytest.MonkeyPatch) -> None:
    for available in (True, False):
        monkeypatch.setattr(torch.xpu, "is_available", lambda available=available: available)
        if available:
            assert device_of("xpu") == torch.device("xpu")
    for name, message in (
        ("mps", "Apple's GPUs have no float64, .*; set target.device=cpu"),
        ("xpu", "'xpu', which is not available here; choose auto, cpu"),
        ("hpu", "'hpu', which is not available here; choose auto, cpu"),
    ):
        with pytest.raises(UserError, match=message):
            device_of(name)
