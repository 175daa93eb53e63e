"""Evaluation prompts from files in MT-bench's record form, from files of public sets, or from the hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from drafttrain.core.errors import UserError, printable
from drafttrain.data import DataOptions
from drafttrain.data.files import ASSETS, keys_of, path_of
from drafttrain.data.forms import conversation
from drafttrain.data.pictures import Content, sources_of, text_of
from drafttrain.data.records import read_records
from drafttrain.data.sets import SETS, field_of, hub_records
from drafttrain.data.sources import cache_folder
from drafttrain.data.templates import template_errors, template_origin
from drafttrain.targets.images import TEXT_ONLY, Images

SINGLE = ("prompt", "question")  # HumanEval, GSM8K


@dataclass(frozen=True, slots=True)
class Prompt:
    """An evaluation prompt."""

    question_id: str | int
    category: str
    turns: list[Content]  # the user's turns; the target's replies are inserted between them
    format: str | None = None  # json if the reply must be JSON
    required: tuple[str, ...] = ()  # keys that the JSON reply must have
    reference: Any = None  # the record's own answer
    origin: str | None = None  # name of its public set, if any


def load_prompts(prompts: str | Sequence[str], limit: int | None = None) -> list[Prompt]:
    """Read `embedded`, a file, a public set by name (`drafttrain.data.sets`) or as NAME:FILE, or several of these.

    limit: largest number of prompts of each. Raises UserError that names file and line of a malformed record.
    """
    names: list[Any] = list(prompts) if isinstance(prompts, list | tuple) else [prompts]
    if not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"measure.prompts is {prompts!r}; name embedded, a file, or one or more of {', '.join(SETS)}")
    return [prompt for name in names for prompt in _load(name, limit)]


def named_prompts(prompts: str | Sequence[str]) -> str:
    """The prompts' names for a report."""
    return prompts if isinstance(prompts, str) else ", ".join(prompts)


def _load(name: str, limit: int | None) -> list[Prompt]:
    if name in SETS:
        return [_prompt(origin, record, i, name, name) for i, (origin, record) in enumerate(hub_records(name, limit), start=1)]
    set_name, _, path = name.partition(":")
    if set_name not in SETS:
        set_name, path = "", name
    file = ASSETS / "prompts.jsonl" if path == "embedded" else path_of(path, "prompts")
    records = read_records(file, limit, cache_folder(DataOptions()) / "spool")
    category = set_name or file.name.split(".")[0]
    numbered = enumerate(records, start=1)
    return [_prompt(origin, record, i, category, set_name, file.parent) for i, (origin, record) in numbered]


def _prompt(origin: str, record: dict[str, Any], index: int, category: str, chosen: str, folder: Path | None = None) -> Prompt:
    """category: used if the record has none. chosen: the record's public set; empty: recognised by its fields.

    folder: that of the file, to which the paths of images are relative.
    """
    spec = SETS.get(chosen)
    turns = spec.turns(record) if spec else _turns_by_field(record)
    turns = turns if spec else _with_images(origin, record, turns, folder)
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) or spec is None for turn in turns):
        record_keys = keys_of(record)
        expected = f"the fields of {chosen}" if spec else "`turns`, a list of strings (or `prompt`, or `question`)"
        raise UserError(f"{origin}: expected {expected}, got {record_keys}; write the prompt so")
    if not text_of(turns[0]).strip():
        raise UserError(f"{origin}: expected text in the first turn, got a blank string; fill it, or remove the record")
    question_id = record.get(spec.name) if spec and spec.name else record.get("question_id", record.get("task_id"))
    question_id = index if question_id is None else question_id
    category = record.get((spec and spec.category) or "category") or category
    reference = record.get(spec.reference) if spec and spec.reference else record.get("reference")
    name = question_id if isinstance(question_id, int) else printable(str(question_id))
    return Prompt(name, printable(str(category)), turns, *_format(origin, record), reference, chosen or None)


def _with_images(origin: str, record: dict[str, Any], turns: Any, folder: Path | None) -> Any:
    """The turns with the files of their images: lists of parts in `turns`, or the user's turns of `messages`."""
    if turns is None and isinstance(record.get("messages"), list):
        parsed = conversation(origin, {"messages": record["messages"]}, "messages", False, folder)
    elif isinstance(turns, list) and any(isinstance(turn, list) for turn in turns):
        parsed = conversation(origin, {"turns": turns}, "turns", False, folder)
    else:
        return turns if isinstance(turns, list) and all(isinstance(turn, str) for turn in turns) else None
    return [message["content"] for message in parsed.messages if message["role"] == "user"]


def _turns_by_field(record: dict[str, Any]) -> Any:
    """The turns of a record of unknown form, recognised by its fields."""
    if record.get("turns") is not None:
        return record["turns"]
    candidates = (field_of(key)(record) for key in SINGLE)
    return next((turns for turns in [*candidates, *(s.turns(record) for s in SETS.values())] if turns is not None), None)


def _format(origin: str, record: dict[str, Any]) -> tuple[str | None, tuple[str, ...]]:
    """The reply's required format and its required keys: `required`, or those of a JSON schema."""
    form, required = record.get("format"), record.get("required")
    if form not in (None, "json"):
        raise UserError(f"{origin}: expected json in `format`, got {form!r}; write json, or leave it out")
    if required is None and isinstance(schema := record.get("schema"), dict):
        required = schema.get("required")
    required = [] if required is None else required
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required) or (required and form is None):
        raise UserError(f'{origin}: expected a list of keys in `required`, with "format": "json", got {required!r}; mend it')
    return form, tuple(required)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Content], replies: Sequence[str] = (), images: Images = TEXT_ONLY
) -> list[int]:
    """Token ids that the target continues: the first turn, or with r replies the first r + 1 turns and the replies between.

    A chat template is applied with its generation prompt. Without one, turns are plain text with blank lines between them.
    """
    return encode_messages(tokenizer, dialogue(turns, replies), images)


def dialogue(turns: Sequence[Content], replies: Sequence[str]) -> list[dict[str, Any]]:
    """The first turns with the replies between them, one turn more than replies."""
    contents = [text for pair in zip(turns, replies, strict=False) for text in pair] + [turns[len(replies)]]
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def encode_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    images: Images = TEXT_ONLY,
    reply: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation that ends in a user turn. Templates are applied as in `encode_prompt`.

    images: of the target, for contents with images. reply: follows the conversation. arguments: for the template.
    """
    sources = sources_of(messages)
    if not tokenizer.chat_template:
        if sources:
            raise UserError(
                f"{sources[0][:80]}: images need a chat template, and the tokenizer has none; choose another target"
            )
        return list(tokenizer("\n\n".join(m["content"] for m in messages) + (reply or ""), verbose=False)["input_ids"])
    full_messages = [dict(m) for m in messages] + ([] if reply is None else [{"role": "assistant", "content": reply}])
    refusal = f"the chat template refuses the prompt {text_of(messages[0]['content'])[:40]!r}"
    with template_errors(refusal, template_origin(tokenizer), "use a template that takes user turns"):
        render_options = {"add_generation_prompt": reply is None, "tokenize": False}
        text = str(tokenizer.apply_chat_template(full_messages, **{**(arguments or {}), **render_options}))
    if not sources:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    origin = f"the prompt {text_of(messages[0]['content'])[:40]!r}"
    expanded = images.expand(text, sources, origin)
    ids = tokenizer(expanded.text, add_special_tokens=False, verbose=False)["input_ids"]
    return [int(i) for i in images.ids(ids, expanded.images, origin)]
