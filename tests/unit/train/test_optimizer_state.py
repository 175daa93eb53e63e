"""States of optimisers as safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drafttrain.core.errors import UserError
from drafttrain.train.optimizer import load_state, save_state

CPU = torch.device("cpu")
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1),
}


def trained(make: Any, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    optimizer = make(module.parameters())
    for _ in range(steps):
        step(module, optimizer)
    return module, optimizer


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    module(torch.arange(6.0).view(2, 3)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_saved_and_loaded_continues_with_same_weights(name: str, tmp_path: Path) -> None:
    module, optimizer = trained(OPTIMIZERS[name], 3)
    save_state(tmp_path / "state.safetensors", optimizer.state_dict())
    again, other = trained(OPTIMIZERS[name], 0)
    again.load_state_dict(module.state_dict())
    other.load_state_dict(load_state(tmp_path / "state.safetensors", CPU))
    for one in ((module, optimizer), (again, other)):
        step(*one)
    assert torch.equal(module.weight, again.weight)


def test_save_state_unsupported_value_is_refused_without_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds a PosixPath, but only tensors, numbers and texts"):
        save_state(tmp_path / "state.safetensors", {"state": {0: tmp_path}})
    assert not (tmp_path / "state.safetensors").exists()


def test_load_state_damaged_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    file.write_bytes(b"\0" * 20)
    with pytest.raises(UserError, match=r"state\.safetensors is damaged"):
        load_state(file, CPU)
