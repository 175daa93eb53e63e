"""The record of who wrote a data set's replies. `prepare` writes it next to the data, and `fit` reads it."""

from __future__ import annotations

import hashlib
import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from drafttrain.core.errors import UserError
from drafttrain.core.files import LISTED, changed, check_listed, first_fault, listed

FILE = "provenance.json"
SHARDS = "part-*.*"
EMBEDDED = "embedded"
FORMAT = 1
AGAIN = "prepare the data again"


def template_hash(template: str | None) -> str | None:
    """sha256 of a chat template's text."""
    return None if template is None else hashlib.sha256(template.encode()).hexdigest()


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase, template: Any) -> str:
    """sha256 of a tokenizer's vocabulary and rules, and of the chat template that is used with it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    hashed_fields = [rules, template, {k: str(v) for k, v in tokenizer.special_tokens_map.items()}]
    return hashlib.sha256(json.dumps(hashed_fields, sort_keys=True).encode()).hexdigest()


def find_provenance(data: str) -> dict[str, Any] | None:
    """The record of a prepared directory, or of the directory that contains a file; None where there is none.

    Raises UserError for an unreadable or changed record.
    """
    path = Path(data).expanduser()
    file = (path if path.is_dir() else path.parent) / FILE
    if not path.exists():
        return None
    check_listed(file.parent, AGAIN, lambda name: name == FILE)
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(record, dict) or not isinstance(record["target"], dict):
            raise ValueError("no target in it")
    except (ValueError, KeyError, RecursionError) as error:
        raise UserError(f"{file}: expected a record of drafttrain prepare, got {error}; prepare the data again") from error
    return record


def shards_of(path: Path) -> list[Path]:
    """The data files of a prepared directory, in order; empty for any other directory.

    Raises UserError if files are missing or have been added, judged by their names.
    """
    shards, sums = sorted(path.glob(SHARDS)), listed(path, AGAIN) or {}
    if FILE not in sums:  # written by an earlier version, or not prepared
        return shards if (path / FILE).is_file() else []
    names = {file.name for file in (*shards, path / FILE) if file.is_file()}
    if stray := sorted(names ^ {name for name in sums if name == FILE or fnmatch(name, SHARDS)}):
        fault = f"{stray[0]} is not in {LISTED}" if stray[0] in names else f"{stray[0]}, which {LISTED} lists, is not there"
        raise UserError(changed(path, fault, AGAIN))
    return shards


def check_shard(path: Path) -> str | None:
    """The sha256 of a data file in a prepared directory; None for any other file. Raises UserError for a changed file."""
    sums = listed(path.parent, AGAIN) or {}
    if FILE not in sums or path.name not in sums:
        return None
    if (fault := first_fault(path.parent, {path.name: sums[path.name]}, LISTED)) is not None:
        raise UserError(changed(path.parent, fault, AGAIN))
    return str(sums[path.name])


def foreign(data: str, target: dict[str, Any], template: str | None) -> str | None:
    """A clause that says why these replies may not be this target's own; None if they are its own.

    target: the description of `load_target`. template: the chat template of its tokenizer.
    """
    if data == EMBEDDED:
        return None if target["name"] == EMBEDDED else "the embedded replies are the embedded target's"
    record = find_provenance(data)
    if record is None:
        return "nothing says who wrote its replies"
    writer = record["target"]
    if writer.get("fingerprint") is None:
        if not _same_name(str(writer["path"]), str(target["path"])):
            return f"its replies are those of {writer['path']}"
    elif writer["fingerprint"] != target["fingerprint"]:
        return f"its replies are those of {writer['path'] or writer['name']}, whose weights are others"
    for name, fingerprint in (target.get("adapters") or {}).items():
        if writer.get("adapters", {}).get(name, fingerprint) != fingerprint:
            return f"its replies of the adapter {name} are those of other weights"
    if record.get("template") is not None and record["template"] != template_hash(template):
        return "its prompts were asked with another chat template"
    return None


def _same_name(served: str, path: str) -> bool:
    """Whether two model names agree. A server names its model by a hub id, a path, or the last part of either."""
    return served.rstrip("/").rpartition("/")[2] == path.rstrip("/").rpartition("/")[2]
