"""How a batch is divided among processes and micro-batches."""

import atexit
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, distributed, nn

from drafttrain.core.errors import UserError
from drafttrain.targets.parallel import end_at_exit
from drafttrain.train import OPTIMIZERS, DeepSpeedOptions, TrainOptions, engine
from drafttrain.train.engine import TrainingEngine, World, accumulation, divided
from drafttrain.train.optimizer import Muon


class Product(nn.Module):
    """Its gradient is the row itself. The last parameter has none."""

    vocabularies: frozenset[int] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.unused = nn.Parameter(torch.zeros(41)), nn.Parameter(torch.zeros(3))

    def forward(self, row: Tensor, progress: float) -> tuple[Tensor, None]:
        return (self.weight * row).sum(), None


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_engine_bfloat16_micro_batch_gradients_sum_in_float32(stage: int, deepspeed_world: World) -> None:
    options = TrainOptions(global_batch=8, micro_batch=1, precision="bfloat16", clip=0.0)
    engine = TrainingEngine(Product(), options, DeepSpeedOptions(zero_stage=stage), deepspeed_world)  # type: ignore[arg-type]
    found: list[Tensor] = []
    inner = engine._base
    inner.register_step_pre_hook(
        lambda *_: found.extend(p.grad.flatten().clone() for g in inner.param_groups for p in g["params"] if p.grad is not None)
    )
    rows = torch.randn(8, 41, generator=torch.Generator().manual_seed(0)).bfloat16()
    for i, row in enumerate(rows):
        engine.backward(engine.forward(row, 0.0)[0], 1.0)
        if i < 7:
            engine.micro_done()
    engine.step(1e-3)
    torch.testing.assert_close(torch.cat(found)[:41], rows.float().sum(0), rtol=1e-6, atol=1e-6)


class Pair(nn.Module):
    """A matrix that Muon steps, and a vector that AdamW steps. The row's sum is the gradient of every element of both."""

    vocabularies: frozenset[int] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.map, self.vector = nn.Linear(4, 6, bias=False), nn.Parameter(torch.ones(5))

    def forward(self, row: Tensor, progress: float) -> tuple[Tensor, None]:
        return (self.map.weight * row.sum()).sum() + (self.vector * row.sum()).sum(), None


@pytest.mark.parametrize("reason", [math.nan, math.inf, "refused"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.sampled
def test_training_engine_step_without_finite_gradient_changes_nothing(
    stage: int, precision: str, optimizer: str, reason: float | str, deepspeed_world: World
) -> None:
    options = TrainOptions(global_batch=1, micro_batch=1, precision=precision, optimizer=optimizer, weight_decay=0.1)
    torch.manual_seed(0)
    pair = Pair().bfloat16() if precision == "bfloat16" else Pair()
    engine = TrainingEngine(pair, options, DeepSpeedOptions(zero_stage=stage), deepspeed_world)  # type: ignore[arg-type]

    def step(value: float, refused: int = 0) -> Tensor:
        engine.backward(engine.forward(torch.tensor([value, 1.0], dtype=pair.vector.dtype), 0.0)[0], 1.0)
        return engine.step(1e-2, 1.0, torch.tensor(refused))

    def state() -> list[Tensor]:
        kept = [x for owner in engine._base.state.values() for x in owner.values() if torch.is_tensor(x)]
        return [x.detach().float().clone() for x in (*engine.whole_state(["map.weight", "vector"]).values(), *kept)]

    step(0.5)
    before = state()
    norm = step(0.5, 1) if isinstance(reason, str) else step(reason)
    assert isinstance(reason, str) or not 0 <= float(norm) < math.inf
    for x, y in zip(before, state(), strict=True):
        assert torch.equal(x, y)
    step(0.25)
    assert not torch.equal(before[1], state()[1]), "the next step is taken again"


def test_muon_refused_step_on_the_device_changes_nothing() -> None:
    """As on a GPU, where the flag is read on the device."""
    matrix = nn.Parameter(torch.randn(4, 6))
    muon = Muon([{"params": [matrix]}], 0.1, 0.1)
    matrix.grad = torch.ones(4, 6)
    muon.step()
    before, momentum = matrix.detach().clone(), muon.state[matrix]["momentum_buffer"].clone()
    matrix.grad, muon.found_inf = torch.full((4, 6), torch.nan), torch.ones(())
    muon.step()
    assert torch.equal(matrix, before) and torch.equal(muon.state[matrix]["momentum_buffer"], momentum)
    matrix.grad, muon.found_inf = torch.ones(4, 6), torch.zeros(())
    muon.step()
    assert bool(matrix.isfinite().all()) and not torch.equal(matrix, before)


def test_divided_lowers_micro_batch_to_divisor_of_process_batch(subtests: pytest.Subtests) -> None:
    cases = [(8, 8, 1, 8), (4, 4, 2, 2), (12, 4, 2, 3), (3, 2, 1, 1), (64, 100, 4, 16), (14, 4, 2, 1)]
    for batch, micro, processes, found in cases:
        with subtests.test(batch=batch, micro=micro, processes=processes):
            options, world = TrainOptions(global_batch=batch, micro_batch=micro), World(0, processes)
            fitted = divided(options, world)
            assert fitted == replace(options, micro_batch=found)
            assert accumulation(fitted, world) * found * processes == batch


def test_divided_indivisible_or_zero_batch_is_refused(subtests: pytest.Subtests) -> None:
    for batch, micro, processes in ((3, 1, 2), (0, 1, 1), (1, 1, 2)):
        with (
            subtests.test(batch=batch, micro=micro, processes=processes),
            pytest.raises(UserError, match=f"number of processes, {processes}"),
        ):
            divided(TrainOptions(global_batch=batch, micro_batch=micro), World(0, processes))


def test_divided_sequence_parallel_group_shares_batch_as_one_process() -> None:
    options, world = TrainOptions(global_batch=6, micro_batch=4, sequence_parallel=2), World(0, 4)
    fitted = divided(options, world)
    assert fitted.micro_batch == 3 and accumulation(fitted, world) == 1
    with pytest.raises(UserError, match=r"number of processes, 4 / train.sequence_parallel=2"):
        divided(replace(options, global_batch=5), world)
    for together in (3, 8):
        with pytest.raises(UserError, match=r"train.sequence_parallel is .; set it to a divisor .* 4"):
            divided(replace(options, sequence_parallel=together), world)


def test_end_at_exit_destroys_group_only_in_process_that_formed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit, ended = list[Callable[[], None]](), list[int]()
    monkeypatch.setattr(atexit, "register", at_exit.append)
    end_at_exit()
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_backend", lambda: "gloo")
    owner = os.getpid()
    for process in (owner + 1, owner):  # a forked child, then the process itself
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        monkeypatch.setattr(distributed, "destroy_process_group", lambda process=process: ended.append(process))
        at_exit[0]()
    assert len(at_exit) == 1 and ended == [owner]


def test_join_world_that_fails_leaves_no_variables_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later commands of this process would take themselves for one of several."""
    monkeypatch.setattr(distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(engine, "load_deepspeed", lambda: [][1])
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(IndexError):
        engine.join_world(torch.device("cpu"))
    left = {"RANK", "WORLD_SIZE"} & os.environ.keys()
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    assert not left


@pytest.mark.slow
def test_join_world_forked_child_exits_without_ending_parent_group() -> None:
    """gloo's threads are not in the child, which would end with signal 11."""
    script = (
        "import atexit, os, torch\n"
        "from drafttrain.train.engine import join_world\n"
        "join_world(torch.device('cpu'))\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    atexit._run_exitfuncs()\n"
        "    os._exit(0)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120).returncode == 0
