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


@pytest.mark.parametrize(
    ("record", "form", "messages"),
    [
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
    ],
)
def test_forms(record: dict[str, Any], form: str, messages: tuple[dict[str, Any], ...]) -> None:
    found = conversation("x:1", record)
    assert (found, found.form) == (Conversation("x:1", messages), form)
    assert conversation("x:1", record, form) == found


@pytest.mark.parametrize("tools", [[TOOL], [TOOL["function"]], '[{"name": "f"}]'])
def test_tools_become_schemas(tools: Any) -> None:
    assert conversation("x:1", {"messages": [HI, YES], "tools": tools}).tools == (TOOL,)


def test_prompts_without_replies_are_for_answering_only() -> None:
    record = {"question_id": 1, "turns": ["hi", "more"]}
    with pytest.raises(
        UserError, match=r"^x:1: expected an assistant turn to learn from.*; write them with drafttrain prepare"
    ):
        conversation("x:1", record)
    assert conversation("x:1", record, replies=False).messages == (HI, {"role": "user", "content": "more"})


@pytest.mark.parametrize(
    ("record", "form", "says"),
    [
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
    ],
)
def test_what_is_wrong_is_one_line(record: dict[str, Any], form: str, says: str) -> None:
    with pytest.raises(UserError, match=rf"^x:1: {says}") as caught:
        conversation("x:1", record, form, replies=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("record", [{"question": "2 + 2?", "answer": "#### 4"}, {"prompt": "2 + 2?", "test": "assert"}])
def test_questions_are_only_good_to_be_answered(record: dict[str, Any]) -> None:
    asked = conversation("x:1", record, replies=False)
    assert asked.messages == ({"role": "user", "content": "2 + 2?"},) and asked.form == "question"
    with pytest.raises(UserError, match=r"^x:1: expected an assistant turn to learn from, got user; write them"):
        conversation("x:1", record)


def test_a_named_form_is_taken_where_several_are_there() -> None:
    record = {"messages": [HI, YES], "text": "hi yes"}
    assert conversation("x:1", record).messages == (HI, YES)
    assert conversation("x:1", record, "text").text == "hi yes"
    assert list(FORMS) == ["messages", "conversations", "prompt", "alpaca", "input", "turns", "text", "question"]


@pytest.mark.parametrize("deep", ["[" * 9000 + "]" * 9000, '{"a":' * 9000 + "1" + "}" * 9000])
def test_calls_and_tools_that_are_nested_too_deeply(deep: str) -> None:
    with pytest.raises(UserError, match=r"x:1: expected tool calls .* got"):
        conversation("x:1", {"messages": [HI, {"role": "assistant", "tool_calls": deep}]})
    with pytest.raises(UserError, match="x:1: expected a list of JSON schemas"):
        conversation("x:1", {"messages": [HI, YES], "tools": deep})


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "hi", "response": "a\udfff"},
        {"system": "a\udfff", "prompt": "hi", "response": "yes"},
        {"messages": [HI | {"content": "\ud800"}, YES]},
    ],
)
def test_a_lone_surrogate_is_named(record: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"x:1: expected Unicode text in .*unpaired surrogate"):
        conversation("x:1", record)
