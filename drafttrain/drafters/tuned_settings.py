"""The settings that `drafttrain tune` found best for a checkpoint, in its `decode.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.core.files import read_sealed_json, remove_abandoned, write_sealed_json

TUNED = "decode.json"


def tuned_settings(directory: Path) -> dict[str, Any]:
    """The settings that `drafttrain tune` found best; empty without its file. Raises UserError for a damaged one."""
    file = directory / TUNED
    if not file.is_file():
        return {}
    settings = read_sealed_json(file, "what drafttrain tune writes", "delete it, or tune again").get("settings")
    problem = _wrong_setting(settings) if isinstance(settings, dict) else "no settings"
    if problem is not None:
        raise UserError(f"{file}: expected what drafttrain tune writes, got {problem}; delete it, or tune again")
    assert isinstance(settings, dict)
    return settings


def with_tuned(trained: Mapping[str, Any], tuned: Mapping[str, Any]) -> dict[str, Any]:
    """The trained decode settings, with the tuned ones in their place; those of a drafter's parts likewise."""
    merged = {
        key: with_tuned(trained.get(key, {}), setting) if isinstance(setting, dict) else setting
        for key, setting in tuned.items()
    }
    return {**trained, **merged}


def _wrong_setting(settings: dict[str, Any]) -> str | None:
    """The first that is unknown, or has another type than its own. Dictionaries are the settings of parts."""

    def whole(value: Any, least: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    validators: dict[str, Callable[[Any], bool]] = {
        "draft_length": lambda value: whole(value, 1),
        "nodes": lambda value: whole(value, 1),
        "paths": lambda value: (
            isinstance(value, list) and all(isinstance(p, list) and p and all(whole(rank, 0) for rank in p) for p in value)
        ),
        "draft_temperature": lambda value: isinstance(value, float) and 0.0 <= value < float("inf"),
        "temperature": lambda value: isinstance(value, float) and 0.0 <= value < float("inf"),
    }
    for name, value in settings.items():
        if isinstance(value, dict):
            if (problem := _wrong_setting(value)) is not None:
                return f"{name}: {problem}"
        elif name not in validators:
            return f"the setting {name!r}"
        elif not validators[name](value):
            return f"{name} {value!r}"[:80]
    return None


def keep_tuned(directory: Path, settings: dict[str, Any], about: dict[str, Any]) -> Path:
    """Write the settings that the checkpoint is decoded with from here on; about: where they come from."""
    remove_abandoned(directory, f"{TUNED}.tmp-*")
    write_sealed_json(directory / TUNED, {"settings": settings, "tuned": about})
    return directory / TUNED
