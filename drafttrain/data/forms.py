"""Converts a record to a conversation. Its form is recognised by its fields, or named by the user."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.data.files import keys_of
from drafttrain.data.pictures import IMAGE_KEYS, image_part, located

ASSISTANT = "assistant"
ROLES = {  # role names of published ShareGPT-style sets
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), ASSISTANT),
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
    "system": "system",
}
COPIED_FIELDS = ("name", "tool_call_id")  # fields of a turn that are kept unchanged
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # alternative names of one field


@dataclass(frozen=True, slots=True)
class Conversation:
    """One record: messages for the chat template, or plain text that is supervised as a whole."""

    origin: str  # file and line, for error messages
    # {role, content} each, and if present tool_calls, tool_call_id, name and reasoning_content
    messages: tuple[dict[str, Any], ...] = ()
    text: str | None = None  # plain text instead of messages
    tools: tuple[dict[str, Any], ...] = ()  # JSON schemas for the template
    form: str = field(default="", compare=False)  # the record's form, a name of `FORMS`


@dataclass(frozen=True, slots=True)
class Form:
    """A record form."""

    fields: tuple[tuple[str, ...], ...]  # alternative sets of fields; a record of this form has all fields of one set
    # (origin, the record's non-null fields) -> messages, or a text
    read: Callable[[str, dict[str, Any]], list[dict[str, Any]] | str]

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
    filled = {str(key): value for key, value in record.items() if value is not None}
    name = _recognised(origin, filled) if form == "auto" else form
    if not FORMS[name].fits(filled):
        raise UserError(f"{origin}: expected {FORMS[name]} (data.form={form}), got {keys_of(record)}; correct data.form")
    parsed = FORMS[name].read(origin, filled)
    if isinstance(parsed, str):
        return Conversation(origin, text=parsed, form=name)
    for message in parsed:
        message["content"] = located(origin, message, folder)
    roles = [message["role"] for message in parsed]
    if "system" in filled and "system" not in roles and isinstance(filled["system"], str) and filled["system"]:
        parsed.insert(0, {"role": "system", "content": _string(origin, "system", filled["system"])})
    if replies and ASSISTANT not in roles:
        got = " ".join(", ".join(roles)[:60].split()) or "no turn"
        way_out = "write them with drafttrain prepare" if name in UNANSWERED else "add the reply, or remove the record"
        raise UserError(f"{origin}: expected an assistant turn to learn from, got {got}; {way_out}")
    return Conversation(origin, tuple(parsed), tools=_tools(origin, filled.get("tools")), form=name)


def check_form(form: str) -> None:
    """Raise UserError for an unknown form."""
    if form != "auto" and form not in FORMS:
        raise UserError(f"data.form is {form!r}; set it to auto, {', '.join(FORMS)}")


def _recognised(origin: str, filled: dict[str, Any]) -> str:
    for name, form in FORMS.items():
        if form.fits(filled):
            return name
    known = ", ".join(map(str, FORMS.values()))
    raise UserError(f"{origin}: expected {known}, got {keys_of(filled)}; rename the fields to one of these forms")


def _openai(origin: str, filled: dict[str, Any]) -> list[dict[str, Any]]:
    return _turns(origin, "messages", filled["messages"])


def _sharegpt(origin: str, filled: dict[str, Any]) -> list[dict[str, Any]]:
    turns = _turns(origin, "conversations", filled["conversations"], ("from", "role"), ("value", "content"))
    for turn in turns:
        if turn["role"] not in ROLES:
            raise UserError(f"{origin}: expected a speaker among {', '.join(ROLES)}, got {turn['role']!r:.60}; rename it")
        turn["role"] = ROLES[turn["role"]]
        if turn["role"] == "function_call":
            turn |= {"role": ASSISTANT, "content": "", "tool_calls": _calls(origin, "conversations", turn["content"])}
    return turns


def _prompted(origin: str, filled: dict[str, Any]) -> list[dict[str, Any]]:
    reply = "response" if "response" in filled else "completion"
    return _pair(_string(origin, "prompt", filled["prompt"]), _string(origin, reply, filled[reply]))


def _alpaca(origin: str, filled: dict[str, Any]) -> list[dict[str, Any]]:
    """The instruction, a blank line, and its input."""
    parts = [_string(origin, name, filled.get(name, "")) for name in ("instruction", "input")]
    return _pair("\n\n".join(part for part in parts if part.strip()), _string(origin, "output", filled["output"]))


def _nvidia(origin: str, filled: dict[str, Any]) -> list[dict[str, Any]]:
    """NVIDIA's sets: the reply to a text, or to the turns before it."""
    asked, reply = filled["input"], {"role": ASSISTANT, "content": _string(origin, "output", filled["output"])}
    if isinstance(asked, str):
        return [{"role": "user", "content": asked}, reply]
    return [*_turns(origin, "input", asked), reply]


def _mt_bench(origin: str, filled: dict[str, Any]) -> list[dict[str, Any]]:
    """MT-bench: the user's turns."""
    turns = filled["turns"]
    if not isinstance(turns, list):
        raise UserError(f"{origin}: expected a list in `turns`, got {type(turns).__name__}; write one string per turn")
    return [{"role": "user", "content": _content(origin, f"turns[{i}]", turn)} for i, turn in enumerate(turns)]


def _question(origin: str, filled: dict[str, Any]) -> list[dict[str, Any]]:
    """HumanEval, GSM8K and other sets of questions. Their answers were not written by the target, so they are dropped."""
    name = "question" if "question" in filled else "prompt"
    return [{"role": "user", "content": _string(origin, name, filled[name])}]


def _text(origin: str, filled: dict[str, Any]) -> str:
    return _string(origin, "text", filled["text"])


FORMS = {  # in the order in which they are tried
    "messages": Form((("messages",),), _openai),
    "conversations": Form((("conversations",),), _sharegpt),
    "prompt": Form((("prompt", "response"), ("prompt", "completion")), _prompted),
    "alpaca": Form((("instruction", "output"),), _alpaca),
    "input": Form((("input", "output"),), _nvidia),
    "turns": Form((("turns",),), _mt_bench),
    "text": Form((("text",),), _text),
    "question": Form((("question",), ("prompt",)), _question),
}
UNANSWERED = ("turns", "question")


def _pair(prompt: str, reply: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": reply}]


def _turns(
    origin: str, name: str, turns: Any, role_keys: tuple[str, ...] = ("role",), content_keys: tuple[str, ...] = ("content",)
) -> list[dict[str, Any]]:
    """Messages from a list of turns. role_keys, content_keys: alternative field names, the usual one first."""
    if not isinstance(turns, list):
        raise UserError(f"{origin}: expected a list in `{name}`, got {type(turns).__name__}; write one object per turn")
    found = []
    for number, turn in enumerate(turns):
        place = f"{name}[{number}]"
        if not isinstance(turn, dict):
            got = type(turn).__name__
            raise UserError(f"{origin}: expected an object in {place}, got {got}; write {role_keys[0]} and {content_keys[0]}")
        role, content = (next((k for k in keys if turn.get(k) is not None), keys[0]) for keys in (role_keys, content_keys))
        found.append(
            {"role": _string(origin, f"{place}.{role}", turn.get(role))}
            | _message_content(origin, f"{place}.{content}", turn, content)
        )
    return found


def _message_content(origin: str, place: str, turn: dict[str, Any], content: str) -> dict[str, Any]:
    """A message's fields except its role."""
    calls = turn.get("tool_calls")
    parsed: dict[str, Any] = {
        "content": "" if calls and turn.get(content) is None else _content(origin, place, turn.get(content))
    }
    if calls:
        parsed["tool_calls"] = _calls(origin, place.rpartition(".")[0], calls)
    thought = next((turn[key] for key in REASONING_FIELDS if turn.get(key)), None)
    if thought is not None:
        parsed["reasoning_content"] = _string(origin, place.replace(content, REASONING_FIELDS[0]), thought)
    return parsed | {key: turn[key] for key in COPIED_FIELDS if turn.get(key) is not None}


def _content(origin: str, place: str, value: Any) -> str | list[dict[str, str]]:
    """A string, or a list of parts, which is joined where all are text."""
    if not isinstance(value, list):
        return _string(origin, place, value)
    parts: list[dict[str, str]] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind in IMAGE_KEYS:
            parts.append(image_part(origin, place, part))
            continue
        if kind != "text":
            raise UserError(
                f"{origin}: expected text and image parts in {place}, got {kind}; write its text, or remove the record"
            )
        parts.append({"type": "text", "text": _string(origin, f"{place}.text", part.get("text"))})
    return parts if any(part["type"] != "text" for part in parts) else "".join(part["text"] for part in parts)


def _calls(origin: str, place: str, value: Any) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, as templates expect them. OpenAI stores arguments as JSON strings."""
    value = _unpacked(value)
    calls = value if isinstance(value, list) else [value]
    found = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(f"{origin}: expected tool calls with a function's name in {place}, got {call!r:.60}; correct them")
        function = function | {"arguments": _unpacked(function.get("arguments", {}))}
        found.append({"type": "function"} | (call if "function" in call else {}) | {"function": function})
    return found


def _tools(origin: str, value: Any) -> tuple[dict[str, Any], ...]:
    """JSON schemas of the tools."""
    tools = _unpacked(value)
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{origin}: expected a list of JSON schemas in `tools`, got {value!r:.60}; correct it")
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in tools)


def _unpacked(value: Any) -> Any:
    """The value of a JSON string: tables and OpenAI store values without a fixed shape as JSON strings."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # not JSON, or nested too deeply to be used
        return value


def _string(origin: str, name: str, value: Any) -> str:
    """The value. Raises UserError unless it is a string of valid Unicode."""
    if not isinstance(value, str):
        got = "nothing" if value is None else type(value).__name__
        raise UserError(f"{origin}: expected a string in {name}, got {got}; write its text, or remove the record")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        got = f"an unpaired surrogate at character {error.start}"
        raise UserError(f"{origin}: expected Unicode text in {name}, got {got}; remove it") from error
    return value
