"""The settings that `drafttrain tune` found best for a checkpoint, in its `decode.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.core.files import read_sealed_json, remove_abandoned, write_sealed_json

TUNED = "decode.json"
SPEEDUP = "speedup"  # among the settings of a batch size: over plain decoding, as tuning timed it

PROPOSALS = "proposals"  # among what a search says of itself: the chosen ones by batch size, named as reports name them


def tuned_settings(directory: Path) -> dict[int, dict[str, Any]]:
    """The settings that `drafttrain tune` found best, by batch size; 0: those of an older file, which hold for every size.

    Empty without its file. Raises UserError for a damaged one.
    """
    file, content = directory / TUNED, _read(directory)
    if content is None:
        return {}
    sizes = content.get("batch_sizes", {"0": content.get("settings")})
    known = isinstance(sizes, dict) and sizes and all(map(str.isdecimal, sizes))
    if (problem := _wrong_setting(sizes) if known else "no settings") is not None:
        raise UserError(f"{file}: expected what drafttrain tune writes, got {problem}; delete it, or tune again")
    return {int(n): settings for n, settings in sizes.items()}


def tuned_proposal(directory: Path, batch_size: int) -> str | None:
    """What was chosen for this batch size, named as reports name it; None: the trained proposal, or not known."""
    tuned = (_read(directory) or {}).get("tuned") or {}
    return tuned.get(PROPOSALS, {}).get(str(batch_size))


def _read(directory: Path) -> dict[str, Any] | None:
    file = directory / TUNED
    return read_sealed_json(file, "what drafttrain tune writes", "delete it, or tune again") if file.is_file() else None


def draft_up_to(tuned: Mapping[int, Mapping[str, Any]]) -> int | None:
    """The last tuned batch size before the one at which the best proposal was slower than plain decoding.

    None: there is no such size, or it is the smallest.
    """
    slower = min((n for n, settings in tuned.items() if settings.get(SPEEDUP, 1.0) < 1.0), default=0)
    return max((n for n in tuned if n < slower), default=None)


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
        "confidence_temperature": lambda value: isinstance(value, float) and 0.0 < value <= 1.0,
        "draft_temperature": lambda value: isinstance(value, float) and 0.0 <= value < float("inf"),
        "temperature": lambda value: isinstance(value, float) and 0.0 <= value < float("inf"),
        SPEEDUP: lambda value: isinstance(value, float) and 0.0 <= value < float("inf"),
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


def keep_tuned(directory: Path, tuned: Mapping[int, dict[str, Any]], about: dict[str, Any]) -> Path:
    """Write the settings, by batch size, that the checkpoint is decoded with from here on; about: where they come from.

    Older versions read `settings` alone: those of the smallest batch size.
    """
    remove_abandoned(directory, f"{TUNED}.tmp-*")
    settings = {key: value for key, value in tuned[min(tuned)].items() if key != SPEEDUP}
    sizes = {str(n): tuned[n] for n in sorted(tuned)}
    write_sealed_json(directory / TUNED, {"settings": settings, "batch_sizes": sizes, "tuned": about})
    return directory / TUNED
