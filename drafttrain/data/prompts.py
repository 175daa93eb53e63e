"""Evaluation prompts: MT-bench's own record form, and the single-prompt forms of HumanEval and GSM8K."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from drafttrain.data.files import ASSETS, read_records
from drafttrain.errors import UserError

SINGLE = ("prompt", "question")  # HumanEval, GSM8K


@dataclass(frozen=True, slots=True)
class Prompt:
    """turns: what the user says, turn by turn; the target's replies go in between."""

    question_id: str | int
    category: str
    turns: list[str]


def load_prompts(path: str, limit: int | None = None) -> list[Prompt]:
    """Read `embedded` or a file, at most `limit` prompts. Raises UserError naming file and line of anything malformed."""
    if limit is not None and limit < 1:
        raise UserError(
            f"the prompt limit must be at least 1, got {limit}; raise measure.limit, or leave it out to read everything"
        )
    file = ASSETS / "prompts.jsonl" if path == "embedded" else Path(path).expanduser()
    records = islice(read_records(file), limit)
    return [_prompt(origin, record, number, file) for number, (origin, record) in enumerate(records, start=1)]


def _prompt(origin: str, record: dict[str, Any], number: int, file: Path) -> Prompt:
    turns = record.get("turns")
    if turns is None:
        turns = [record[key] for key in SINGLE if record.get(key) is not None][:1]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        got = ", ".join(sorted(map(str, record))) or "no key at all"
        raise UserError(
            f"{origin}: expected `turns`, a list of strings (or `prompt`, or `question`), got {got}; write the prompt so"
        )
    if not turns[0].strip():
        raise UserError(f"{origin}: expected text in the first turn, got a blank string; fill it, or remove the record")
    question_id = record.get("question_id", record.get("task_id", number))
    category = record.get("category", file.name.split(".")[0])
    return Prompt(question_id if isinstance(question_id, int) else str(question_id), str(category), turns)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, turns: Sequence[str], replies: Sequence[str] = ()) -> list[int]:
    """Token ids of the first turn, or with r replies of the first r + 1 turns with the replies between, ready to be continued.

    With a chat template: rendered with its generation prompt. Without: the plain text, blank lines between turns.
    """
    said = [part for pair in zip(turns, replies, strict=False) for part in pair] + [turns[len(replies)]]
    return encode_messages(tokenizer, [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)])


def encode_messages(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation that ends in a user turn, ready to be continued; templates as in `encode_prompt`."""
    if not tokenizer.chat_template:
        return list(tokenizer("\n\n".join(m["content"] for m in messages), verbose=False)["input_ids"])
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise UserError(
            f"the chat template refuses the prompt {messages[0]['content'][:40]!r} ({error}); use a template that takes user "
            "turns"
        ) from error
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
