"""Tool calls: read in the text of replies, and answered by recorded results.

A tokenizer with a response template is read by transformers. For others the format is deduced: the chat template renders two
known calls, and what it writes around their names and arguments is what the target writes, too. Worked example:

    <tool_call>\\n{"name": "NAME", "arguments": {"KEY": "VALUE"}}\\n</tool_call>
    |       opening       |   |     middle     |    arguments   |   closing   |
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from drafttrain.core.errors import UserError
from drafttrain.data.prompts import rendered
from drafttrain.data.templates import special_tokens
from drafttrain.data.turns import ASSISTANT, message, tool_calls, unpacked

Call = dict[str, Any]
# why a conversation ends before its record does
UNREADABLE, OTHER, MISSING = "unreadable calls", "other calls", "no call for the results"
NO_RESULTS, NO_CALL = "calls without results", "results without a call"
ID = "\0"  # stands for a call's id, which the target need not write
NAME = r"(?P<name>[\w.:/-]+)"
CONTENT = "probe content"


def _probe(name: str) -> Call:
    arguments = {f"{name}_key{i}": f"{name}_value{i}" for i in (1, 2)}
    # some templates take ids of nine letters and digits alone
    return {"type": "function", "id": f"probe{name}", "function": {"name": f"{name}_function", "arguments": arguments}}


PROBES = [_probe("left"), _probe("next")]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": probe["function"]["name"],
            "description": "A probe.",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }
    for probe in PROBES
]

ASKED = message("user", "probe")


def parsed_calls(value: Any) -> tuple[Call, ...] | None:
    """Calls in OpenAI's form, with their arguments as objects; None if they cannot be read."""
    try:
        calls = tool_calls("a reply", "tool_calls", value)
        json.dumps(calls, ensure_ascii=False).encode()  # an unpaired surrogate could not be written to the journal
    except (UserError, ValueError):
        return None
    if not all(isinstance(call["function"]["arguments"], dict) for call in calls):
        return None
    return tuple(
        {key: call[key] for key in ("id", "type") if call.get(key)}
        | {"function": {key: call["function"][key] for key in ("name", "arguments")}}
        for call in calls
    )


def fitted(
    calls: Sequence[Call], recorded: Sequence[Call], results: Sequence[dict[str, Any]]
) -> tuple[list[Call], list[dict[str, Any]]] | str:
    """(the written calls, the recorded results as their answers), or why they do not fit.

    recorded: the calls that the results answered. The n-th result answers the n-th call, unless all results name the recorded
    calls by their ids. A call gets the id that its result names, and a result that names none gets that of its call.
    """
    if not results:
        return NO_RESULTS if calls else ([], [])
    if len(results) != len(recorded):
        return NO_CALL
    if not calls:
        return MISSING
    if [call["function"]["name"] for call in calls] != [call["function"]["name"] for call in recorded]:
        return OTHER
    ids, named = [call.get("id") for call in recorded], [result.get("tool_call_id") for result in results]
    if set(ids) == set(named) and len(set(ids)) == len(ids):
        named, answers = ids, list(results)
    else:
        answers = [
            result if name or "id" not in call else result | {"tool_call_id": call["id"]}
            for result, name, call in zip(results, named, calls, strict=True)
        ]
    return [call | ({"id": name} if name else {}) for call, name in zip(calls, named, strict=True)], answers


@dataclass(frozen=True, slots=True)
class CallReader:
    """Finds the tool calls in replies of the target that has this tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    format: CallFormat | None  # None: the tokenizer has a response template

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase) -> CallReader | None:
        """None if the tokenizer does not show how calls are written."""
        if getattr(tokenizer, "response_template", None) is not None:
            return CallReader(tokenizer, None)
        try:
            call_format = deduced(tokenizer) if tokenizer.chat_template else None
        except UserError:  # the template refuses such turns
            return None
        return None if call_format is None else CallReader(tokenizer, call_format)

    def read(self, text: str, prompt: str, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The fields of the reply's message: `tool_calls`, None if one is unreadable, next to `content`; empty without a call.

        text: the reply with special tokens, and without its end token.
        """
        if self.format is not None:
            content, calls = self.format.read(text, tools)
            special = special_tokens(self.tokenizer)
            fields = {"content": special.sub("", content) if special else content, "tool_calls": calls}
            return fields if calls != [] else {}
        try:
            fields = dict(self.tokenizer.parse_response(text, prefix=prompt, tools=list(tools)))
        except (ValueError, KeyError, TypeError):
            return {"content": text, "tool_calls": None}
        reasoning = fields.get("reasoning_content") or fields.get("thinking")
        message_fields = {"content": fields.get("content") or "", "tool_calls": fields.get("tool_calls")}
        message_fields |= {"reasoning_content": reasoning} if reasoning else {}
        return message_fields if fields.get("tool_calls") else {}


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a chat template writes calls."""

    opening: re.Pattern[str]  # up to the arguments
    closing: re.Pattern[str]  # after them, with what separates two calls
    argument: re.Pattern[str] | None  # one argument with `key` and `value`; None: they are one JSON object
    quoted: bool  # the JSON is within a string

    def read(self, text: str, tools: Sequence[dict[str, Any]]) -> tuple[str, list[Call] | None]:
        """(the text before the first call, the calls); None for calls that are unreadable."""
        first = self.opening.search(text, max(0, text.rfind("</think>")))  # thoughts may mention a call
        if first is None:
            return text, []
        content, calls, at, text = text[: first.start()].rstrip(), list[Call](), first.start(), text.rstrip()
        while at < len(text):
            opened = self.opening.match(text, at)
            arguments, end = self._arguments(text, opened, tools) if opened else (None, at)
            closed = self.closing.match(text, end)
            if opened is None or closed is None or not isinstance(arguments, dict):
                return content, None
            calls.append({"type": "function", "function": {"name": opened["name"], "arguments": arguments}})
            at = len(text) - len(text[closed.end() :].lstrip())
        return content, calls

    def _arguments(self, text: str, opened: re.Match[str], tools: Sequence[dict[str, Any]]) -> tuple[Any, int]:
        """(the arguments, their end)."""
        at, arguments = opened.end(), dict[str, Any]()
        if self.argument is None:
            try:
                value, end = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError):
                return None, at
            return (unpacked(value) if self.quoted else value), end
        while (match := self.argument.match(text, at)) is not None:
            arguments[match["key"]] = _typed(match["value"], _schema(tools, opened["name"], match["key"]))
            at = match.end()
        return arguments, at


def _schema(tools: Sequence[dict[str, Any]], name: str, key: str) -> Any:
    """The schema of a function's argument; an empty one if it is not known."""
    functions = [tool.get("function", tool) for tool in tools]
    parameters = next((function.get("parameters") for function in functions if function.get("name") == name), None)
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return properties.get(key) if isinstance(properties, dict) else {}


def _typed(text: str, schema: Any) -> Any:
    """The value of an argument that is written as text: as JSON, or as Python's True and None."""
    if not isinstance(schema, dict) or schema.get("type", "string") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        try:
            return ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            return text


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a text has a call."""

    name: int
    name_end: int
    start: int  # of its arguments
    end: int
    argument: str | None = None  # pattern of one argument
    quoted: bool = False


def deduced(tokenizer: PreTrainedTokenizerBase) -> CallFormat | None:
    """The format in which the chat template writes calls; None where it shows none."""
    text = _written(tokenizer, PROBES)
    first = _place(text, PROBES[0], 0)
    second = first and _place(text, PROBES[1], first.end)
    if first is None or second is None:  # some templates refuse two calls
        text = _written(tokenizer, PROBES[:1])
        if (first := _place(text, PROBES[0], 0)) is None:
            return None
    plain = rendered(tokenizer, [ASKED, message(ASSISTANT, CONTENT)], TOOLS, prompt=False)
    end = plain.rpartition(CONTENT)[2]
    text = text.removesuffix(end)
    head, middle = text[: first.name], text[first.name_end : first.start]
    if second is None:
        before, opening, closing, separator, after = "", head, text[first.end :], "", ""
    else:
        between, tail = text[first.end : second.name], text[second.end :]
        opening = _common_end(head, between)
        closing = _common_start(between[: len(between) - len(opening)], tail)
        before, separator, after = head[: len(head) - len(opening)], between[len(closing) : -len(opening)], tail[len(closing) :]
    if not opening.strip() or PROBES[0]["function"]["name"] in middle:
        return None
    found = CallFormat(
        re.compile(rf"{_optional(before)}{_pattern(opening)}\s*{NAME}\s*{_pattern(middle)}\s*"),
        re.compile(rf"\s*{_closing(closing)}\s*{_optional(separator, after)}"),
        None if first.argument is None else re.compile(first.argument, re.DOTALL),
        first.quoted,
    )
    return found if _reads_back(tokenizer, found, end) else None


def _reads_back(tokenizer: PreTrainedTokenizerBase, call_format: CallFormat, end: str) -> bool:
    """Whether the format reads a call right after the prompt. Some templates begin a new message for each call."""
    prompt = rendered(tokenizer, [ASKED], TOOLS)
    whole = rendered(tokenizer, [ASKED, message(ASSISTANT, "") | {"tool_calls": PROBES[:1]}], TOOLS, prompt=False)
    common = _common_start(prompt, whole)  # a prompt may end with the beginning of thoughts, which past turns lose
    start = common.rfind("<") if common.rfind("<") > common.rfind(">") else len(common)
    _, calls = call_format.read(whole[start:].removesuffix(end), TOOLS)
    return [call["function"] for call in calls or ()] == [PROBES[0]["function"]]


def _written(tokenizer: PreTrainedTokenizerBase, calls: Sequence[Call]) -> str:
    """The calls as the template writes them, after a reply's text where it writes one; empty if it refuses them."""
    text = ""
    try:
        whole = rendered(tokenizer, [ASKED, message(ASSISTANT, CONTENT) | {"tool_calls": list(calls)}], TOOLS, prompt=False)
        if CONTENT in whole:
            text = whole.rpartition(CONTENT)[2]
        else:
            prompt = rendered(tokenizer, [ASKED], TOOLS)
            text = whole.removeprefix(prompt) if whole.startswith(prompt) else ""
    except UserError:
        return ""
    for call in calls:
        text = text.replace(call["id"], ID)
    return text


def _place(text: str, call: Call, at: int) -> _Place | None:
    function = call["function"]
    if (name := text.find(function["name"], at)) < 0:
        return None
    name_end = name + len(function["name"])
    for opened in re.finditer(r'[{"]', text[name_end:]):
        start = name_end + opened.start()
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            continue
        if function["arguments"] in (value, unpacked(value)):
            return _Place(name, name_end, start, end, quoted=isinstance(value, str))
    return _pairs(text, list(function["arguments"].items()), name, name_end)


def _pairs(text: str, arguments: list[tuple[str, str]], name: int, name_end: int) -> _Place | None:
    """The place of a call whose arguments are marked one by one."""
    edges, at = list[int](), name_end
    for part in (part for pair in arguments for part in pair):
        if (start := text.find(part, at)) < 0:
            return None
        at = start + len(part)
        edges += [start, at]
    key, key_end, value, value_end, next_key, _, _, last = edges
    before = _common_end(text[name_end:key], text[value_end:next_key])
    after = text[value_end : next_key - len(before)]
    if not after.strip() or not before.strip() or not text.startswith(after, last):
        return None
    pattern = rf"{_pattern(before)}(?P<key>[^\s<>]+?){re.escape(text[key_end:value])}(?P<value>.*?){re.escape(after)}"
    return _Place(name, name_end, key - len(before), last + len(after), rf"\s*{pattern}")


def _common_start(a: str, b: str) -> str:
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def _common_end(a: str, b: str) -> str:
    return _common_start(a[::-1], b[::-1])[::-1]


def _pattern(literal: str) -> str:
    """The literal with any blanks between its words and JSON's signs."""
    pieces = re.findall(r"[{}\[\],:]|[^\s{}\[\],:]+", literal)
    return r"\s*".join(re.escape(piece).replace(re.escape(ID), r"[\w:.-]*") for piece in pieces)


def _optional(*literals: str) -> str:
    """One of them with the blanks after it, or nothing."""
    patterns = "|".join(_pattern(literal) for literal in literals if literal.strip())
    return rf"(?:(?:{patterns})\s*)?" if patterns else ""


def _closing(literal: str) -> str:
    """The pattern of a closing, in which a call's id may be left out."""
    if ID not in literal:
        return _pattern(literal)
    up_to_id, _, rest = literal.rpartition(ID)
    quote = rest[: len(rest) - len(rest.lstrip("\"'"))]
    return rf"(?:{_pattern(up_to_id + ID + quote)})?\s*{_pattern(rest[len(quote) :])}"
