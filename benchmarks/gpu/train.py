"""Section `train`: the speed of training steps on this GPU, the saving of the fused loss, and whether drafters learn.

First steps for a target of a real size (`throughput.py`). Then the loss by itself: output matrix, divergence and both
gradients by `losses.Objective`, with its divergence fused or in plain torch. Then every family on the embedded target with a
plain AdamW loop over random tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.gpu import check, rivals, throughput
from benchmarks.gpu.cases import LOSSES, V
from benchmarks.gpu.machine import Machine, race
from benchmarks.gpu.results import Job, RedError, SkipError
from benchmarks.gpu.throughput import random_batch
from drafttrain.drafters import families
from drafttrain.features.online import Online
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.drafter import Drafter, trainable
from drafttrain.model.proposal import Proposal
from drafttrain.model.target import FINAL, Taps
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.ops import divergence
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import load_target
from tests.tiny import built

SECTION = "train"
WIDTH = 4096
REPEATS = 5
AGREE = 1e-3  # of both ways' losses and gradients, as far as bfloat16 slopes agree
RATE = 3e-4
ENDS = 10  # steps whose mean loss counts as the first, and the last


class Bare(Drafter):
    """One prediction through one output matrix: only the loss."""

    def __init__(self, vocab: int, width: int, device: torch.device) -> None:
        super().__init__(Proposal(1))
        self.taps = Taps(final=True)
        self.output = nn.Linear(width, vocab, bias=False, device=device, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(width, device=device, dtype=torch.bfloat16))  # a gradient goes on from the states

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        pairs = batch.future(2)
        hidden_MH = batch.hidden[FINAL].flatten(0, 1)[pairs.source_M] * self.scale
        yield Prediction(0, pairs.source_M, pairs.label_M, hidden_MH, self.output)

    def open(self, slots: int, max_len: int) -> Any:
        raise AssertionError("it decodes nothing")


def loss(name: str, machine: Machine) -> dict[str, Any]:
    """Seconds and peak memory of forward and backward, both ways. Raises RedError where their gradients differ."""
    rows, length, width, vocab, chunk = (2, 9, 16, 61, 8) if machine.rehearsal else (4, 2048, WIDTH, V, 1024)
    batch = random_batch(rows, length, vocab, seed=0).to(machine.device)
    batch.hidden[FINAL] = torch.randn(rows, length, width, device=machine.device, dtype=torch.bfloat16)
    drafter = Bare(vocab, width, machine.device)
    head = nn.Linear(width, vocab, bias=False, device=machine.device, dtype=torch.bfloat16).requires_grad_(False)
    target: Any = SimpleNamespace(head=head, shape=SimpleNamespace(vocab_size=vocab))
    objective = Objective(drafter, target, LossOptions(name, chunk))

    def step(way: Callable[[], Any]) -> None:
        objective.zero_grad()
        with way():
            total, _ = objective(batch)
            (total / (rows * length)).backward()

    ways: dict[str, Callable[[], Any]] = {
        "fused": nullcontext,
        "plain": partial(mock.patch.object, divergence, "_serves", lambda *_: False),
    }
    found: dict[str, Any] = {}
    gradients: dict[str, Tensor] = {}
    for way, how in ways.items():
        objective.zero_grad()  # so that both ways begin without gradients in memory
        found[f"{way}_bytes"] = throughput.beyond(partial(step, how), machine)
        assert drafter.scale.grad is not None
        gradients[way] = drafter.scale.grad.double()
    apart = float((gradients["fused"] - gradients["plain"]).norm() / gradients["plain"].norm())
    if not apart <= 10 * AGREE:
        raise RedError(f"the gradients are {apart:.1e} apart")
    taken = race({way: partial(machine.seconds, partial(step, how)) for way, how in ways.items()}, REPEATS)
    return found | {f"{way}_ms": 1e3 * seconds for way, seconds in taken.items()} | {"tokens": rows * length}


def family(name: str, machine: Machine) -> dict[str, Any]:
    """Tokens per second, and the loss before and after. Raises RedError where it does not fall."""
    rows, length, kept, steps = (2, 24, 2, 24) if machine.rehearsal else (16, 256, 8, 300)
    dtype = "float32" if machine.rehearsal else "bfloat16"
    target = load_target(TargetOptions(dtype=dtype, device=str(machine.device))).target
    vocab = target.shape.vocab_size
    torch.manual_seed(0)
    drafter = built(name, target, machine.rehearsal).to(machine.device).train()
    if not trainable(drafter):
        raise SkipError("it has nothing to train")
    objective, online = Objective(drafter, target, LossOptions()), Online(target, drafter.taps)
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=RATE)
    batches = [random_batch(rows, length, vocab, seed) for seed in range(kept)]
    losses: list[Tensor] = []

    def run(count: int) -> None:
        for _ in range(count):
            batch = online.fill(batches[len(losses) % kept])
            total, _ = objective(batch)
            mean = total / batch.supervised()
            optimizer.zero_grad()
            mean.backward()
            optimizer.step()
            losses.append(mean.detach())

    run(ENDS)
    taken = machine.seconds(partial(run, steps - ENDS))
    first, last = (float(torch.stack(part).mean()) for part in (losses[:ENDS], losses[-ENDS:]))
    if not last < first:
        raise RedError(f"the loss went from {first:.3f} to {last:.3f} in {steps} steps")
    return {"tokens_per_s": (steps - ENDS) * rows * length / taken, "first_loss": first, "last_loss": last, "steps": steps}


def jobs(machine: Machine) -> list[Job]:
    found = throughput.jobs(machine) + rivals.jobs(machine)  # goals come first
    alone, needs = check.needed(["divergence"], machine), check.needed(throughput.OPERATORS, machine)
    loss_modules = ("drafttrain.objective.losses", "drafttrain.model.batch")
    found += [Job(f"loss {name}", "loss", loss_modules, partial(loss, name, machine), **alone) for name in LOSSES]
    for name in families():
        modules = throughput.modules_of(name)
        found.append(Job(f"drafter {name}", "drafters", modules, partial(family, name, machine), **needs))
    return found
