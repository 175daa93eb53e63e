"""Converts a record to a conversation. Its form is recognised by its fields, or named by the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drafttrain.core.errors import UserError
from drafttrain.data.files import keys_of
from drafttrain.data.pictures import located, with_images
from drafttrain.data.turns import ASSISTANT, LEARN, ROLES, message, pair, string, turns, unlearnt, unpacked

__all__ = ["ASSISTANT", "FORMS", "UNANSWERED", "Conversation", "TokenText", "conversation"]

MASKS = ("loss_mask", "assistant_masks", "completion_mask")  # of `input_ids`: 1 on supervised tokens
UNLABELLED = -100  # in `labels`: the token is not supervised
ARGUMENTS = "chat_template_kwargs"  # TRL's field of a record: what the template gets besides the messages
TOOLS, ADAPTER = "tools", "adapter"
TAKEN = (TOOLS, "documents", "chat_template", "conversations", "messages", "continue_final_message", "add_generation_prompt")
DOCUMENTS, TOKENIZER = "documents", "tokenizer"  # of a record of `prepare`: its texts as tokens, and whose tokens they are


@dataclass(frozen=True, slots=True, eq=False)
class TokenText:
    """A text as token ids. Arrays, because lists of numbers would take ten times the memory."""

    ids: NDArray[np.int32]  # [T]
    mask: NDArray[np.bool_]  # [T], True on supervised tokens


@dataclass(frozen=True, slots=True)
class Conversation:
    """One record: messages for the chat template, plain text that is supervised as a whole, or tokens."""

    origin: str  # file and line, for error messages
    # {role, content} each, and if present tool_calls, tool_call_id, name, reasoning_content and learn
    messages: tuple[dict[str, Any], ...] = ()
    text: str | None = None  # plain text instead of messages
    tools: tuple[dict[str, Any], ...] = ()  # JSON schemas for the template
    form: str = field(default="", compare=False)  # the record's form, a name of `FORMS`
    tokens: tuple[TokenText, ...] = ()  # instead of messages; or the same conversation as the target read and wrote it
    tokenizer: str | None = None  # fingerprint of the tokenizer of `tokens`; None: the user vouches for it
    spans: tuple[tuple[int, int], ...] = ()  # [start, end) characters of the text that are supervised; none: all of it
    arguments: dict[str, Any] = field(default_factory=dict)  # for the chat template
    adapter: str | None = None  # LoRA adapter of the target whose text it is; None: of the target itself

    def learnt(self, turn: int) -> bool:
        """Whether the data lets this message be learnt."""
        return self.messages[turn].get(LEARN, True) is True


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A text of which parts are supervised."""

    text: str
    spans: tuple[tuple[int, int], ...]


Parsed = list[dict[str, Any]] | str | MarkedText | TokenText


@dataclass(frozen=True, slots=True)
class Form:
    """A record form."""

    fields: tuple[tuple[str, ...], ...]  # alternative sets of fields; a record of this form has all fields of one set
    # (origin, the record's non-null fields) -> messages, a text or tokens
    read: Callable[[str, dict[str, Any]], Parsed]

    def fits(self, filled: dict[str, Any]) -> bool:
        """Whether these fields are those of this form."""
        return any(all(name in filled for name in names) for names in self.fields)

    def __str__(self) -> str:
        return " or ".join(" with ".join(f"`{name}`" for name in names) for names in self.fields)


def conversation(
    origin: str, record: dict[str, Any], form: str = "auto", replies: bool = True, folder: Path | None = None
) -> Conversation:
    """The record as a conversation. replies: refuse records without an assistant turn, which are only usable as prompts.

    folder: that of the record's file, to which the paths of images are relative; None: the working directory.

    Null fields count as absent, since tables hold every column in every row. Raises UserError for an unusable record.
    """
    fields = {str(key): value for key, value in record.items() if value is not None}
    name = _recognised(origin, fields) if form == "auto" else form
    if not FORMS[name].fits(fields):
        raise UserError(f"{origin}: expected {FORMS[name]} (data.form={form}), got {keys_of(record)}; correct data.form")
    parsed = FORMS[name].read(origin, fields)
    if isinstance(parsed, str):
        return Conversation(origin, text=parsed, form=name)
    if isinstance(parsed, MarkedText):
        return Conversation(origin, text=parsed.text, spans=parsed.spans, form=name)
    if isinstance(parsed, TokenText):
        return Conversation(origin, form=name, tokens=(parsed,))
    for turn in with_images(origin, parsed, fields):
        turn["content"] = located(origin, turn, folder)
    roles = [turn["role"] for turn in parsed]
    if "system" in fields and "system" not in roles and isinstance(fields["system"], str) and fields["system"]:
        parsed.insert(0, message("system", string(origin, "system", fields["system"])))
    if replies:
        _check_replies(origin, fields, name, parsed)
    tools = tools_of(origin, fields)
    tokenizer = fields.get(TOKENIZER) if DOCUMENTS in fields else None
    tokens = _documents(origin, fields[DOCUMENTS]) if isinstance(tokenizer, str) else ()
    ids_tokenizer = tokenizer if tokens else None
    arguments = _arguments(origin, fields.get(ARGUMENTS))
    return Conversation(
        origin, tuple(parsed), tools=tools, form=name, tokens=tokens, tokenizer=ids_tokenizer, arguments=arguments
    )


def _recognised(origin: str, fields: dict[str, Any]) -> str:
    matching_forms = [name for name, form in FORMS.items() if form.fits(fields)]
    if "input_ids" in matching_forms[1:]:
        choices = f"data.form={matching_forms[0]} or data.form=input_ids"
        raise UserError(f"{origin}: got {matching_forms[0]} and token ids with a mask of their own; set {choices}")
    if matching_forms:
        return matching_forms[0]
    form_names = ", ".join(map(str, FORMS.values()))
    raise UserError(f"{origin}: expected {form_names}, got {keys_of(fields)}; rename the fields to one of these forms")


ANSWER_IT = "add the reply, remove the record, or let the target answer all prompts: drafttrain prepare"


def _check_replies(origin: str, fields: dict[str, Any], form: str, messages: list[dict[str, Any]]) -> None:
    """Raise UserError unless there is a reply to learn."""
    replies = [turn for turn in messages if turn["role"] == ASSISTANT]
    if not replies:
        role_names = " ".join(", ".join(turn["role"] for turn in messages)[:60].split()) or "no turn"
        advice = "write them with drafttrain prepare" if form in UNANSWERED else ANSWER_IT
        raise UserError(f"{origin}: expected an assistant turn to learn from, got {role_names}; {advice}")
    if not any(turn.get(LEARN, True) for turn in replies):
        raise UserError(
            f"{origin}: expected an assistant turn to learn from, got none but those to be left out; remove the record"
        )
    if (tag := next((name for name in ("kto_tag", "label") if fields.get(name) is False), None)) is not None:
        raise UserError(f"{origin}: `{tag}` is false, so the reply is one not to learn; remove the record")
    roles = fields.get("roles_to_train", [ASSISTANT])
    if not isinstance(roles, list) or {ROLES.get(str(role).lower()) for role in roles} != {ASSISTANT}:
        raise UserError(f'{origin}: expected ["assistant"] in roles_to_train, got {roles!r:.60}; no other turns can be learnt')


def _openai(origin: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    return turns(origin, "messages", fields["messages"])


def _sharegpt(origin: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """ShareGPT's conversations, and LMSYS-Chat's and WildChat's conversation."""
    name = "conversations" if "conversations" in fields else "conversation"
    return turns(origin, name, fields[name], strict=True)


def _prompted(origin: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """A prompt and a reply, each a text or a list of turns, as TRL has them. Replies inside the prompt are not learnt."""
    reply_key = "response" if "response" in fields else "completion"
    prompt_turns = [*_history(origin, fields), *unlearnt(_asked(origin, "prompt", fields["prompt"]))]
    if _are_turns(fields[reply_key]):
        return [*prompt_turns, *turns(origin, reply_key, fields[reply_key])]
    return [*prompt_turns, message(ASSISTANT, string(origin, reply_key, fields[reply_key]))]


def _asked(origin: str, name: str, prompt: Any) -> list[dict[str, Any]]:
    if _are_turns(prompt):
        return turns(origin, name, prompt)
    return [message("user", string(origin, name, prompt))]


def _are_turns(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(turn, dict) for turn in value)


def _history(origin: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Earlier questions and replies, as LLaMA-Factory and ms-swift have them: [[question, reply], ...]."""
    history = fields.get("history") or []
    if not isinstance(history, list) or not all(isinstance(entry, list) and len(entry) == 2 for entry in history):
        raise UserError(f"{origin}: expected [question, reply] entries in `history`, got {history!r:.60}; correct it")
    return [turn for i, entry in enumerate(history) for turn in pair(*(string(origin, f"history[{i}]", x) for x in entry))]


def _alpaca(origin: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The instruction, a blank line, and its input."""
    texts = [string(origin, name, fields.get(name, "")) for name in ("instruction", "input")]
    prompt, reply_key = "\n\n".join(text for text in texts if text.strip()), "output" if "output" in fields else "response"
    return [*_history(origin, fields), *pair(prompt, string(origin, reply_key, fields[reply_key]))]


def _nvidia(origin: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """NVIDIA's sets: the reply to a text, or to the turns before it."""
    return [*_asked(origin, "input", fields["input"]), message(ASSISTANT, string(origin, "output", fields["output"]))]


def _swift(origin: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """ms-swift's query and response."""
    prompt, reply = (string(origin, name, fields[name]) for name in ("query", "response"))
    return [*_history(origin, fields), *pair(prompt, reply)]


def _mt_bench(origin: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """MT-bench: the user's turns."""
    user_turns = fields["turns"]
    if not isinstance(user_turns, list):
        raise UserError(f"{origin}: expected a list in `turns`, got {type(user_turns).__name__}; write one string per turn")
    return turns(origin, "turns", [turn if isinstance(turn, dict) else message("user", turn) for turn in user_turns])


def _question(origin: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """HumanEval, GSM8K and other sets of questions. Their answers were not written by the target, so they are dropped."""
    name = "question" if "question" in fields else "prompt"
    return _asked(origin, name, fields[name])


def _text(origin: str, fields: dict[str, Any]) -> str:
    return string(origin, "text", fields["text"])


def _segments(origin: str, fields: dict[str, Any]) -> MarkedText:
    """axolotl's text without a template, in parts that are learnt or not."""
    segments, text, spans = fields["segments"], "", list[tuple[int, int]]()
    if not isinstance(segments, list) or not all(isinstance(p, dict) and isinstance(p.get("label"), bool) for p in segments):
        raise UserError(f"{origin}: expected objects with text and label, true or false, in `segments`, got {segments!r:.60}")
    for index, segment in enumerate(segments):
        segment_text = string(origin, f"segments[{index}].text", segment.get("text"))
        if segment["label"] and segment_text:
            spans.append((len(text), len(text) + len(segment_text)))
        text += segment_text
    if not spans:
        raise UserError(f"{origin}: expected a part to learn in `segments`, got none; remove the record")
    return MarkedText(text, tuple(spans))


def _tokens(origin: str, fields: dict[str, Any]) -> TokenText:
    """Token ids with one or more masks, or with `labels`."""
    ids = _numbers(origin, "input_ids", fields["input_ids"])
    columns = {name: _numbers(origin, name, fields[name], most=1) for name in MASKS if name in fields}
    if "labels" in fields:
        labels = _numbers(origin, "labels", fields["labels"], least=UNLABELLED)
        if len(labels) == len(ids) and any(label not in (UNLABELLED, i) for label, i in zip(labels, ids, strict=True)):
            raise UserError(f"{origin}: expected {UNLABELLED} or the token's own id in `labels`, got others; do not shift them")
        columns["labels"] = [label != UNLABELLED for label in labels]
    attention_mask = _numbers(origin, "attention_mask", fields.get("attention_mask", [1] * len(ids)), most=1)
    for name, values in (columns | {"attention_mask": attention_mask}).items():
        if len(values) != len(ids):
            raise UserError(
                f"{origin}: expected {len(ids)} values in `{name}`, one for each token, got {len(values)}; correct it"
            )
    attended = np.array(attention_mask, np.bool_)  # the others are padding
    supervised = np.logical_and.reduce([np.array(values, np.bool_) for values in columns.values()])[attended]
    if not supervised.any():
        raise UserError(f"{origin}: expected supervised tokens, got a mask that selects none; remove the record")
    return TokenText(np.array(ids, np.int32)[attended], supervised)


def _numbers(origin: str, name: str, value: Any, least: int = 0, most: int = 2**31 - 1) -> list[int]:
    """Whole numbers of one row; [[...]], as saved tensors are, is one row too."""
    row = value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) else value
    is_valid = isinstance(row, list) and all(isinstance(x, int | float) and least <= x <= most and x == int(x) for x in row)
    if not is_valid:
        shown = f"{value!r:.60}"
        raise UserError(
            f"{origin}: expected a list of whole numbers from {least} to {most} in `{name}`, got {shown}; correct it"
        )
    return [int(x) for x in row]


def _documents(origin: str, value: Any) -> tuple[TokenText, ...]:
    fields = {"input_ids", "loss_mask"}
    if not isinstance(value, list) or not all(isinstance(entry, dict) and fields <= entry.keys() for entry in value):
        shown = f"{value!r:.60}"
        raise UserError(f"{origin}: expected input_ids with loss_mask in `{DOCUMENTS}`, got {shown}; prepare the data again")
    return tuple(_tokens(origin, entry) for entry in value)


FORMS = {  # in the order in which they are tried
    "messages": Form((("messages",),), _openai),
    "conversations": Form((("conversations",), ("conversation",)), _sharegpt),
    "prompt": Form((("prompt", "response"), ("prompt", "completion")), _prompted),
    "alpaca": Form((("instruction", "output"), ("instruction", "response")), _alpaca),
    "input": Form((("input", "output"),), _nvidia),
    "query": Form((("query", "response"),), _swift),
    "turns": Form((("turns",),), _mt_bench),
    "input_ids": Form(tuple(("input_ids", name) for name in (*MASKS, "labels")), _tokens),
    "segments": Form((("segments",),), _segments),
    "text": Form((("text",),), _text),
    "question": Form((("question",), ("prompt",)), _question),
}
UNANSWERED = ("turns", "question")


def _arguments(origin: str, value: Any) -> dict[str, Any]:
    """What the record passes to the chat template."""
    arguments = unpacked(value) or {}
    if not isinstance(arguments, dict) or any(name in arguments for name in TAKEN):
        raise UserError(
            f"{origin}: expected an object in `{ARGUMENTS}`, without {', '.join(TAKEN)}, got {value!r:.60}; correct it"
        )
    return arguments


def tools_of(origin: str, fields: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """JSON schemas of a record's tools."""
    value = fields.get(TOOLS) or fields.get("functions")
    tools = unpacked(value)
    if not tools:
        return ()
    schemas = (
        [tool.get("function", tool) if isinstance(tool, dict) else None for tool in tools]
        if isinstance(tools, list)
        else [None]
    )
    if not all(isinstance(schema, dict) for schema in schemas):
        raise UserError(f"{origin}: expected a list of JSON schemas in `{TOOLS}`, got {value!r:.60}; correct it")
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in tools)


def adapter_of(origin: str, record: Mapping[str, Any]) -> str | None:
    """The LoRA adapter of the target that a record names; None: none."""
    name = record.get(ADAPTER)
    if name is not None and not isinstance(name, str):
        raise UserError(f"{origin}: expected the name of one of target.adapters in `{ADAPTER}`, got {name!r:.60}; correct it")
    return name or None
