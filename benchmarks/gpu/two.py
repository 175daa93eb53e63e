"""`make gpu-two`: what one GPU cannot show, on a machine with two, in about five minutes; on the CPU over gloo with REHEARSE=1.

- NCCL's collectives of two processes, also in a captured graph, and a target of which each GPU has a half: its captured decode
  steps write the texts of the whole target.
- Training steps at ZeRO 1 and 3 of two processes have the losses of one, and states of either resume in the other.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import torch
from safetensors.torch import load_file, save_file

from benchmarks.gpu.processes import AGREE, Place, finished, here, hold, launch, shared
from benchmarks.gpu.results import RedError
from benchmarks.gpu.throughput import random_batch
from drafttrain.drafters import families
from drafttrain.features.online import Online
from drafttrain.model.batch import TrainBatch
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import load_target
from drafttrain.train import DeepSpeedOptions, TrainOptions
from drafttrain.train.engine import TrainingEngine, World, join_world

STAGES = (1, 3)
ROWS, LENGTH, SAVED, STEPS = 4, 24, 2, 4  # a state is saved after SAVED of the STEPS
RATE = 1e-3
WEIGHTS, LOSSES = "weights.safetensors", "losses.json"


class Training:
    """Steps of one drafter in all processes together; each has its rows of one batch."""

    def __init__(self, world: World, device: torch.device) -> None:
        self.world, self.device = world, device
        self.target = load_target(TargetOptions(dtype="float32", device=str(device))).target
        whole = random_batch(ROWS, LENGTH, self.target.shape.vocab_size, seed=0)
        columns = (whole.token_BT, whole.position_BT, whole.document_BT, whole.mask_BT)
        self.batch = TrainBatch(*(x[world.rank :: world.size] for x in columns)).to(device)

    def engine(self, stage: int) -> TrainingEngine:
        torch.manual_seed(0)
        family = families()["medusa"]
        self.drafter = family.build(family.options(), self.target).to(self.device).train()
        objective = Objective(self.drafter, self.target, LossOptions())
        self.names = [name for name, _ in objective.named_parameters()]
        options = TrainOptions(global_batch=ROWS, micro_batch=ROWS // self.world.size)
        return TrainingEngine(objective, options, DeepSpeedOptions(zero_stage=stage), self.world)

    def steps(self, engine: TrainingEngine, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            loss, _ = engine.forward(Online(self.target, self.drafter.taps).fill(self.batch), 1.0)
            engine.backward(loss, ROWS * LENGTH)
            engine.step(RATE)
            losses.append(float(self.world.sum(loss.detach().clone())))
        return losses

    def save(self, engine: TrainingEngine, folder: Path) -> None:
        weights = engine.whole_state(self.names)
        if self.world.first:
            folder.mkdir()
            save_file(weights, folder / WEIGHTS)
        self.world.wait()
        engine.save_state(folder)
        self.world.wait()


def train(place: Place, folder: Path) -> None:
    """Train at each stage and leave states and losses in the folder; then resume the states that other processes left there."""
    world = join_world(place.device)
    training, others = Training(world, place.device), [path for path in folder.iterdir() if path.name[0] != str(world.size)]
    for stage in STAGES:
        own, engine = folder / f"{world.size}-{stage}", training.engine(stage)
        if not own.exists():
            losses = training.steps(engine, SAVED)
            training.save(engine, own)
            losses += training.steps(engine, STEPS - SAVED)
            hold(f"the loss does not fall at ZeRO stage {stage}: {losses}", losses[-1] < losses[0])
            if world.first:
                (own / LOSSES).write_text(json.dumps(losses))
            world.wait()
        expected = torch.tensor(json.loads((own / LOSSES).read_text()))
        for other in others:
            apart = torch.tensor(json.loads((other / LOSSES).read_text())) / expected - 1
            hold(f"losses of {other.name} and of {own.name} (processes-stage) differ", float(apart.abs().max()) <= AGREE)
            engine = training.engine(stage)
            engine.load_state(other, load_file(other / WEIGHTS))
            apart = torch.tensor(training.steps(engine, STEPS - SAVED)) / expected[SAVED:] - 1
            hold(f"the state of {other.name} does not resume in {own.name}", float(apart.abs().max()) <= AGREE)


def case(name: str, processes: int, folder: Path, rehearse: bool) -> bool:
    """Run one case in processes of its own and print how it went."""
    began, hidden = perf_counter(), {"CUDA_VISIBLE_DEVICES": ""} if rehearse else {}
    command = [sys.executable, "-m", "benchmarks.gpu.two", "--case", name, "--folder", str(folder)]
    try:
        launch(command, [{"LOCAL_RANK": str(rank)} | hidden for rank in range(processes)])
    except RedError as error:
        print(f"{name}, {processes} processes: RED: {error}", flush=True)
        return False
    print(f"{name}, {processes} processes: passed, {perf_counter() - began:.0f} s", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU over gloo, to find what breaks")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case is not None:
        place = here()
        shared(place) if given.case == "shared target" else train(place, given.folder)
        return finished()
    if not given.rehearse and (seen := torch.cuda.device_count()) < 2:
        fix = "run it on a machine with two, or rehearse it here with REHEARSE=1"
        print(f"gpu-two: two GPUs are needed, torch {torch.__version__} sees {seen}; {fix}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        plan = (("shared target", 2), ("training", 1), ("training", 2), ("training", 1))  # the last resumes what two left
        passed = [case(name, processes, Path(scratch), given.rehearse) for name, processes in plan]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
