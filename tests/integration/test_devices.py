"""Commands of several processes, each on a GPU of its own, over NCCL: stand-ins of both (`tests/standin`) refuse a collective,
an allocation or a context before `set_device`, and on another process's GPU, and note the order of all collectives.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.drafters import families
from drafttrain.drafters.checkpoint import CheckpointMeta, TargetRecord, save_drafter
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import load_target
from tests import devices, forked
from tests.integration.test_training import SETTINGS, arguments, losses, once
from tests.standin.mooncake import free_port

TWO = "launcher.nproc=2"


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Processes that the test starts see two GPUs; the folder of what they wrote."""
    for name, value in devices.environment(tmp_path / "log").items():
        monkeypatch.setenv(name, value)
    return tmp_path / "log"


def paths(material: Path, output: Path) -> list[str]:
    return ["target=hf", f"target.path={material / 'target'}", f"data.path={material / 'data.jsonl'}", f"output={output}"]


def short(folder: Path) -> list[str]:
    """The least that can be measured."""
    (folder / "prompts.jsonl").write_text(json.dumps({"question_id": 1, "category": "a", "turns": ["abc"]}) + "\n")
    few = ["measure.repeats=1", "measure.timed_prompts=1", "measure.batch_sizes=[1]", "measure.untimed_batch=1"]
    return [f"prompts={folder / 'prompts.jsonl'}", "decode.max_new_tokens=4", *few]


def fit(material: Path, output: Path, *more: str) -> Path:
    forked.run(arguments(material, output, *more))
    return run_of(output)


def fit_on_a_cpu(material: Path, output: Path, *more: str) -> Path:
    """In fresh processes, whose DeepSpeed has not chosen a device yet."""
    done = subprocess.run(arguments(material, output, *more, "target.device=cpu"), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return run_of(output)


def run_of(output: Path) -> Path:
    (state,) = output.glob("*/*/run.json")
    assert json.loads(state.read_text())["finished"]
    return state.parent


def untrained(folder: Path) -> Path:
    """A checkpoint of the embedded target."""
    target, family = load_target(TargetOptions(device="cpu")).target, families()["medusa"]
    folder.mkdir()
    torch.manual_seed(0)
    options = family.options(heads=2, paths=[[0], [1], [0, 0]])
    shape, drafter = target.shape, family.build(options, target)
    sizes = (shape.vocab_size, shape.hidden_size, shape.blocks)
    record = TargetRecord("embedded", None, None, "float32", *sizes, target.fingerprint)
    save_drafter(folder, drafter.state_dict(), CheckpointMeta("medusa", asdict(options), {}, record, 1))
    return folder


@pytest.mark.slow
def test_measure_tensor_parallel_target_on_two_gpus_all_reduces(gpus: Path, tmp_path: Path) -> None:
    given = (f"checkpoint={untrained(tmp_path / 'step-00001')}", f"output={tmp_path}", *short(tmp_path))
    forked.run([sys.executable, "-m", "drafttrain", "measure", *given, "target.tensor_parallel=2", TWO])
    lines = devices.check_order(gpus, 2)
    assert any(line[1] == "all_reduce" for line in lines)
    (report,) = tmp_path.glob("measure/*/report.json")
    assert json.loads(report.read_text())["environment"]["device"].startswith("cuda")


@pytest.fixture(scope="module")
def on_the_cpu(material: Path) -> dict[str, list[float]]:
    """Losses of one process by recipe."""
    recipes = ("medusa", "eagle3")
    return {name: losses(once(material, f"recipe={name}", "train.steps=2", "train.micro_batch=1")) for name in recipes}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("medusa", ("deepspeed=zero3", "target.placement=zero3")),
        pytest.param("eagle3", ("deepspeed=zero2", "target.placement=tensor_parallel"), marks=pytest.mark.grid),
        pytest.param(
            "medusa",
            ("deepspeed=zero1", "features=cached", "features.format=float32", "target.prefetch=true", "train.per_rank=true"),
            marks=pytest.mark.grid,
        ),
        ("eagle3", ("train.sequence_parallel=2", "deepspeed=zero3")),
        ("medusa", ("target.device=cuda", "measure.every=1", "measure.every_prompts=1")),
    ],
    ids=lambda given: given if isinstance(given, str) else given[0],
)
def test_fit_on_two_gpus_losses_equal_cpu_run(
    recipe: str, more: tuple[str, ...], material: Path, tmp_path: Path, gpus: Path, on_the_cpu: dict[str, list[float]]
) -> None:
    """The process that starts the others is under the stand-in too, and touches no GPU."""
    run = fit(material, tmp_path / "out", f"recipe={recipe}", "train.steps=2", "train.micro_batch=1", TWO, *more)
    assert losses(run) == pytest.approx(on_the_cpu[recipe], rel=1e-5)
    lines = devices.check_order(gpus, 2)
    assert lines[0][1:] == ["all_gather", [[1]], "torch.int64"], "what each process has free, as bytes on its GPU"
    assert json.loads((run / "checkpoints" / "step-00002" / "trainer.json").read_text())["device"] == "cuda"


@pytest.mark.slow
@pytest.mark.grid  # fresh processes, as DeepSpeed chooses its device once
@pytest.mark.usefixtures("gpus")
def test_fit_device_cpu_on_gpu_machine_losses_equal_cpu_run(
    material: Path, tmp_path: Path, on_the_cpu: dict[str, list[float]]
) -> None:
    run = fit_on_a_cpu(material, tmp_path / "out", "recipe=medusa", "train.steps=2", "train.micro_batch=1", TWO)
    assert losses(run) == pytest.approx(on_the_cpu["medusa"], rel=1e-5)


@pytest.mark.slow
def test_fit_single_process_on_named_gpu_losses_equal_cpu_run(
    material: Path, tmp_path: Path, gpus: Path, on_the_cpu: dict[str, list[float]]
) -> None:
    """DeepSpeed would take the first one, by the LOCAL_RANK of a group of one."""
    run = fit(material, tmp_path / "out", "recipe=medusa", "train.steps=2", "train.micro_batch=1", "target.device=cuda:1")
    assert losses(run) == pytest.approx(on_the_cpu["medusa"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.sampled(more=[("deepspeed=zero3",)])
@pytest.mark.parametrize("more", [("deepspeed=zero3",), ("deepspeed=zero2", "deepspeed.offload_optimizer=true")], ids=str)
def test_fit_on_two_gpus_resumed_run_losses_equal_cpu_run(
    more: tuple[str, ...], material: Path, tmp_path: Path, gpus: Path, on_the_cpu: dict[str, list[float]]
) -> None:
    steps = ("recipe=medusa", "train.steps=2", "train.checkpoint_every=1", "train.micro_batch=1", TWO, *more)
    run = fit(material, tmp_path / "out", *steps)
    shutil.rmtree(run / "checkpoints" / "step-00002")
    state = run / "run.json"
    state.write_text(state.read_text().replace('"finished": true', '"finished": false'))
    again = fit(material, tmp_path / "out", *steps, "resume=auto")
    assert again == run and losses(run) == pytest.approx(on_the_cpu["medusa"], rel=1e-5)
    devices.check_order(gpus, 2)


@pytest.mark.slow
@pytest.mark.sampled(placement=["zero3"])
@pytest.mark.parametrize("placement", ["zero3", "tensor_parallel"])
def test_fit_sharded_target_on_two_gpus_trains_and_measures(placement: str, material: Path, tmp_path: Path, gpus: Path) -> None:
    more = ("measure.enabled=true", "decode.tree_nodes=3", "train.steps=2", *short(tmp_path))
    fit(material, tmp_path / "out", "recipe=medusa", TWO, f"target.placement={placement}", *more)
    devices.check_order(gpus, 2)


def started(commands: list[list[str]], variables: list[dict[str, str]]) -> None:
    """All at once; all must end well."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    both = zip(commands, variables, strict=True)
    running = [subprocess.Popen(command, env=os.environ | own, **pipes) for command, own in both]
    try:
        said = [process.communicate()[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(said)


@pytest.mark.slow
def test_fit_on_two_nodes_of_two_gpus_losses_equal_cpu_run(
    material: Path, tmp_path: Path, gpus: Path, on_the_cpu: dict[str, list[float]]
) -> None:
    own = arguments(material, tmp_path / "out", "recipe=medusa", "train.steps=2", "train.micro_batch=1", TWO)
    place = ["launcher.nodes=2", f"launcher.rendezvous=localhost:{free_port()}"]
    machines = [forked.start([*own, *place]) for _ in range(2)]
    assert [machine.wait() for machine in machines] == [0, 0], "\n".join(machine.said() for machine in machines)
    devices.check_order(gpus, 4)
    assert losses(run_of(tmp_path / "out")) == pytest.approx(on_the_cpu["medusa"], rel=1e-5)


@pytest.mark.slow
def test_fit_one_visible_gpu_per_process_losses_equal_cpu_run(
    material: Path, tmp_path: Path, gpus: Path, on_the_cpu: dict[str, list[float]]
) -> None:
    """As Slurm's --gpus-per-task does; DeepSpeed takes LOCAL_RANK for the number of the GPU."""
    own = arguments(material, tmp_path / "out", "recipe=medusa", "train.steps=2", "train.micro_batch=1", "deepspeed=zero3")
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shown = [{"RANK": rank, "LOCAL_RANK": rank, "STANDIN_DEVICES": "1", "CUDA_VISIBLE_DEVICES": rank} for rank in "01"]
    started([own] * 2, [world | process for process in shown])
    devices.check_order(gpus, 2)
    assert losses(run_of(tmp_path / "out")) == pytest.approx(on_the_cpu["medusa"], rel=1e-5)


@pytest.mark.slow
def test_fit_more_processes_than_gpus_is_refused_in_one_line(material: Path, tmp_path: Path, gpus: Path) -> None:
    command = [sys.executable, "-m", "drafttrain", "fit", "recipe=medusa", *paths(material, tmp_path), *SETTINGS]
    command.append("launcher.nproc=3")
    done = forked.start(command)
    assert done.wait() == 2
    (line,) = done.said().strip().splitlines()
    assert "LOCAL_RANK is 2, this process sees 2 GPUs; start as many processes on a machine" in line
