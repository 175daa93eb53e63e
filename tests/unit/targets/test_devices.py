"""Which GPU is a process's own, by the variables that torchrun, Slurm and a user set."""

from __future__ import annotations

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.targets.devices import bind, device_of

VARIABLES = ("WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")


def sees(monkeypatch: pytest.MonkeyPatch, gpus: int, **variables: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("name", "gpus", "variables", "found"),
    [
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
    ],
)
def test_a_process_has_the_gpu_of_its_rank(
    name: str, gpus: int, variables: dict[str, str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sees(monkeypatch, gpus, **variables)
    assert str(device_of(name)) == found


@pytest.mark.parametrize(
    ("name", "gpus", "variables", "line"),
    [
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
        ("gpu", 2, {}, "choose auto, cpu or cuda"),
    ],
)
def test_a_gpu_that_is_not_there_gets_one_line(
    name: str, gpus: int, variables: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sees(monkeypatch, gpus, **variables)
    with pytest.raises(UserError, match=line) as caught:
        device_of(name)
    assert "\n" not in str(caught.value)


def test_only_a_gpu_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    bind(torch.device("cpu"))
    bind(torch.device("cuda", 1))
    assert chosen == [torch.device("cuda", 1)]
