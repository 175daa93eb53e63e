"""A small module trained, saved and resumed by one process or by two at every ZeRO stage: what test_resharding.py compares.

`python -m tests.integration.resharding FOLDER few|every PROCESSES...` writes its states, unless they are there, and resumes
those that so many processes wrote. Two processes of `torch.distributed.run` do the same.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafttrain.cli.quiet import quiet
from drafttrain.train import DeepSpeedOptions, TrainOptions
from drafttrain.train.engine import TrainingEngine, World, join_world, leave_world

STAGES = (0, 1, 2, 3)
KINDS = (("adamw", "float32"), ("adamw", "bfloat16"), ("muon", "float32"), ("muon", "bfloat16"))
BEFORE, AFTER, ROWS = 3, 3, 4
PAIRS = {  # the stage that wrote a state and the one that reads it; few: each writes for another, and reads another's
    "few": (*((stage, stage) for stage in STAGES), (0, 3), (3, 1), (1, 2), (2, 0)),
    "every": tuple(product(STAGES, STAGES)),
}
SELECTED = {"few": (KINDS[0], KINDS[-1]), "every": KINDS}
WEIGHTS, END = "weights.safetensors", "end.safetensors"


class Toy(nn.Module):
    """Sizes that no number of processes divides, two groups of parameters, and a parameter that is never used. Of the two
    matrices that Muon optimises, together cut in two halves, one lies whole in the first process.
    """

    vocabularies: frozenset[int] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.unused = nn.Linear(7, 5), nn.Linear(5, 3), nn.Parameter(torch.ones(3))
        self.wide, self.narrow = nn.Linear(5, 9), nn.Linear(9, 5, bias=False)

    def forward(self, rows_B7: Tensor, progress: float) -> tuple[Tensor, None]:
        state_B5 = torch.tanh(self.inner(rows_B7.to(self.inner.weight.dtype)))
        out_B3 = self.outer(state_B5 + self.narrow(torch.tanh(self.wide(state_B5))))
        return (out_B3.float() - 1.0).square().sum() + 0.0 * self.unused.float().sum(), None


def engine(stage: int, optimizer: str, precision: str, world: World) -> TrainingEngine:
    shared: dict[str, Any] = {"global_batch": ROWS, "micro_batch": 1, "lr": 0.05, "weight_decay": 0.1}
    options = TrainOptions(optimizer=optimizer, precision=precision, **shared)
    toy = Toy()
    return TrainingEngine(toy, options, DeepSpeedOptions(zero_stage=stage), world, rescaled=toy.outer)


def steps(trained: TrainingEngine, first: int, count: int) -> list[float]:
    """Losses of these steps, whose rows are those of any number of processes together."""
    world, losses = trained.world, []
    for step in range(first, first + count):
        rows_47 = torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(step))
        own, total = range(world.rank, ROWS, world.size), torch.zeros(1)
        for i, row in enumerate(own):
            loss, _ = trained.forward(rows_47[row : row + 1], 0.0)
            trained.backward(loss, ROWS)
            total += loss.detach()
            if i + 1 < len(own):
                trained.micro_done()
        trained.step(0.05, scale=0.5)
        losses.append(float(world.sum(total)))
    return losses


def save(trained: TrainingEngine, folder: Path) -> None:
    if trained.world.first:
        folder.mkdir(parents=True, exist_ok=True)
    trained.world.wait()
    save_weights(trained, folder / WEIGHTS)
    trained.save_state(folder)
    trained.world.wait()


def save_weights(trained: TrainingEngine, file: Path) -> None:
    weights = trained.whole_state(Toy().state_dict())
    if trained.world.first:
        save_file(weights, file)


def whole(folder: Path) -> dict[str, Tensor]:
    """All elements of every tensor of the saved state, whoever wrote them."""
    pieces: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for file in folder.glob("optimizer-*.safetensors"):
        for name, tensor in load_file(file).items():
            what, start = name.rsplit(":", 1)
            pieces[what][int(start or 0)] = tensor.view(-1)
    found = {what: torch.cat([part for _, part in sorted(parts.items())]) for what, parts in pieces.items()}
    return found | load_file(folder / WEIGHTS)


def write(folder: Path, world: World, which: str) -> None:
    """`<folder>/<processes>-<optimizer>-<precision>-<stage>`: a state after BEFORE steps, the losses of the AFTER steps that
    follow, and the weights at their end.
    """
    if source(folder, world.size, KINDS[0], 0).is_dir():
        return
    for kind in SELECTED[which]:
        for stage in STAGES:
            trained, place = engine(stage, *kind, world), source(folder, world.size, kind, stage)
            steps(trained, 0, BEFORE)
            save(trained, place)
            losses = steps(trained, BEFORE, AFTER)
            save_weights(trained, place / END)
            if world.first:
                (place / "losses.json").write_text(json.dumps(losses))


def source(folder: Path, processes: int, kind: tuple[str, str], stage: int) -> Path:
    return folder / f"{processes}-{'-'.join(kind)}-{stage}"


def resume(folder: Path, processes: int, world: World, which: str) -> list[dict[str, Any]]:
    """The states of so many processes: saved again as they were read, and the losses from there on. `same`: where as many
    processes at the same stage had written it.
    """
    found = []
    for kind in SELECTED[which]:
        for old, new in PAIRS[which]:
            saved, trained = source(folder, processes, kind, old), engine(new, *kind, world)
            trained.load_state(saved, load_file(saved / WEIGHTS))
            again = folder / "again" / f"{processes}-{world.size}-{'-'.join(kind)}-{old}-{new}"
            save(trained, again)
            losses, same = steps(trained, BEFORE, AFTER), (processes, old) == (world.size, new)
            save_weights(trained, again / END)
            found.append({"source": str(saved), "again": str(again), "losses": losses, "same": same})
    return found


if __name__ == "__main__":
    quiet()
    torch.set_num_threads(1)
    place, few_or_every, both = Path(sys.argv[1]), sys.argv[2], join_world(torch.device("cpu"))
    write(place, both, few_or_every)
    resumed = [case for processes in sys.argv[3:] for case in resume(place, int(processes), both, few_or_every)]
    if both.first:
        (place / "resumed.json").write_text(json.dumps(resumed))
    leave_world(both)
