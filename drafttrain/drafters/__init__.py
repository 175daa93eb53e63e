"""The families, one file each. A file that defines `FAMILY` is a family; nothing else lists them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from drafttrain.core.limits import check_limits
from drafttrain.drafters import options

if TYPE_CHECKING:
    from drafttrain.model.drafter import Drafter
    from drafttrain.model.target import Target

META = "drafter.json"  # the description of a checkpoint, see `checkpoint.py`
# No families. `checkpoint` imports peft, which the GPU suites run without.
OTHERS = ("checkpoint", "common", "options", "tuned_settings")


@dataclass(frozen=True, slots=True)
class Family:
    """name: of `drafter=<name>`. options: its dataclass, which has the name in its field `family`.

    unserved: why no serving stack loads it, where that is so. early: `auto` races those with a higher number first, where the
    budget is too short for all.
    """

    name: str
    options: type
    make: Callable[[Any, Target], Drafter]
    unserved: str | None = None
    early: int = 0

    def build(self, options: Any, target: Target) -> Drafter:
        """The drafter for this target. Raises UserError for options out of their limits, and that do not fit the target."""
        check_limits("drafter", options)
        return self.make(options, target)


@cache
def families() -> dict[str, Family]:
    """Every family by name, found by looking at the files of this folder."""
    candidates = (_family(name) for name in _files())
    return {family.name: family for family in candidates if family is not None}


@cache
def schemas() -> dict[str, type]:
    """Every family's options by name. A family with its options in `options.py` is not imported, and neither is torch."""
    option_schemas = {schema.family: schema for schema in vars(options).values() if hasattr(schema, "family")}
    imported_families = (_family(name) for name in _files() if name not in option_schemas)
    return option_schemas | {family.name: family.options for family in imported_families if family is not None}


def _files() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(__path__) if module.name not in OTHERS]


def _family(name: str) -> Family | None:
    family = getattr(importlib.import_module(f"{__name__}.{name}"), "FAMILY", None)
    return family if isinstance(family, Family) else None
