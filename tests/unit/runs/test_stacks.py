"""Which stacks load a drafter, said before it is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from drafttrain.core.errors import UserError
from drafttrain.drafters import families
from drafttrain.export.table import loads
from drafttrain.runs.options import RunOptions
from drafttrain.runs.placement import built
from drafttrain.runs.stacks import check_stacks, plan, stacks_of
from drafttrain.targets.load import load_target
from tests import exports
from tests.composing import compose
from tests.helpers import FEW

Command = Callable[..., int]


def run_options(*words: str) -> RunOptions:
    options = OmegaConf.to_object(compose(words))
    assert isinstance(options, RunOptions)
    return options


@pytest.mark.parametrize("names", [FEW, pytest.param(tuple(families()), marks=pytest.mark.slow)], ids=["few", "every"])
def test_plan_without_weights_says_what_fit_says(names: tuple[str, ...], subtests: pytest.Subtests) -> None:
    """As a family's recipe makes the drafter for the embedded target."""
    loaded = load_target(run_options("recipe=medusa").target)
    for family in (name for name in names if loads(name) and name != "mtp_native"):  # the embedded target has no such module
        with subtests.test(family=family):
            options, by_fit, planned = run_options(f"recipe={family}", "data.path=x"), list[str](), list[str]()
            torch.manual_seed(0)
            check_stacks(options, loaded, built(options, loaded.target), by_fit.append)
            plan(options, planned.append)
            assert planned[0].startswith(f"drafter: {family}, for LlamaForCausalLM, 12 blocks")
            assert planned[1 : 1 + len(by_fit)] == by_fit and by_fit


def test_plan_of_family_that_no_stack_loads_is_refused_with_reason() -> None:
    with pytest.raises(UserError, match="no stack loads early_exit: only the target is needed"):
        plan(run_options("recipe=early_exit"), lambda line: None)


def test_stacks_of_checkpoint_leave_out_those_that_refuse_the_drafter(tmp_path: Path) -> None:
    target = exports.loaded()
    plain, normed = (exports.checkpoint(tmp_path / str(norm), "eagle3", target, fc_norm=norm) for norm in (False, True))
    assert set(stacks_of(plain, target)) > set(stacks_of(normed, target)) >= {"vllm"}


def test_export_plan_flag_prints_plan_and_writes_nothing(command: Command, capfd: pytest.CaptureFixture[str]) -> None:
    assert command("export", "--plan", "recipe=medusa", "out=exported") == 0
    assert "vllm, tgi load this drafter" in capfd.readouterr().out
    assert command("export", "--plan", "recipe=medusa", "format=sglang") == 2
    assert "medusa cannot be exported to sglang: it has no loader for this family" in capfd.readouterr().err
    plan = ["export", "--plan"]
    for words in (["fit", "--plan", "recipe=medusa"], plan, [*plan, "target=x"], [*plan, "recipe=medusa", "checkpoint=x"]):
        assert command(*words) == 2 and "drafttrain export --plan recipe=NAME target=DIR" in capfd.readouterr().err
