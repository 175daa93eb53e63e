"""Reads the turns of a record: speaker, content, tool calls, reasoning, and whether the turn is to be learnt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.data.pictures import IMAGE_KEYS, image_part

ASSISTANT = "assistant"
ROLES = {  # speakers of published sets, in lower case
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model", "bot"), ASSISTANT),
    **dict.fromkeys(("tool", "function", "observation", "observations", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
    "system": "system",
}
ROLE_KEYS, CONTENT_KEYS = ("role", "from"), ("content", "value")  # OpenAI's names and ShareGPT's
PAIR = ("human", "assistant")  # fields of an entry that holds a question and its reply
COPIED_FIELDS = ("name", "tool_call_id")  # fields of a turn that are kept unchanged
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # alternative names of one field
LEARN = "learn"  # field of a message, there if it is False: the data says not to learn the turn
# fields of a turn that say whether to learn it: OpenAI's, ms-swift's and XTuner's, axolotl's, and those of agents' data
SWITCHES = ("weight", "loss", "train", "trainable", "loss_mask", "step_loss_mask", "loss_weight", "loss_scale")
DETAIL, MASKED, UNCLEAR = "train_detail", "masked", "mask"  # axolotl's parts of a turn; torchtune's opposite of `train`


def message(role: str, content: Any) -> dict[str, Any]:
    """A message of the chat template."""
    return {"role": role, "content": content}


def pair(prompt: str, reply: str) -> list[dict[str, Any]]:
    """A prompt and its reply."""
    return [message("user", prompt), message(ASSISTANT, reply)]


def turns(origin: str, name: str, value: Any, strict: bool = False) -> list[dict[str, Any]]:
    """Messages from a record's list of turns. strict: refuse a speaker that is not among `ROLES`.

    Raises UserError for a malformed turn, and for one that is to be learnt in a way that training cannot follow.
    """
    value = unpacked(value)
    if not isinstance(value, list):
        raise UserError(f"{origin}: expected a list in `{name}`, got {type(value).__name__}; write one object per turn")
    messages: list[dict[str, Any]] = []
    for index, turn in enumerate(value):
        field = f"{name}[{index}]"
        if not isinstance(turn, dict):
            raise UserError(f"{origin}: expected an object in {field}, got {type(turn).__name__}; write role and content")
        if all(key in turn for key in PAIR) and not any(key in turn for key in ROLE_KEYS):
            messages += pair(*(string(origin, f"{field}.{key}", turn[key]) for key in PAIR))
            continue
        messages.append(_turn(origin, field, turn, strict))
    return messages


def unlearnt(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, none of which is to be learnt."""
    return [turn | {LEARN: False} if turn["role"] == ASSISTANT else turn for turn in messages]


def _turn(origin: str, field: str, turn: dict[str, Any], strict: bool) -> dict[str, Any]:
    role_key, content_key = (next((k for k in keys if turn.get(k) is not None), keys[0]) for keys in (ROLE_KEYS, CONTENT_KEYS))
    speaker = string(origin, f"{field}.{role_key}", turn.get(role_key))
    role = ROLES.get(speaker.lower())
    if role is None and strict:
        raise UserError(f"{origin}: expected a speaker among {', '.join(ROLES)}, got {speaker!r:.60}; rename it")
    parsed = message(role or speaker, "") | _message_content(origin, f"{field}.{content_key}", turn, content_key)
    if role == "function_call":
        parsed |= message(ASSISTANT, "") | {"tool_calls": tool_calls(origin, field, parsed["content"])}
    if not _learnt(origin, field, parsed["role"], turn):
        parsed[LEARN] = False
    return parsed


def _message_content(origin: str, field: str, turn: dict[str, Any], key: str) -> dict[str, Any]:
    """A message's fields except its role."""
    calls = unpacked(turn.get("tool_calls")) or unpacked(turn.get("function_call"))  # today's field of OpenAI, and the former
    reasoning = next((turn[key] for key in REASONING_FIELDS if turn.get(key)), None)
    is_empty = turn.get(key) is None and bool(calls or reasoning)
    parsed: dict[str, Any] = {"content": "" if is_empty else _content(origin, field, turn.get(key))}
    if calls:
        parsed["tool_calls"] = tool_calls(origin, field.rpartition(".")[0], calls)
    if reasoning is not None:
        parsed["reasoning_content"] = string(origin, field.replace(key, REASONING_FIELDS[0]), reasoning)
    return parsed | {key: turn[key] for key in COPIED_FIELDS if turn.get(key) is not None}


def _learnt(origin: str, field: str, role: str, turn: dict[str, Any]) -> bool:
    """Whether the turn's fields let it be learnt. Only the assistant's turns can be: the target writes no others."""
    if role != ASSISTANT:
        if turn.get("train") or turn.get("trainable"):
            raise UserError(
                f"{origin}: {field} asks to learn a turn of {role}, which the target does not write; set it to false"
            )
        return True
    if turn.get(UNCLEAR) is not None:
        raise UserError(f"{origin}: `{UNCLEAR}` in {field} may mean learnt or left out; write `train` as true or false instead")
    learn_flags = [_switch(origin, f"{field}.{name}", turn[name]) for name in SWITCHES if turn.get(name) is not None]
    if turn.get(MASKED) is not None:
        learn_flags.append(not _switch(origin, f"{field}.{MASKED}", turn[MASKED]))
    if turn.get(DETAIL) is not None and all(learn_flags):
        segments = turn[DETAIL]
        if not isinstance(segments, list) or any(not isinstance(segment, dict) or segment.get("train") for segment in segments):
            raise UserError(
                f"{origin}: {field}.{DETAIL} selects parts of a reply, and replies are learnt whole; write `train` as true or "
                "false, or give token ids with a loss_mask"
            )
        learn_flags.append(False)
    return all(learn_flags)


def _switch(origin: str, field: str, value: Any) -> bool:
    if not isinstance(value, int | float) or value not in (0, 1):
        raise UserError(f"{origin}: expected 0 or 1, true or false in {field}, got {value!r:.60}; a turn is learnt or left out")
    return bool(value)


def _content(origin: str, field: str, value: Any) -> str | list[dict[str, str]]:
    """A string, or a list of parts, which is joined where all are text."""
    if not isinstance(value, list):
        return string(origin, field, value)
    parts: list[dict[str, str]] = []
    for part in value:
        part_type = part.get("type") if isinstance(part, dict) else type(part).__name__
        if part_type in IMAGE_KEYS:
            parts.append(image_part(origin, field, part))
            continue
        if part_type != "text":
            raise UserError(
                f"{origin}: expected text and image parts in {field}, got {part_type}; write its text, or remove the record"
            )
        parts.append({"type": "text", "text": string(origin, f"{field}.text", part.get("text"))})
    return parts if any(part["type"] != "text" for part in parts) else "".join(part["text"] for part in parts)


def tool_calls(origin: str, field: str, value: Any) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, as templates expect them. OpenAI stores arguments as JSON strings."""
    value = unpacked(value)
    calls = value if isinstance(value, list) else [value]
    parsed = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(f"{origin}: expected tool calls with a function's name in {field}, got {call!r:.60}; correct them")
        arguments = unpacked(function.get("arguments"))
        no_arguments = arguments is None or (isinstance(arguments, str) and not arguments.strip())
        function = function | {"arguments": {} if no_arguments else arguments}
        parsed.append({"type": "function"} | (call if "function" in call else {}) | {"function": function})
    return parsed


def unpacked(value: Any) -> Any:
    """The value of a JSON string: tables and OpenAI store values without a fixed shape as JSON strings."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # not JSON, or nested too deeply to be used
        return value


def string(origin: str, name: str, value: Any) -> str:
    """The value. Raises UserError unless it is a string of valid Unicode."""
    if not isinstance(value, str):
        problem = "nothing" if value is None else type(value).__name__
        raise UserError(f"{origin}: expected a string in {name}, got {problem}; write its text, or remove the record")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        problem = f"an unpaired surrogate at character {error.start}"
        raise UserError(f"{origin}: expected Unicode text in {name}, got {problem}; remove it") from error
    return value
