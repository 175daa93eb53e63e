"""Compiled layers have the losses and gradients of plain ones; a part that cannot be compiled says so once and runs anyway."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_compiler
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config

from drafttrain.core.errors import UserError
from drafttrain.drafters import families
from drafttrain.features.online import Online
from drafttrain.model.layers import DecoderLayer
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.train import DeepSpeedOptions, TrainOptions, compiled
from drafttrain.train.engine import settings
from tests.helpers import tiny_target
from tests.unit.objective.test_losses import padded_batch


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Families share the functions that are compiled: what earlier tests compiled counts towards dynamo's recompile limit."""
    torch._dynamo.reset()
    with functorch_config.patch(force_non_lazy_backward_lowering=False):
        yield


@cache
def plain(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    return gradients(name, None)[:2]


def gradients(name: str, backend: Any) -> tuple[float, dict[str, torch.Tensor], list[str]]:
    """(loss, gradients, lines shown). backend: of torch.compile; None: nothing is compiled."""
    torch.manual_seed(0)
    target, said = tiny_target(), list[str]()
    drafter = families()[name].build(families()[name].options(), target).train()
    names = list(drafter.state_dict())
    if backend is not None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch, "compile", partial(torch.compile, backend=backend))
            assert compiled.compile_layers(drafter, said.append) > 0
        assert list(drafter.state_dict()) == names
    torch.manual_seed(1)
    loss = Objective(drafter, target, LossOptions())(Online(target, drafter.taps).fill(padded_batch()))[0]
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in drafter.named_parameters() if p.grad is not None}, said


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("eagle3", "eager"),  # dynamo's graph of the forward pass alone: a fifth of the time
        ("dflash", "eager"),
        pytest.param("xpress", "eager", marks=pytest.mark.slow),
        pytest.param("eagle3", "aot_eager", marks=pytest.mark.slow),
        pytest.param("dflash", "aot_eager", marks=pytest.mark.grid),
        pytest.param("xpress", "aot_eager", marks=pytest.mark.grid),  # the layers of dflash
    ],
)
def test_compile_layers_loss_and_gradients_equal_eager(name: str, backend: str) -> None:
    (loss, wanted), (found, compiled_, said) = plain(name), gradients(name, backend)
    assert said == []
    assert found == pytest.approx(loss, rel=1e-5)
    assert compiled_.keys() == wanted.keys()
    for key, gradient in compiled_.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-3, atol=1e-5, msg=key)


def test_compile_layers_backend_failure_runs_eager_with_one_message() -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no C++ compiler\nfound here")

    loss, fallen, said = gradients("eagle3", broken)
    assert said == ["train.compile: this part runs without compilation, as do others that fail: RuntimeError: no C++ compiler"]
    assert loss == plain("eagle3")[0]
    torch.testing.assert_close(fallen, plain("eagle3")[1])


def test_compile_layers_backward_compile_failure_runs_eager_with_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers make it at the first call, so that a failure does not come out of `backward`."""
    monkeypatch.setattr(compiled, "PARTS", {DecoderLayer: ("leave",)})  # one graph of gradients instead of three

    def broken(*_: Any) -> Any:
        raise RuntimeError("no kernel for this gradient")

    backend = aot_autograd(fw_compiler=make_boxed_compiler(lambda graph, _: graph), bw_compiler=broken)
    loss, fallen, said = gradients("eagle3", backend)
    assert len(said) == 1 and "no kernel for this gradient" in said[0]
    assert loss == plain("eagle3")[0]
    torch.testing.assert_close(fallen, plain("eagle3")[1])


def test_compile_layers_family_without_layers_returns_zero_with_message() -> None:
    said = list[str]()
    drafter = families()["medusa"].build(families()["medusa"].options(), tiny_target())
    assert compiled.compile_layers(drafter, said.append) == 0
    assert said == ["train.compile: nothing to compile, this family has no layers of its own; training continues without"]


def test_train_compile_with_zero3_is_refused() -> None:
    with pytest.raises(UserError, match=r"deepspeed\.zero_stage=3 divides them"):
        settings(TrainOptions(compile="on"), DeepSpeedOptions(zero_stage=3), 1)
