"""Turns errors that the user can fix into one-line messages."""

from __future__ import annotations

import difflib
import errno
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

from drafttrain.core.errors import UserError, one_line
from drafttrain.core.files import disk_full

if TYPE_CHECKING:
    from omegaconf.errors import OmegaConfBaseException


NEXT_TO = {"measure": "decode", "tune": "decode", "prepare": "data"}  # groups whose keys are looked for in the first one
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint for an unknown name: `did you mean a or b?`, or all names when none is similar."""
    known = list(names)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else f"use one of {', '.join(known)}"


def explain(error: BaseException) -> str | None:
    """One line for a user's mistake, a full disk or a folder without permission; None for anything else, which is a bug and
    keeps its traceback.
    """
    chain = list(_chain(error))
    for link in chain:
        if isinstance(link, UserError):
            return str(link)
        if line := _disk_full(link) or _forbidden(link):
            return line
    line = _configuration(chain)
    return None if line is None else one_line(line)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _disk_full(error: BaseException) -> str | None:
    if not disk_full(error):
        return None
    where = f" at {error.filename}" if isinstance(error, OSError) and error.filename else ""
    return f"no space left on the disk{where}; free some space, or write elsewhere with output=DIR"


def _forbidden(error: BaseException) -> str | None:
    if not isinstance(error, OSError) or error.errno not in FORBIDDEN or not error.filename:
        return None
    return f"{error.filename}: {error.strerror}; allow it, or name another place, for what is written with output=DIR"


def _configuration(chain: Sequence[BaseException]) -> str | None:
    """The message for an error of Hydra, OmegaConf or YAML. Only the command line uses these, so the user's input is wrong."""
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
    from yaml import YAMLError

    for link in chain:
        if isinstance(link, MissingConfigException) and link.missing_cfg_file:
            return _unknown_choice(link.missing_cfg_file, link.options or ())
        if isinstance(link, OverrideParseException):
            reason = link.message.splitlines()[1:2] or [link.message]
            return f"cannot read {link.override!r}: {one_line(reason[0])}; write key=value, and quote values with , = or spaces"
    for link in chain:
        if isinstance(link, (ConfigKeyError, AttributeError)) and isinstance(link, OmegaConfBaseException):
            free, overridden = str(link.ref_type_str).startswith("Dict"), _overridden(chain)
            if overridden and (inner := _unknown_inner(overridden, link)):
                return inner
            return _unknown_key(overridden or link.full_key or str(link.key), free)
        if isinstance(link, OmegaConfBaseException) and link.full_key:
            return f"{link.full_key}: {str(link).splitlines()[0]}; drafttrain fit --cfg job prints each key with its value"
    for link in chain:
        if isinstance(link, (HydraException, OmegaConfBaseException, YAMLError)) or _raised_by_hydra(link):
            return _hydra_line(str(link))
    return None


def _unknown_choice(wanted: str, options: Sequence[str]) -> str:
    group, _, name = wanted.rpartition("/")
    if not group:
        return f"there is no configuration {name!r} in the --config-dir"
    advice = nearest(name, [option for option in options if not option.endswith("_schema")])
    own = f", or name your model: target=./DIR, target.path={name} for a hub id" if group == "target" else ""
    return f"unknown {group} {name!r}; {advice}{own}"


def _unknown_key(key: str, free: bool) -> str:
    """The message for an unknown key. free: its parent takes any key, with a plus."""
    from drafttrain.cli.config import known_keys

    if free:
        return f"unknown key {key!r}; +{key}=... adds it"
    keys = known_keys()
    parent, _, leaf = key.rpartition(".")
    if key in keys:
        return f"{key!r} is a key of another choice of {parent}; drafttrain fit --cfg job prints the keys of this choice"
    if f"{NEXT_TO.get(parent)}.{leaf}" in keys:
        return f"unknown key {key!r}; did you mean {NEXT_TO[parent]}.{leaf}?"
    siblings = [valid for valid in keys if valid.rpartition(".")[0] == parent]
    while parent and not siblings:
        parent = parent.rpartition(".")[0]
        siblings = [valid for valid in keys if valid.rpartition(".")[0] == parent]
    for name, pool in ((leaf, _by_leaf(siblings)), (key, {valid: valid for valid in keys}), (leaf, _by_leaf(keys))):
        if close := difflib.get_close_matches(name, pool, n=3, cutoff=0.6):
            return f"unknown key {key!r}; did you mean {' or '.join(pool[match] for match in close)}?"
    return f"unknown key {key!r}; use one of {', '.join(siblings)}"


def _unknown_inner(key: str, error: OmegaConfBaseException) -> str | None:
    """The message for an unknown key inside a list of mappings whose keys are known; None in other cases."""
    from drafttrain.cli.config import known_keys

    if key not in known_keys() or not is_dataclass(error.object_type) or str(error.key) == key.rpartition(".")[2]:
        return None
    return f"unknown key {error.key!r} in {key}; {nearest(str(error.key), [f.name for f in fields(error.object_type)])}"


def _by_leaf(keys: Iterable[str]) -> dict[str, str]:
    return {key.rpartition(".")[2]: key for key in keys}


def _overridden(chain: Sequence[BaseException]) -> str | None:
    """The key as the user typed it. OmegaConf's error has only the part that it did not find."""
    for link in chain:
        if match := re.match(r"Could not override '(.+?)'", str(link)):
            return match[1]
    return None


def _raised_by_hydra(error: BaseException) -> bool:
    """Whether Hydra raised a plain ValueError, as it does for some command lines, such as a number as a group's choice."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError) and bool(frames) and "/hydra/" in frames[-1].filename.replace("\\", "/")


def _hydra_line(text: str) -> str:
    if text.startswith("Ambiguous value"):
        return f"{text.splitlines()[0]}; add -m to sweep over the values, or quote a value that holds commas"
    return one_line(text.partition("See https://")[0])
