"""One drafter's step in a process of its own: forward, loss and backward on given states, as asked for on standard input.

    python benchmarks/step_worker.py [RIVAL]        a line of JSON in, a line of JSON out; started by `benchmarks/train.py`

RIVAL: specforge or speculators, whose module takes the step, with the drafter's weights. The worker runs with the interpreter
of the checkout that is measured, and uses only what older checkouts have too.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from time import process_time
from typing import Any

import torch

import drafttrain  # of the measured checkout, before this one's root is added to the path

sys.path = [*sys.path[1:], str(Path(__file__).parents[1])]

from benchmarks.common import peak  # noqa: E402
from drafttrain.drafters import families  # noqa: E402
from drafttrain.features.online import Online  # noqa: E402
from drafttrain.model.batch import TrainBatch  # noqa: E402
from drafttrain.objective.losses import LossOptions, Objective  # noqa: E402
from drafttrain.targets.hf import HFTarget  # noqa: E402


class Case:
    """A drafter of a random target with a batch of random tokens, one document per row."""

    def __init__(self, asked: dict[str, Any]) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        dtype, family = getattr(torch, asked["dtype"]), families()[asked["family"]]
        target = HFTarget(LlamaForCausalLM(LlamaConfig(**asked["model"])).to(dtype))
        self.drafter = family.build(family.options(**asked["options"]), target).to(dtype).train()
        token_BT = torch.randint(asked["model"]["vocab_size"], (asked["rows"], asked["length"]))
        position_BT = torch.arange(asked["length"]).expand_as(token_BT)
        batch = TrainBatch(token_BT, position_BT, torch.zeros_like(token_BT), torch.ones_like(token_BT, dtype=torch.bool))
        with torch.no_grad():
            self.batch = Online(target, self.drafter.taps).fill(batch)
        self.target, self.objective = target, Objective(self.drafter, target, LossOptions(asked["loss"], asked["chunk"]))

    def step(self) -> float:
        self.drafter.zero_grad()
        loss = self.objective(self.batch)[0]
        loss.backward()
        return float(loss.detach())

    def norm(self) -> float:
        """Of all gradients."""
        return float(torch.nn.utils.get_total_norm([p.grad.float() for p in self.drafter.parameters() if p.grad is not None]))


class RivalCase(Case):
    """The case with another toolkit's module."""

    def __init__(self, asked: dict[str, Any]) -> None:
        from benchmarks.rival_modules import RIVALS, Given

        super().__init__(asked)
        given = Given(self.drafter, self.target, self.batch, asked["options"]["steps"], asked["model"])
        self.rival = RIVALS[sys.argv[1]](given)

    def step(self) -> float:
        self.rival.module.zero_grad()
        loss = self.rival.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def norm(self) -> float:
        return self.rival.norm()


def answer(asked: dict[str, Any], cases: dict[str, Case]) -> dict[str, float]:
    key = json.dumps(asked["case"])
    if key not in cases:
        cases.clear()
        cases[key] = (RivalCase if sys.argv[1:] else Case)(asked["case"])
    case = cases[key]
    if asked["what"] == "peak":
        case.drafter.zero_grad()
        return {"peak": peak(case.step)}
    began = process_time()
    loss = case.step()
    return {"seconds": process_time() - began, "loss": loss, "norm": case.norm()}


def main() -> None:
    torch.set_num_threads(1)
    print(f"measuring {drafttrain.__path__[0]}", file=sys.stderr)
    cases: dict[str, Case] = {}
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            found = answer(json.loads(line), cases)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
