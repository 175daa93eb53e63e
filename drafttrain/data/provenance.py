"""Who wrote a data set's replies: the record that `prepare` leaves beside them, and how `fit` finds and reads it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from drafttrain.errors import UserError

FILE = "provenance.json"
SHARDS = "part-*.*"
EMBEDDED = "embedded"
FORMAT = 1


def template_hash(template: str | None) -> str | None:
    """sha256 of a chat template's text."""
    return None if template is None else hashlib.sha256(template.encode()).hexdigest()


def find_provenance(data: str) -> dict[str, Any] | None:
    """The record of a prepared directory, or of the one that a file lies in; None where there is none.

    Raises UserError for a record that cannot be read.
    """
    path = Path(data).expanduser()
    file = (path if path.is_dir() else path.parent) / FILE
    if not path.exists() or not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or not isinstance(found["target"], dict):
            raise ValueError("no target in it")
    except (ValueError, KeyError, RecursionError) as error:
        raise UserError(f"{file}: expected a record of drafttrain prepare, got {error}; prepare the data again") from error
    return found


def shards_of(path: Path) -> list[Path]:
    """The data files of a prepared directory, in order; none of any other directory."""
    return sorted(path.glob(SHARDS)) if (path / FILE).is_file() else []


def foreign(data: str, target: dict[str, Any], template: str | None) -> str | None:
    """Why these replies are not known to be this target's own, in a clause; None where they are.

    target: the description that `load_target` gives; template: its tokenizer's chat template.
    """
    if data == EMBEDDED:
        return None if target["name"] == EMBEDDED else "the embedded replies are the embedded target's"
    found = find_provenance(data)
    if found is None:
        return "nothing says who wrote its replies"
    writer = found["target"]
    if writer.get("fingerprint") is None:
        if not _same_name(str(writer["path"]), str(target["path"])):
            return f"its replies are those of {writer['path']}"
    elif writer["fingerprint"] != target["fingerprint"]:
        return f"its replies are those of {writer['path'] or writer['name']}, whose weights are others"
    if found.get("template") is not None and found["template"] != template_hash(template):
        return "its prompts were asked with another chat template"
    return None


def _same_name(served: str, path: str) -> bool:
    """A server knows its model by a hub id, a path, or the last part of either."""
    return served.rstrip("/").rpartition("/")[2] == path.rstrip("/").rpartition("/")[2]
