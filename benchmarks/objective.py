"""The objective, chunk by chunk (`drafttrain/objective/losses.py`), compared with one that keeps all logits.

Head, divergence KL(p || q) and all gradients, for a drafter whose only weights are its output matrix. The alternative is the
simple way: both models' logits of all positions as [T, V] tensors, with autograd's saved tensors. It computes neither the
acceptance nor the counts of ours.

Shapes: T positions, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import DiffersError, Work
from benchmarks.contest import Cell, Entrant, cells_table, contest, draw, record
from benchmarks.section import Found, Settings
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.proposal import Proposal
from drafttrain.model.target import FINAL
from drafttrain.objective.losses import LossOptions, Objective

VOCABULARIES = (32_768, 65_536, 131_072, 262_144)
LENGTHS = (2048, 8192, 32_768)
WIDTH = {"cpu": 64, "cuda": 4096}  # on a CPU, products of real widths would hide all other costs
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


class OneHead(nn.Module):
    """The parts of a drafter that `Objective` uses: one prediction for every position, through one output matrix."""

    proposal = Proposal(1)

    def __init__(self, vocab: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.output = nn.Linear(width, vocab, bias=False, device=device, dtype=dtype)

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        pairs = batch.future(2)
        yield Prediction(0, pairs.source_M, pairs.label_M, batch.hidden[FINAL].flatten(0, 1)[pairs.source_M], self.output)


class Problem:
    """The drafter, the target's head and a batch of random states of one size."""

    def __init__(self, length: int, vocab: int, width: int, options: LossOptions, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        self.drafter = OneHead(vocab, width, device, dtype)
        self.head = nn.Linear(width, vocab, bias=False, device=device, dtype=dtype).requires_grad_(False)
        token_1T = torch.randint(vocab, (1, length), device=device)
        position_1T = torch.arange(length, device=device)[None]
        states_1TH = torch.randn(1, length, width, device=device, dtype=dtype).mul_(4.0).requires_grad_()
        self.batch = TrainBatch(token_1T, position_1T, torch.zeros_like(token_1T), token_1T >= 0, {FINAL: states_1TH})
        target: Any = SimpleNamespace(head=self.head, shape=SimpleNamespace(vocab_size=vocab))
        self.objective = Objective(self.drafter, target, options)  # type: ignore[arg-type]

    def ours(self) -> Tensor:
        return self.objective(self.batch)[0]

    def naive(self) -> Tensor:
        pairs, states_TH = self.batch.future(2), self.batch.hidden[FINAL].flatten(0, 1)
        with torch.no_grad():
            log_p_MV = self.head(states_TH[self.batch.teacher_index(pairs.label_M)]).float().log_softmax(-1)
        log_q_MV = self.drafter.output(states_TH[pairs.source_M]).float().log_softmax(-1)
        return F.kl_div(log_q_MV, log_p_MV, reduction="sum", log_target=True)

    def step(self, naive: bool) -> None:
        self.forget()
        (self.naive() if naive else self.ours()).backward()

    def forget(self) -> None:
        self.drafter.output.weight.grad = self.batch.hidden[FINAL].grad = None

    def check(self) -> None:
        """Raises DiffersError unless both ways have the same loss and gradients."""
        both = []
        for loss in (self.ours, self.naive):
            self.forget()
            value = loss()
            value.backward()
            both.append((value.detach(), self.drafter.output.weight.grad, self.batch.hidden[FINAL].grad))
        for name, a, b in zip(("loss", "output matrix's gradient", "states' gradient"), *both, strict=True):
            apart = float((a.double() - b.double()).norm() / b.double().norm())
            if not apart <= CLOSE[b.dtype]:
                raise DiffersError(f"the {name}s are {apart:.1e} apart")
        self.forget()


def grid(device: torch.device) -> list[tuple[int, int]]:
    """(T, V), the smallest first. A CPU, which would take hours for all of them, varies one at the other's smallest value."""
    pairs = [(t, v) for t in LENGTHS for v in VOCABULARIES]
    return pairs if device.type == "cuda" else [(t, v) for t, v in pairs if t == LENGTHS[0] or v == VOCABULARIES[0]]


def objective(settings: Settings) -> Found:
    options, cells = LossOptions("kl", settings.of(LossOptions().chunk, 2)), []

    def make(length: int, vocab: int) -> tuple[Work, Work]:
        problem = Problem(length, vocab, settings.of(WIDTH[settings.device.type], 8), options, settings.device)
        if (length, vocab) == sizes[0]:
            problem.check()
        return partial(problem.step, False), partial(problem.step, True)

    sizes = [(settings.of(t, 4), settings.of(v, 16)) for t, v in grid(settings.device)]
    entrants = [Entrant({"T": t, "V": v}, t * v, partial(make, t, v)) for t, v in sizes]
    for cell in contest(entrants, settings.device, settings.repeats):
        settings.say(f"T {cell.size['T']:,}, V {cell.size['V']:,}: {cell.ours_seconds:.3f} s")
        cells.append(cell)
    most, least = (options.at_once(pick(V for _, V in sizes)) for pick in (min, max))
    title = f"objective, {most:,} predictions a chunk, {least:,} at the largest V"
    table = cells_table(title, "chunked", "all logits", cells)
    panels = [("by vocabulary", "V", by("T", cells)), ("by length", "T", by("V", cells))]
    return Found([table], {"cells": record(cells)}, partial(draw, panels=panels, ours="chunked", other="all logits"))


def by(name: str, cells: list[Cell]) -> list[tuple[str, list[Cell]]]:
    """Lines of two or more cells that agree in this value."""
    lines = {size: [cell for cell in cells if cell.size[name] == size] for size in sorted({c.size[name] for c in cells})}
    return [(f", {name} {size:,}", line) for size, line in lines.items() if len(line) > 1]
