"""Limits of options, which stand beside the fields of their dataclasses, and the function that checks them.

    schedule: str = choice("cosine", "wsd", "constant")
    steps: int = at_least(400, 1)
    limit: int | None = at_least(None, 1)

A limit of a list holds for each element, and null is allowed where it is the default, or with `null=True`. A subclass that
gives a field another default keeps its limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, cast

from drafttrain.core.errors import UserError

T = TypeVar("T")
LIMIT = "limit"  # in a field's metadata


@dataclass(frozen=True, slots=True)
class Limit:
    """What the values of an option can be."""

    allows: Callable[[Any], bool]
    fix: str  # says how to set it
    null: bool
    each: bool  # of a list

    def holds(self, value: Any) -> bool:
        """Whether the value is allowed; one of another type is not."""
        try:
            return bool(self.allows(value))
        except (TypeError, ValueError, AttributeError, RuntimeError):  # the last of arrays
            return False


def choice(default: T, *allowed: object, null: bool = False) -> T:
    """A field with one of these values. The default is one of them too, and is named first where they leave it out."""
    own = default if isinstance(default, list) else [default]
    names = [each for each in (*(each for each in own if each not in allowed), *allowed) if each is not None]
    hint = " (quote 'off' in YAML)" if "off" in names else ""
    return _field(default, names.__contains__, f"choose one of {', '.join(map(str, names))}{hint}", null)


def at_least(default: T, least: float, below: float | None = None, null: bool = False) -> T:
    """A field with numbers from `least` on, and below `below`."""
    end = "" if below is None else f" and below {_shown(below)}"
    fix = f"set it to {_shown(least)} or more{end}"
    return _field(default, lambda value: value >= least and (below is None or value < below), fix, null)


def above(default: T, least: float, below: float | None = None, null: bool = False) -> T:
    """A field with numbers above `least`, and below `below`."""
    end = "" if below is None else f" and below {_shown(below)}"
    return _field(
        default, lambda value: value > least and (below is None or value < below), f"set it above {_shown(least)}{end}", null
    )


def within(default: T, low: float, high: float, null: bool = False) -> T:
    """A field with numbers from `low` to `high`."""
    return _field(default, lambda value: low <= value <= high, f"set it within {_shown(low)} and {_shown(high)}", null)


def counts(default: T, *words: str) -> T:
    """A field with a list of whole numbers above 0, which may be written as `count` reads them, or with one of these words."""
    fix = f"give numbers of 1 or more, such as [2048] or [2k]{''.join(f', or {word}' for word in words)}"
    return _field(default, lambda value: value in words or count(value) > 0, fix, False)


def biases() -> Any:
    """A field with numbers by token id, or null."""

    def allows(value: Any) -> bool:
        return all(isinstance(token, int) and token >= 0 and abs(bias) <= 100 for token, bias in value.items())

    return _field(None, allows, "give a number within -100 and 100 for each token id, such as {13: -5}", True)


def count(value: Any) -> int:
    """A whole number: 2048, or in words 2k (2048), 1M. Raises ValueError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    matched = re.fullmatch(r"(\d+)([kKmM]?)", str(value))
    if matched is None:
        raise ValueError(f"{value!r} is no whole number")
    return int(matched[1]) * {"": 1, "k": 1024, "m": 1024**2}[matched[2].lower()]


def share(default: T, null: bool = False) -> T:
    """A field with shares above 0, at most 1."""
    return _field(default, lambda value: 0 < value <= 1, "set it above 0 and at most 1", null)


def check_limits(prefix: str, options: Any) -> None:
    """Raise UserError for a value outside its field's limit, also in dataclasses within the fields and their lists.

    prefix: of the keys in messages, such as `train`; empty for the whole configuration.
    """
    for name in (each.name for each in fields(options)):
        key, value = f"{prefix}.{name}" if prefix else name, getattr(options, name)
        if (limit := _limit_of(type(options), name)) is not None:
            _check(key, value, limit)
        if is_dataclass(value):
            check_limits(key, value)
        elif isinstance(value, list):
            for number, each in enumerate(value):
                if is_dataclass(each):
                    check_limits(f"{key}[{number}]", each)


def _check(key: str, value: Any, limit: Limit) -> None:
    if limit.each and isinstance(value, list | tuple):
        if wrong := [each for each in value if not limit.holds(each)]:
            raise UserError(f"{key} has {_shown(wrong[0])}; {limit.fix}")
    elif not limit.null if value is None else not limit.holds(value):
        raise UserError(f"{key} is {_shown(value)}; {limit.fix}{', or null' if limit.null else ''}")


def _limit_of(options: type, name: str) -> Limit | None:
    """The limit that the class, or the first of those that it extends, gives the field."""
    declared = (vars(each).get("__dataclass_fields__", {}).get(name) for each in options.__mro__)
    return next((each.metadata[LIMIT] for each in declared if each is not None and LIMIT in each.metadata), None)


def _field(default: T, allows: Callable[[Any], bool], fix: str, null: bool) -> T:
    metadata = {LIMIT: Limit(allows, fix, null or default is None, isinstance(default, list | tuple))}
    if isinstance(default, list):
        return cast(T, field(default_factory=lambda: list(default), metadata=metadata))
    return field(default=default, metadata=metadata)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)
