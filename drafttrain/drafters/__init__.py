"""The families, one file each. A file that defines `FAMILY` is a family; nothing else lists them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from drafttrain.model.drafter import Drafter
from drafttrain.model.target import Target

OTHERS = ("checkpoint", "common", "tuned_settings")  # no families; `checkpoint` imports peft, which the GPU suites run without


@dataclass(frozen=True, slots=True)
class Family:
    """name: as in conf/drafter/<name>.yaml. options: its dataclass, whose first field is `family`, the name."""

    name: str
    options: type
    build: Callable[[Any, Target], Drafter]


@cache
def families() -> dict[str, Family]:
    """Every family by name, found by looking at the files of this folder."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name in OTHERS:
            continue
        family = getattr(importlib.import_module(f"{__name__}.{module.name}"), "FAMILY", None)
        if isinstance(family, Family):
            found[family.name] = family
    return found
