"""How a batch is divided among processes and micro-batches."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from drafttrain.core.errors import UserError
from drafttrain.train import DeepSpeedOptions, TrainOptions
from drafttrain.train.engine import TrainingEngine, World, accumulation, divided


class Product(nn.Module):
    """Its gradient is the row itself. The last parameter has none."""

    vocabularies: frozenset[int] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.unused = nn.Parameter(torch.zeros(41)), nn.Parameter(torch.zeros(3))

    def forward(self, row: Tensor, progress: float) -> tuple[Tensor, None]:
        return (self.weight * row).sum(), None


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_micro_batches_of_a_bfloat16_drafter_are_added_in_float32(stage: int, deepspeed_world: World) -> None:
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


@pytest.mark.parametrize(
    ("batch", "micro", "processes", "found"),
    [(8, 8, 1, 8), (4, 4, 2, 2), (12, 4, 2, 3), (3, 2, 1, 1), (64, 100, 4, 16), (14, 4, 2, 1)],
)
def test_a_micro_batch_divides_its_processs_share(batch: int, micro: int, processes: int, found: int) -> None:
    options, world = TrainOptions(global_batch=batch, micro_batch=micro), World(0, processes)
    fitted = divided(options, world)
    assert fitted == replace(options, micro_batch=found)
    assert accumulation(fitted, world) * found * processes == batch


@pytest.mark.parametrize(("batch", "micro", "processes"), [(3, 1, 2), (0, 1, 1), (4, 0, 1), (1, 1, 2)])
def test_a_batch_that_processes_cannot_share_is_refused(batch: int, micro: int, processes: int) -> None:
    with pytest.raises(UserError, match=f"number of processes, {processes}"):
        divided(TrainOptions(global_batch=batch, micro_batch=micro), World(0, processes))


def test_processes_that_hold_sequences_together_share_a_batch_as_one() -> None:
    options, world = TrainOptions(global_batch=6, micro_batch=4, sequence_parallel=2), World(0, 4)
    fitted = divided(options, world)
    assert fitted.micro_batch == 3 and accumulation(fitted, world) == 1
    with pytest.raises(UserError, match=r"number of processes, 4 / train.sequence_parallel=2"):
        divided(replace(options, global_batch=5), world)
    for together in (0, 3, 8):
        with pytest.raises(UserError, match=r"train.sequence_parallel is .; set it to a divisor .* 4"):
            divided(replace(options, sequence_parallel=together), world)


def test_a_forked_child_leaves_the_group_of_its_parent_alone() -> None:
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
