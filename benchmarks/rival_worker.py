"""A step of another toolkit's EAGLE-3 module, with the weights, batch and target's states of `step_worker.Case`.

python benchmarks/rival_worker.py NAME      NAME: specforge or speculators; started by `benchmarks/rival_steps.py`
"""

from __future__ import annotations

import sys
from typing import Any

from step_worker import Case, main

from benchmarks.rival_modules import RIVALS, Given, Rival
from drafttrain.targets.hf import HFTarget


class RivalCase(Case):
    """The case with another module, which has the same weights."""

    def __init__(self, made: type[Rival], asked: dict[str, Any]) -> None:
        super().__init__(asked)
        target = self.objective._target.module
        assert isinstance(target, HFTarget)
        self.rival = made(Given(self.drafter, target, self.batch, asked["options"]["steps"], asked["model"]))

    def step(self) -> float:
        self.rival.module.zero_grad()
        loss = self.rival.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def norm(self) -> float:
        return self.rival.norm()


if __name__ == "__main__":
    main(lambda asked: RivalCase(RIVALS[sys.argv[1]], asked))
