"""Records of every form, as they come from OpenAI, ShareGPT, Alpaca, MT-bench and tables."""

from __future__ import annotations

from typing import Any

import pytest

from drafttrain.core.errors import UserError
from drafttrain.data.forms import FORMS, Conversation, conversation

HI, YES = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
CALLED = CALL | {"function": {"name": "f", "arguments": {"x": [1]}}}
TOOL = {"type": "function", "function": {"name": "f"}}


READ: list[tuple[dict[str, Any], str, tuple[dict[str, Any], ...]]] = [
    ({"instruction": "hi", "input": "", "output": "yes"}, "alpaca", (HI, YES)),
    ({"instruction": "a", "input": "b", "output": "yes"}, "alpaca", ({"role": "user", "content": "a\n\nb"}, YES)),
    ({"prompt": "hi", "completion": "yes"}, "prompt", (HI, YES)),
    ({"input": "hi", "output": "yes", "domain": "generic"}, "input", (HI, YES)),
    (
        {"input": [{"role": "system", "content": "s"}, HI], "output": "yes"},
        "input",
        ({"role": "system", "content": "s"}, HI, YES),
    ),
    ({"conversations": [HI, YES]}, "conversations", (HI, YES)),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, YES]}, "messages", (HI, YES)),
    ({"system": "s", "prompt": "hi", "response": "yes"}, "prompt", ({"role": "system", "content": "s"}, HI, YES)),
    ({"messages": [HI, YES | {"thinking": "hm"}]}, "messages", (HI, YES | {"reasoning_content": "hm"})),
    (
        {
            "messages": [
                HI,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "name": "f", "content": "2"},
            ]
        },
        "messages",
        (HI, {"role": "assistant", "content": "", "tool_calls": [CALLED]}, {"role": "tool", "content": "2", "name": "f"}),
    ),
    (
        {
            "conversations": [
                {"from": "human", "value": "hi"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
            ]
        },
        "conversations",
        (
            HI,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
            },
        ),
    ),
]


def test_record_form_is_detected_and_converted_to_messages(subtests: pytest.Subtests) -> None:
    for record, form, messages in READ:
        with subtests.test(record=record):
            found = conversation("x:1", record)
            assert (found, found.form) == (Conversation("x:1", messages), form)
            assert conversation("x:1", record, form) == found


def test_record_tools_become_function_schemas(subtests: pytest.Subtests) -> None:
    for tools in ([TOOL], [TOOL["function"]], '[{"name": "f"}]'):
        with subtests.test(tools=tools):
            assert conversation("x:1", {"messages": [HI, YES], "tools": tools}).tools == (TOOL,)


ASKING: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"question_id": 1, "turns": ["hi", "more"]}, "turns", ["hi", "more"]),
    ({"question": "2 + 2?", "answer": "#### 4"}, "question", ["2 + 2?"]),
    ({"prompt": "2 + 2?", "test": "assert"}, "question", ["2 + 2?"]),
]


def test_record_turns_without_replies_is_refused_for_training(subtests: pytest.Subtests) -> None:
    for record, form, turns in ASKING:
        with subtests.test(record=record):
            asked = conversation("x:1", record, replies=False)
            assert asked.messages == tuple({"role": "user", "content": turn} for turn in turns) and asked.form == form
            says = r"^x:1: expected an assistant turn to learn from, got user.*; write them with drafttrain prepare"
            with pytest.raises(UserError, match=says):
                conversation("x:1", record)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"text": "a"}, "messages", r"expected `messages` \(data.form=messages\), got text; correct data.form"),
    ({"turns": "hi"}, "auto", "expected a list in `turns`, got str"),
    (
        {"messages": [HI | {"content": [{"type": "image_url"}]}, YES]},
        "auto",
        "expected a path or base64 in the image of .*, got nothing",
    ),
    ({"messages": [HI | {"content": [{"type": "audio"}]}, YES]}, "auto", "expected text and image parts in .*, got audio"),
    ({"messages": [HI, YES], "tools": "f"}, "auto", "expected a list of JSON schemas in `tools`, got 'f'"),
    (
        {"messages": [HI, {"role": "assistant", "tool_calls": [{"x": 1}]}]},
        "auto",
        "expected tool calls with a function's name",
    ),
]


def test_record_malformed_is_refused_in_one_line(subtests: pytest.Subtests) -> None:
    for record, form, says in WRONG:
        with subtests.test(record=record):
            with pytest.raises(UserError, match=rf"^x:1: {says}") as caught:
                conversation("x:1", record, form, replies=False)
            assert "\n" not in str(caught.value)


def test_record_with_several_forms_follows_named_form() -> None:
    record = {"messages": [HI, YES], "text": "hi yes"}
    assert conversation("x:1", record).messages == (HI, YES)
    assert conversation("x:1", record, "text").text == "hi yes"
    assert list(FORMS) == ["messages", "conversations", "prompt", "alpaca", "input", "turns", "text", "question"]


def test_record_deeply_nested_tools_and_calls_are_refused(subtests: pytest.Subtests) -> None:
    for deep in ("[" * 9000 + "]" * 9000, '{"a":' * 9000 + "1" + "}" * 9000):
        with subtests.test(begins=deep[:5]):
            with pytest.raises(UserError, match=r"x:1: expected tool calls .* got"):
                conversation("x:1", {"messages": [HI, {"role": "assistant", "tool_calls": deep}]})
            with pytest.raises(UserError, match="x:1: expected a list of JSON schemas"):
                conversation("x:1", {"messages": [HI, YES], "tools": deep})


def test_record_unpaired_surrogate_is_refused(subtests: pytest.Subtests) -> None:
    for record in (
        {"prompt": "hi", "response": "a\udfff"},
        {"system": "a\udfff", "prompt": "hi", "response": "yes"},
        {"messages": [HI | {"content": "\ud800"}, YES]},
    ):
        with subtests.test(keys=list(record)), pytest.raises(UserError, match=r"x:1: expected Unicode text in .*unpaired"):
            conversation("x:1", record)
