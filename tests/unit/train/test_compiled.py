"""Compiled layers have the losses and gradients of plain ones; a part that cannot be compiled says so once and runs anyway."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_compiler
from torch._dynamo.backends.common import aot_autograd

from drafttrain.core.errors import UserError
from drafttrain.drafters import families
from drafttrain.features.online import Online
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.train import DeepSpeedOptions, TrainOptions, compiled
from drafttrain.train.engine import settings
from tests.helpers import tiny_target
from tests.unit.objective.test_losses import padded_batch


def gradients(name: str, backend: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[float, dict[str, torch.Tensor], list[str]]:
    """(loss, gradients, lines shown). backend: of torch.compile; None: nothing is compiled."""
    torch.manual_seed(0)
    target, said = tiny_target(), list[str]()
    drafter = families()[name].build(families()[name].options(), target).train()
    names = list(drafter.state_dict())
    if backend is not None:
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
        assert compiled.compile_layers(drafter, said.append) > 0
        assert list(drafter.state_dict()) == names
    torch.manual_seed(1)
    loss = Objective(drafter, target, LossOptions())(Online(target, drafter.taps).fill(padded_batch()))[0]
    loss.backward()
    monkeypatch.undo()
    return float(loss.detach()), {n: p.grad for n, p in drafter.named_parameters() if p.grad is not None}, said


@pytest.mark.parametrize("name", ["eagle3", "dflash", "xpress"])
def test_losses_and_gradients_are_equal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, compiled_ = gradients(name, None, monkeypatch), gradients(name, "aot_eager", monkeypatch)
    assert compiled_[2] == []
    assert compiled_[0] == pytest.approx(plain[0], rel=1e-5)
    assert compiled_[1].keys() == plain[1].keys()
    for key, gradient in compiled_[1].items():
        torch.testing.assert_close(gradient, plain[1][key], rtol=1e-3, atol=1e-5, msg=key)


def test_failure_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no C++ compiler\nfound here")

    plain, fallen = gradients("eagle3", None, monkeypatch), gradients("eagle3", broken, monkeypatch)
    assert fallen[2] == [
        "train.compile: this part runs without compilation, as do others that fail: RuntimeError: no C++ compiler"
    ]
    assert fallen[0] == plain[0]
    torch.testing.assert_close(fallen[1], plain[1])


def test_failure_of_the_backward_pass_alone_falls_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers make it at the first call, so that a failure does not come out of `backward`."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("no kernel for this gradient")

    backend = aot_autograd(fw_compiler=make_boxed_compiler(lambda graph, _: graph), bw_compiler=broken)
    plain, fallen = gradients("eagle3", None, monkeypatch), gradients("eagle3", backend, monkeypatch)
    assert len(fallen[2]) == 1 and "no kernel for this gradient" in fallen[2][0]
    assert fallen[0] == plain[0]
    torch.testing.assert_close(fallen[1], plain[1])


def test_family_without_layers_is_told() -> None:
    said = list[str]()
    drafter = families()["medusa"].build(families()["medusa"].options(), tiny_target())
    assert compiled.compile_layers(drafter, said.append) == 0
    assert said == ["train.compile: nothing to compile, this family has no layers of its own; training continues without"]


@pytest.mark.parametrize(
    ("choice", "stage", "message"),
    [("fast", 0, r"'fast'; choose off or on"), ("on", 3, r"deepspeed\.zero_stage=3 divides them")],
)
def test_wrong_choices(choice: str, stage: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings(TrainOptions(compile=choice), DeepSpeedOptions(zero_stage=stage), 1)
