"""Muon by two processes at every ZeRO stage, against torch's own on whole matrices, and how often they exchange parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafttrain.runs.options import LauncherOptions, RunOptions
from drafttrain.train import DeepSpeedOptions, TrainOptions
from drafttrain.train.engine import TrainingEngine, join_world, leave_world
from tests.forked import launch

STEPS, ROWS, CLIP = 4, 128, 50.0
OPTIONS: dict[str, Any] = {"lr": 2e-3, "weight_decay": 0.1}
SMALL_GROUPS = {"zero_optimization": {"stage": 3, "sub_group_size": 100}}  # elements of one process
CASES: dict[str, tuple[DeepSpeedOptions, int]] = {  # exchanges of a step: without gathering at stage 0, two matrices at a time
    "0": (DeepSpeedOptions(0), 3),
    "1": (DeepSpeedOptions(1), 6),
    "3": (DeepSpeedOptions(3), 6),
    "2-offloaded": (DeepSpeedOptions(2, offload_optimizer=True), 6),
    "3-offloaded": (DeepSpeedOptions(3, offload_optimizer=True, offload_parameters=True), 6),
    "3-small-groups": (DeepSpeedOptions(3, extra=SMALL_GROUPS), 8),
}


class Tower(nn.Module):
    """Five matrices of four shapes, 1744 elements: the third is cut in two where each process steps one half of all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = ((6, 24), (24, 24), (24, 16), (16, 16), (16, 24))
        self.maps, self.head, self.vocabularies = nn.ModuleList(nn.Linear(*size) for size in sizes), nn.Linear(24, 5), {5}

    def forward(self, state_BS: Tensor, progress: float) -> tuple[Tensor, None]:
        for inner in self.maps:
            state_BS = torch.tanh(inner(state_BS))
        return (self.head(state_BS) - 1.0).square().sum(), None


def rows(step: int) -> Tensor:
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(step))


def by_torch() -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the weights at the end."""
    tower, losses = Tower(), []
    matrices = [inner.weight for inner in tower.maps]
    others = [p for p in tower.parameters() if all(p is not m for m in matrices)]
    options = TrainOptions()
    optimizers = [
        torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **OPTIONS),
        torch.optim.AdamW(others, betas=options.betas, **OPTIONS),
    ]
    for step in range(STEPS):
        loss, _ = tower(rows(step), 0.0)
        losses.append(float(loss.detach()))
        (loss / ROWS).backward()
        nn.utils.clip_grad_norm_(tower.parameters(), CLIP)
        for optimizer in optimizers:
            optimizer.step()
        tower.zero_grad()
    return losses, {name: p.detach() for name, p in tower.named_parameters()}


def by_two(options: RunOptions, resolved: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    world, folder, found = join_world(torch.device("cpu")), Path(resolved["folder"]), {}
    train = TrainOptions(optimizer="muon", global_batch=2, micro_batch=1, clip=CLIP, **OPTIONS)
    exchange, asked = torch.distributed.all_to_all_single, [0, 0]

    def counted(received: Tensor, sent: Tensor, *lengths: Any) -> Any:
        asked[0] += 1
        asked[1] += len(sent)
        return exchange(received, sent, *lengths)

    for name, (deepspeed, _) in CASES.items():
        tower, losses = Tower(), []
        engine = TrainingEngine(tower, train, deepspeed, world)
        asked[:] = 0, 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "all_to_all_single", counted)
            for step in range(STEPS):
                loss, _ = engine.forward(rows(step)[world.rank :: world.size], 0.0)
                engine.backward(loss, ROWS)
                engine.step(OPTIONS["lr"])
                losses.append(float(world.sum(loss.detach().clone())))
        found[name] = {"losses": losses, "exchanges": asked[0], "elements": asked[1]}
        weights = engine.whole_state(Tower().state_dict())
        if world.first:
            save_file(weights, folder / f"{name}.safetensors")
    (folder / f"{world.rank}.json").write_text(json.dumps(found))
    leave_world(world)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("muon")
    launch(by_two, RunOptions(launcher=LauncherOptions(nproc=2)), {"folder": str(folder)})
    return folder


def test_muon_one_process_stage_0_weights_equal_torch_bitwise() -> None:
    world, tower = join_world(torch.device("cpu")), Tower()
    train = TrainOptions(optimizer="muon", global_batch=1, micro_batch=1, clip=CLIP, **OPTIONS)
    engine = TrainingEngine(tower, train, DeepSpeedOptions(), world)
    for step in range(STEPS):
        loss, _ = engine.forward(rows(step), 0.0)
        engine.backward(loss, ROWS)
        engine.step(OPTIONS["lr"])
    _, wanted = by_torch()
    for name, parameter in tower.named_parameters():
        assert torch.equal(parameter, wanted[name]), name


@pytest.mark.slow
def test_muon_two_processes_losses_and_weights_equal_torch(both: Path, subtests: pytest.Subtests) -> None:
    losses, wanted = by_torch()
    ranks = [json.loads((both / f"{rank}.json").read_text()) for rank in range(2)]
    for case in CASES:
        with subtests.test(case=case):
            for found in ranks:
                assert found[case]["losses"] == pytest.approx(losses, rel=1e-5)
            weights = load_file(both / f"{case}.safetensors")
            for name, tensor in wanted.items():
                torch.testing.assert_close(weights[name], tensor, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
def test_muon_step_exchanges_each_matrix_element_once(both: Path, subtests: pytest.Subtests) -> None:
    """No element is sent to more processes than need it: to the one that orthogonalises, and to the one that steps it."""
    ranks = [json.loads((both / f"{rank}.json").read_text()) for rank in range(2)]
    for case, (_, exchanges) in CASES.items():
        with subtests.test(case=case):
            assert all(found[case]["exchanges"] == exchanges * STEPS for found in ranks)
            assert sum(found[case]["elements"] for found in ranks) == 2 * 1744 * STEPS
