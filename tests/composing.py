"""Configurations composed faster than Hydra does for a user; the results are the same."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.hydra import Hydra

from drafttrain.cli import config
from drafttrain.drafters import families

REGISTER, GET_MODE = config.register, Hydra.get_mode


@cache
def schemas_registered(names: tuple[str, ...]) -> None:
    """Once for all commands that bring no folder of recipes, rather than for each. names: of the families."""
    REGISTER()


def register(config_dir: Path | None = None) -> None:
    """For `drafttrain.cli.config.register`."""
    if config_dir is None:
        schemas_registered(tuple(families()))
    else:
        REGISTER(config_dir)
        schemas_registered.cache_clear()


def get_mode(hydra: Hydra, config_name: str | None, overrides: list[str]) -> Any:
    """For `Hydra.get_mode`, which composes every configuration once more only to learn whether it asks for a sweep."""
    return GET_MODE(hydra, config_name, overrides) if any("hydra.mode" in word for word in overrides) else None


def share_sources(repository: CachingConfigRepository, delegate: IConfigRepository) -> None:
    """For `CachingConfigRepository.__init__`, which copies all that the sources hold. Only their list is changed later."""
    repository.delegate, repository.cache = copy.copy(delegate), {}


PATCHES = (
    (config, "register", register),
    (Hydra, "get_mode", get_mode),
    (CachingConfigRepository, "__init__", share_sources),
)
