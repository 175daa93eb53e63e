"""Every choice of every group of conf/, composed with choices of the other groups: as many compositions as drafters."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from omegaconf import DictConfig

from tests.composing import compose

CHOICES: dict[str, list[str]] = {}  # of each group
for file in sorted((Path(__file__).parents[3] / "conf").glob("*/*.yaml")):
    CHOICES.setdefault(file.parent.name, []).append(file.stem)
COUNT = max(map(len, CHOICES.values()))


def words(number: int) -> list[str]:
    return [f"{group}={choices[number % len(choices)]}" for group, choices in CHOICES.items()]


@cache
def composed(number: int) -> DictConfig:
    """With this choice of each group, counted round and round."""
    return compose([*words(number), "data.path=x.jsonl"])


def choice(group: str, name: str) -> DictConfig:
    """What this choice writes. Groups know nothing of each other."""
    return composed(CHOICES[group].index(name))[group]
