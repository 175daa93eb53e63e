"""Every choice of every group of conf/: by itself, and composed with choices of the other groups."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from drafttrain.drafters import schemas
from drafttrain.runs.options import RunOptions
from tests.composing import compose

CONF = Path(__file__).parents[3] / "conf"
CHOICES: dict[str, list[str]] = {}  # of each group
for file in sorted(CONF.glob("*/*.yaml")):
    CHOICES.setdefault(file.parent.name, []).append(file.stem)
CHOICES["drafter"] = sorted(schemas())
COUNT = max(map(len, CHOICES.values()))
SEVERAL = max(len(names) for group, names in CHOICES.items() if group != "drafter")  # are enough for all groups but drafters


def words(number: int) -> list[str]:
    return [f"{group}={choices[number % len(choices)]}" for group, choices in CHOICES.items()]


@cache
def composed(number: int) -> DictConfig:
    """With this choice of each group, counted round and round."""
    return compose([*words(number), "data.path=x.jsonl"])


@cache
def choice(group: str, name: str) -> Any:
    """A group of a configuration with this choice: its file over its schema. `test_config.py` compares it with Hydra's."""
    if name == "cascade":  # of other drafters
        return compose([f"drafter={name}"]).drafter
    if group == "drafter":
        return OmegaConf.structured(schemas()[name])
    return OmegaConf.merge(_declared()[group], OmegaConf.load(CONF / group / f"{name}.yaml"))


@cache
def _declared() -> DictConfig:
    """All groups, as their option dataclasses declare them."""
    return OmegaConf.structured(RunOptions)
