"""Configurations composed faster than Hydra does for a user; the results are the same.

Hydra reads every file again for each configuration, and merges them again. Here a process does that once for each set of
choices (`drafter=eagle3 loss=kl`); what a command sets (`train.steps=3`) goes into a copy, as it does in Hydra.
`tests/unit/cli/test_config.py` compares the two.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.hydra import Hydra
from omegaconf import DictConfig

from drafttrain.cli import config
from drafttrain.drafters import families

REGISTER, KNOWN_KEYS, GET_MODE = config.register, config.known_keys, Hydra.get_mode
SEARCH, MERGE = CachingConfigRepository.initialize_sources, ConfigLoaderImpl._compose_config_from_defaults_list
CHOICES_SO_FAR = defaults_list._create_interpolation_map
LOADED: dict[Any, dict[str, Any]] = {}  # of each list of sources, the files that were read
MERGED: dict[Any, Callable[[], DictConfig]] = {}  # a new copy, of each list of sources and of files


@cache
def schemas_registered(names: tuple[str, ...]) -> None:
    """Once for all commands that bring no folder of recipes, rather than for each. names: of the families."""
    forget()
    REGISTER()


def register(config_dir: Path | None = None) -> None:
    """For `drafttrain.cli.config.register`."""
    if config_dir is None:
        schemas_registered(tuple(families()))
    else:
        forget()
        REGISTER(config_dir)
        schemas_registered.cache_clear()


def forget() -> None:
    """What is registered changes."""
    LOADED.clear()
    MERGED.clear()
    keys_of.cache_clear()


@cache
def keys_of(names: tuple[str, ...]) -> list[str]:
    return KNOWN_KEYS()


def known_keys() -> list[str]:
    """For `drafttrain.cli.config.known_keys`, which builds the options of all families for each mistake."""
    return list(keys_of(tuple(families())))


def get_mode(own: Hydra, config_name: str | None, overrides: list[str]) -> Any:
    """For `Hydra.get_mode`, which composes every configuration once more only to learn whether it asks for a sweep."""
    return GET_MODE(own, config_name, overrides) if any("hydra.mode" in word for word in overrides) else None


def sources_of(repository: IConfigRepository) -> Any:
    """A name for these sources; None where one is a folder of the user, whose files may change."""
    names = tuple((source.scheme(), source.path, source.provider == "schema") for source in repository.get_sources())
    return names if all(scheme in ("pkg", "structured") for scheme, _, _ in names) else None


def share_sources(repository: CachingConfigRepository, delegate: IConfigRepository) -> None:
    """For `CachingConfigRepository.__init__`, which copies all that the sources hold. Only their list is changed later."""
    names = sources_of(delegate)
    repository.delegate, repository.cache = copy.copy(delegate), {} if names is None else LOADED.setdefault(names, {})


def search_elsewhere(repository: CachingConfigRepository, path: Any) -> None:
    """For `CachingConfigRepository.initialize_sources`: what is read from other sources is not shared."""
    repository.cache = dict(repository.cache)
    SEARCH(repository, path)


class Copies:
    """For `merge`, which changes what it reads, while LOADED is shared."""

    def __init__(self, repository: CachingConfigRepository) -> None:
        self.repository, self.get_schema_source = repository, repository.get_schema_source

    def load_config(self, config_path: str) -> Any:
        found = copy.copy(self.repository.load_config(config_path))
        found.config = copy.deepcopy(found.config)
        return found


def merge(loader: ConfigLoaderImpl, defaults: list[Any], repo: CachingConfigRepository) -> DictConfig:
    """For `ConfigLoaderImpl._compose_config_from_defaults_list`."""
    names = sources_of(repo)
    if names is None:
        return MERGE(loader, defaults, repo)
    wanted = names, tuple((default.config_path, default.package, default.is_self, default.primary) for default in defaults)
    if wanted not in MERGED:
        MERGED[wanted] = copies_of(MERGE(loader, defaults, Copies(repo)))
    return MERGED[wanted]()


def copies_of(merged: DictConfig) -> Callable[[], DictConfig]:
    """By pickle, which takes a quarter of the time, where it knows all options; not those of a test's own family."""
    try:
        return partial(pickle.loads, pickle.dumps(merged))
    except (AttributeError, pickle.PicklingError):
        return partial(copy.deepcopy, merged)


def choices_so_far(overrides: Any, defaults: list[Any], self_added: bool) -> DictConfig | None:
    """For `defaults_list._create_interpolation_map`, which is asked of every file, and needed where a name has `${`."""
    needed = any(not default.is_self() and default.is_interpolation() for default in defaults)
    return CHOICES_SO_FAR(overrides, defaults, self_added) if needed else None


PATCHES = (
    (config, "register", register),
    (config, "known_keys", known_keys),
    (Hydra, "get_mode", get_mode),
    (CachingConfigRepository, "__init__", share_sources),
    (CachingConfigRepository, "initialize_sources", search_elsewhere),
    (ConfigLoaderImpl, "_compose_config_from_defaults_list", merge),
    (defaults_list, "_create_interpolation_map", choices_so_far),
)
HYDRAS_OWN = tuple((owner, name, getattr(owner, name)) for owner, name, _ in PATCHES)


def compose_quickly(patch: pytest.MonkeyPatch) -> None:
    """As long as `patch` holds."""
    for owner, name, quicker in PATCHES:
        patch.setattr(owner, name, quicker)


def compose(words: Sequence[str]) -> DictConfig:
    """The configuration of these overrides, before it becomes options."""
    config.register()
    with hydra.initialize_config_module("drafttrain.conf", version_base="1.3"):
        return hydra.compose("config", list(words))
