"""Conversations out of whatever file or data set the user names; the record's form is recognised, not configured."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttrain.data import DataOptions
from drafttrain.data.files import ASSETS, LINES, TABLES, read_records
from drafttrain.errors import UserError

ASSISTANT = "assistant"
SHAREGPT_ROLES = {  # names that published ShareGPT-style sets use
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), ASSISTANT),
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
    "system": "system",
}
FORMS = "`messages`, `conversations`, `prompt` with `response`, or `text`"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Conversation:
    """One training record: turns for the chat template ({role, content} each), or plain text that is supervised whole."""

    origin: str  # file and line, for messages to the user
    messages: tuple[dict[str, str], ...] = ()
    text: str | None = None


def read_conversations(options: DataOptions) -> list[Conversation]:
    """Read the embedded data, a local file or a hub data set. Raises UserError naming the place of anything unusable."""
    if options.limit is not None and options.limit < 1:
        raise UserError(f"data.limit must be at least 1, got {options.limit}; raise it, or leave it out to read everything")
    records = itertools.islice(_records(options), options.limit)
    return [_conversation(origin, record) for origin, record in records]


def _records(options: DataOptions) -> Iterator[tuple[str, dict[str, Any]]]:
    if options.path == "embedded":
        return read_records(ASSETS / "train.jsonl.gz")
    path = Path(options.path).expanduser()
    return read_records(path) if _is_local(path) else _hub_records(options)


def _is_local(path: Path) -> bool:
    """What exists, what has a data file's suffix, and what no hub id can look like."""
    return path.exists() or path.name.endswith(LINES + TABLES) or not HUB_ID.fullmatch(str(path))


def _hub_records(options: DataOptions) -> Iterator[tuple[str, dict[str, Any]]]:
    from datasets import load_dataset  # slow to import

    try:
        # a limited read streams, so that a few records of a large set do not download it
        rows = load_dataset(options.path, split=options.split, streaming=options.limit is not None)
    except (OSError, ValueError) as error:
        got = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"data.path={options.path}: no local file of this name, and no data set with split '{options.split}' "
            f"from the hub ({got}); correct data.path or data.split, or download the set and name its file"
        ) from error
    for row, record in enumerate(rows, start=1):
        yield f"{options.path}:row {row}", dict(record)


def _conversation(origin: str, record: dict[str, Any]) -> Conversation:
    """Tables hold every column in every row, so a form counts only where its value is not null."""
    filled = {key for key, value in record.items() if value is not None}
    if "messages" in filled:
        return _chat(origin, _messages(origin, record["messages"], "messages", "role", "content"))
    if "conversations" in filled:
        turns = _messages(origin, record["conversations"], "conversations", "from", "value")
        return _chat(origin, [_renamed(origin, turn) for turn in turns])
    if {"prompt", "response"} <= filled:
        prompt = {"role": "user", "content": _string(origin, "prompt", record["prompt"])}
        return _chat(origin, [prompt, {"role": ASSISTANT, "content": _string(origin, "response", record["response"])}])
    if "text" in filled:
        return Conversation(origin, text=_string(origin, "text", record["text"]))
    keys = ", ".join(sorted(map(str, record))) or "no key at all"
    raise UserError(f"{origin}: expected {FORMS}, got {keys}; rename the fields to one of these forms")


def _chat(origin: str, messages: list[dict[str, str]]) -> Conversation:
    if not any(message["role"] == ASSISTANT for message in messages):
        roles = ", ".join(message["role"] for message in messages) or "no turn"
        raise UserError(f"{origin}: expected an assistant turn to learn from, got {roles}; add the reply, or remove the record")
    return Conversation(origin, tuple(messages))


def _messages(origin: str, turns: Any, name: str, role_key: str, content_key: str) -> list[dict[str, str]]:
    if not isinstance(turns, list):
        raise UserError(f"{origin}: expected a list in `{name}`, got {type(turns).__name__}; write one object per turn")
    messages = []
    for number, turn in enumerate(turns):
        place = f"{name}[{number}]"
        if not isinstance(turn, dict):
            raise UserError(
                f"{origin}: expected an object in {place}, got {type(turn).__name__}; write {role_key} and {content_key}"
            )
        role = _string(origin, f"{place}.{role_key}", turn.get(role_key))
        messages.append({"role": role, "content": _string(origin, f"{place}.{content_key}", turn.get(content_key))})
    return messages


def _renamed(origin: str, turn: dict[str, str]) -> dict[str, str]:
    if turn["role"] not in SHAREGPT_ROLES:
        raise UserError(f"{origin}: expected a speaker among {', '.join(SHAREGPT_ROLES)}, got '{turn['role']}'; rename it")
    return {"role": SHAREGPT_ROLES[turn["role"]], "content": turn["content"]}


def _string(origin: str, name: str, value: Any) -> str:
    if not isinstance(value, str):
        got = "nothing" if value is None else type(value).__name__
        raise UserError(f"{origin}: expected a string in {name}, got {got}; write its text, or remove the record")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        got = f"an unpaired surrogate at character {error.start}"
        raise UserError(f"{origin}: expected Unicode text in {name}, got {got}; remove it") from error
    return value
