"""Hostile input: templates, indexes, pickles, archives, HTML, terminal escapes, code that comes with a model, and values
that nobody expects in weights, settings and the environment."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from tests.faults import material
from tests.faults.attack import Attack
from tests.faults.campaign import TryResult
from tests.faults.hostile_templates import hostile_template
from tests.faults.hostile_text import hostile_archive, hostile_escapes, hostile_page
from tests.faults.hostile_values import hostile_environment, hostile_generation, hostile_keys, hostile_numbers
from tests.faults.hostile_weights import foreign_code, hostile_index, hostile_pickle, hostile_safetensors
from tests.faults.material import TRAINING

ATTACKS: tuple[Attack, ...] = (
    hostile_template,
    hostile_template,
    hostile_index,
    hostile_safetensors,
    hostile_pickle,
    hostile_archive,
    hostile_page,
    hostile_escapes,
    hostile_escapes,
    foreign_code,
    hostile_numbers,
    hostile_keys,
    hostile_keys,
    hostile_generation,
    hostile_environment,
)


class Hostile:
    """A try is one hostile input to one command."""

    name = "hostile"

    def __init__(self) -> None:
        self.folder = Path()

    def prepare(self, folder: Path) -> None:
        self.folder = folder / "material"
        if (self.folder / "ready").is_file():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        material.base(self.folder)
        fit = (
            "fit",
            "target=hf",
            "target.path=target",
            "data.path=data.jsonl",
            *TRAINING,
            "measure.enabled=false",
            "output=runs",
        )
        material.must([*fit, "recipe=medusa"], self.folder)
        run = material.only_run(self.folder / "runs")
        shutil.copytree(run / "checkpoints" / "step-00006", self.folder / "medusa" / "step-00006")
        shutil.rmtree(self.folder / "runs")
        (self.folder / "ready").touch()

    def attempt(self, draw: random.Random, folder: Path) -> list[TryResult]:
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        return [draw.choice(ATTACKS)(draw, folder)]
