"""Training steps of drafters for a target of a real size with random weights: tokens per second, share of the GPU's peak,
memory.

A step is the frozen target's forward, the drafter's loss and gradients, and AdamW, with weights, gradients and moments in
bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import check, sources
from benchmarks.gpu.ladder import PLAIN
from benchmarks.gpu.machine import Machine, race
from benchmarks.gpu.models import REHEARSED
from benchmarks.gpu.results import Job
from benchmarks.gpu.steps import target_of
from drafttrain.drafters import families
from drafttrain.features.online import Online
from drafttrain.model.batch import TrainBatch
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.train.telemetry import Flops, named_peak

MODEL = "Llama-3.1-8B"
CONTEXTS = (2048, 8192)
TOKENS = 8192  # of a step
REPEATS = 5
OPERATORS = ("rms_norm", "gated", "divergence")  # of the target's forward and of the loss
RATE = 1e-5
OPTIONS: dict[str, dict[str, Any]] = {  # that training knows of `recipes/*_llama31_8b.yaml`
    "eagle3": {"steps": 7, "draft_vocab": 32_000},
    "medusa": {"heads": 3},
}
SMALL = {"eagle3": {"steps": 3, "draft_vocab": 32}, "medusa": {"heads": 2}}


@dataclass(frozen=True, slots=True)
class Setting:
    family: str
    model: str
    context: int

    @property
    def name(self) -> str:
        return f"training {self.family} {self.model} context={self.context}"


class Training:
    """One drafter in training. `flops`: of one step's target forward and drafter."""

    def __init__(self, setting: Setting, machine: Machine, **more: Any) -> None:
        """more: options of the drafter."""
        self.machine, self.target = machine, target_of(setting.model, machine)
        of, vocab = families()[setting.family], self.target.shape.vocab_size
        rows = 2 if machine.rehearsal else TOKENS // setting.context
        torch.manual_seed(0)
        with machine.device:
            options = of.options(**(SMALL if machine.rehearsal else OPTIONS)[setting.family] | more)
            self.drafter = of.build(options, self.target).to(torch.bfloat16).train()
        self.drafter.prepare(lambda: torch.arange(vocab))  # its vocabulary may be any tokens
        self.objective = Objective(self.drafter, self.target, LossOptions())
        self.online = Online(self.target, self.drafter.taps)
        trained = [p for p in self.drafter.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=RATE, fused=not machine.rehearsal)
        self.batch = random_batch(rows, setting.context, vocab, seed=0)
        self.flops, self.loss = self._count()
        self.step()  # AdamW has its moments from here on

    def step(self) -> None:
        self.optimizer.zero_grad()
        batch = self.batch.to(self.machine.device)
        total, _ = self.objective(self.online.fill(batch))
        (total / batch.token_BT.numel()).backward()
        self.optimizer.step()

    def _count(self) -> tuple[float, float]:
        """(operations of a step, its loss), counted as in `drafttrain fit`."""
        counter = Flops()
        with counter.counting(self.batch):
            loss, _ = self.objective(self.online.fill(self.batch))
            (loss / self.batch.token_BT.numel()).backward()
        return counter.of(self.batch), float(loss.detach())


def random_batch(rows: int, length: int, vocab: int, seed: int) -> TrainBatch:
    """Random tokens, on the host."""
    token_BT = torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(seed))
    position_BT = torch.arange(length).expand(rows, length)
    return TrainBatch(token_BT, position_BT, torch.zeros_like(token_BT), torch.ones_like(token_BT, dtype=torch.bool))


def most(work: Callable[[], object], machine: Machine) -> int:
    """Peak bytes on the device while it runs, models and optimizer included."""
    if machine.rehearsal:
        work()
        return 0
    machine.wait()
    torch.cuda.reset_peak_memory_stats(machine.device)
    work()
    machine.wait()
    return torch.cuda.max_memory_allocated(machine.device)


def beyond(work: Callable[[], object], machine: Machine) -> int:
    """Peak bytes in addition to those in use before."""
    held = 0 if machine.rehearsal else torch.cuda.memory_allocated(machine.device)
    return most(work, machine) - held


def measure(setting: Setting, machine: Machine) -> dict[str, Any]:
    training = Training(setting, machine)
    rows, length = training.batch.token_BT.shape
    found = {"rows": rows, "loss": training.loss, "flops": training.flops, "peak_bytes": most(training.step, machine)}
    taken = race({"ours": partial(machine.seconds, training.step)}, REPEATS)["ours"]
    limit, found["tokens_per_s"] = named_peak(machine.name), rows * length / taken
    found["mfu"] = None if limit is None else training.flops / taken / limit
    return found


def jobs(machine: Machine) -> list[Job]:
    model, contexts = (next(iter(REHEARSED)), (24,)) if machine.rehearsal else (MODEL, CONTEXTS)
    settings = [Setting(family, model, context) for family in OPTIONS for context in contexts]
    needs = check.needed(OPERATORS, machine, texts=[PLAIN])
    return [Job(s.name, "training steps", modules_of(s.family), partial(measure, s, machine), **needs) for s in settings]


def modules_of(family: str) -> tuple[str, ...]:
    return (*sources.TRAINING, *sources.of_family(family))
