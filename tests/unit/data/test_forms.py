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
NO, MORE = {"role": "assistant", "content": "no"}, {"role": "user", "content": "more"}
LEGACY = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": [1]}'}}
FIELDS: list[tuple[dict[str, Any], str, tuple[dict[str, Any], ...]]] = [
    # LMSYS-Chat-1M and WildChat
    ({"conversation": [HI, YES], "model": "m", "turn": 1, "redacted": False}, "conversations", (HI, YES)),
    ({"conversation": [{"human": "hi", "assistant": "yes"}]}, "conversations", (HI, YES)),
    # TRL's prompt and completion: a reply in the prompt is not learnt
    ({"prompt": [HI], "completion": [YES]}, "prompt", (HI, YES)),
    ({"prompt": [HI, NO, MORE], "completion": [YES]}, "prompt", (HI, NO | {"learn": False}, MORE, YES)),
    ({"prompt": [HI], "completion": "yes"}, "prompt", (HI, YES)),
    # ms-swift and LLaMA-Factory
    ({"query": "more", "response": "yes", "history": [["hi", "no"]]}, "query", (HI, NO, MORE, YES)),
    ({"instruction": "more", "output": "yes", "history": [["hi", "no"]]}, "alpaca", (HI, NO, MORE, YES)),
    ({"instruction": "hi", "response": "yes"}, "alpaca", (HI, YES)),
    ({"messages": [{"role": "human", "content": "hi"}, {"role": "gpt", "content": "yes"}]}, "messages", (HI, YES)),
    ({"messages": [{"from": "human", "value": "hi"}, {"from": "Assistant", "value": "yes"}]}, "messages", (HI, YES)),
    ({"messages": '[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]'}, "messages", (HI, YES)),
    # OpenAI before tool_calls
    (
        {"messages": [HI, LEGACY, {"role": "function", "name": "f", "content": "2"}, YES]},
        "messages",
        (
            HI,
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALLED["function"]}]},
            {"role": "tool", "name": "f", "content": "2"},
            YES,
        ),
    ),
    # a reply of reasoning alone
    (
        {"messages": [HI, {"role": "assistant", "content": None, "reasoning_content": "hm"}]},
        "messages",
        (HI, {"role": "assistant", "content": "", "reasoning_content": "hm"}),
    ),
]
READ += FIELDS


def test_record_form_is_detected_and_converted_to_messages(subtests: pytest.Subtests) -> None:
    for record, form, messages in READ:
        with subtests.test(record=record):
            found = conversation("x:1", record)
            assert (found, found.form) == (Conversation("x:1", messages), form)
            assert conversation("x:1", record, form) == found


def test_record_tool_call_without_arguments_has_an_empty_object(subtests: pytest.Subtests) -> None:
    for arguments in ({"arguments": text} for text in ("null", "", " ", None, "{}", {})):
        call = {"type": "function", "function": {"name": "f", **arguments}}
        with subtests.test(arguments=arguments):
            found = conversation("x:1", {"messages": [HI, {"role": "assistant", "tool_calls": [call]}]})
            assert found.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert "tool_calls" not in conversation("x:1", {"messages": [HI, YES | {"tool_calls": "[]"}]}).messages[1]


IDS: list[tuple[dict[str, Any], tuple[int, ...], list[int]]] = [
    ({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, (5, 6, 7), [0, 1, 1]),
    ({"input_ids": [[5, 6, 7]], "loss_mask": [[0, 0, 1]]}, (5, 6, 7), [0, 0, 1]),  # as speculators and SpecForge save it
    ({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, (5, 6, 7), [0, 1, 1]),
    ({"input_ids": [5, 6, 7], "assistant_masks": [0, 1, 1], "completion_mask": [0, 0, 1]}, (5, 6, 7), [0, 0, 1]),  # TRL
    ({"input_ids": [5, 6, 0, 0], "labels": [-100, 6, -100, -100], "attention_mask": [1, 1, 0, 0]}, (5, 6), [0, 1]),
    ({"input_ids": [5, 6], "loss_mask": [0.0, 1.0]}, (5, 6), [0, 1]),
    ({"input_ids": [5, 6], "loss_mask": [False, True], "text": "a b"}, (5, 6), [0, 1]),
]


def test_record_of_token_ids_keeps_them_and_their_mask(subtests: pytest.Subtests) -> None:
    for record, ids, mask in IDS:
        with subtests.test(record=record):
            found = conversation("x:1", record)
            (text,) = found.tokens
            assert (tuple(text.ids), text.mask.tolist(), found.form) == (ids, [bool(value) for value in mask], "input_ids")


def test_record_tools_become_function_schemas(subtests: pytest.Subtests) -> None:
    for tools in ([TOOL], [TOOL["function"]], '[{"name": "f"}]'):
        with subtests.test(tools=tools):
            assert conversation("x:1", {"messages": [HI, YES], "tools": tools}).tools == (TOOL,)


ASKING: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"question_id": 1, "turns": ["hi", "more"]}, "turns", ["hi", "more"]),
    ({"question": "2 + 2?", "answer": "#### 4"}, "question", ["2 + 2?"]),
    ({"prompt": "2 + 2?", "test": "assert"}, "question", ["2 + 2?"]),
    ({"prompt": [HI]}, "question", ["hi"]),
    ({"turns": [HI]}, "turns", ["hi"]),
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
    ({"segments": [{"text": "a", "label": False}]}, "auto", "expected a part to learn in `segments`, got none"),
    ({"segments": [{"text": "a"}]}, "auto", "expected objects with text and label, true or false, in `segments`"),
    ({"input_ids": [1, 2]}, "auto", "expected .*`input_ids` with `loss_mask` or .*, got input_ids"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "auto", "expected 2 values in `loss_mask`, one for each token, got 1"),
    ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "auto", "expected supervised tokens, got a mask that selects none"),
    ({"input_ids": [1, 2], "labels": [2, -100]}, "auto", "expected -100 or the token's own id in `labels`.*do not shift them"),
    (
        {"input_ids": [1, -2], "loss_mask": [0, 1]},
        "auto",
        "expected a list of whole numbers from 0 to 2147483647 in `input_ids`",
    ),
    ({"query": "hi", "response": "yes", "history": ["a"]}, "auto", r"expected \[question, reply\] entries in `history`"),
    ({"messages": [HI, YES], "tools": "f"}, "auto", "expected a list of JSON schemas in `tools`, got 'f'"),
    ({"messages": [HI, YES], "chat_template_kwargs": "f"}, "auto", "expected an object in `chat_template_kwargs`"),
    (
        {"messages": [HI, YES], "chat_template_kwargs": {"chat_template": "x"}},
        "auto",
        "expected an object in `chat_template_kwargs`, without tools, .* got {'chat_template': 'x'}",
    ),
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
    both = {"messages": [HI, YES], "input_ids": [1, 2], "loss_mask": [0, 1]}
    with pytest.raises(UserError, match=r"got messages and token ids .*; set data\.form=messages or data\.form=input_ids"):
        conversation("x:1", both)
    assert conversation("x:1", both, "messages").messages and conversation("x:1", both, "input_ids").tokens
    order = ["messages", "conversations", "prompt", "alpaca", "input", "query", "turns"]
    order += ["input_ids", "segments", "text", "question"]
    assert list(FORMS) == order


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


LEFT_OUT: list[dict[str, Any]] = [
    {"weight": 0},  # OpenAI
    {"loss": False},  # ms-swift, XTuner
    {"train": False},  # axolotl
    {"train": False, "train_detail": [{"begin_offset": 0, "end_offset": 2, "train": True}]},
    {"train_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}]},
    {"loss_mask": 0},
    {"masked": True},  # torchtune
]
LEARNT: list[dict[str, Any]] = [{"weight": 1}, {"loss": True}, {"train": 1.0}, {"masked": False}, {"weight": None}]


def test_record_turn_not_to_be_learnt_is_told_apart(subtests: pytest.Subtests) -> None:
    for fields in (*LEFT_OUT, *LEARNT):
        for record in (
            {"messages": [HI, YES | fields, HI | {"weight": 0}, YES]},
            {"conversations": [HI, {"from": "gpt", "value": "yes"} | fields, HI, YES]},
        ):
            with subtests.test(record=record):
                found = conversation("x:1", record)
                assert [found.learnt(turn) for turn in (1, 3)] == [fields in LEARNT, True]
                assert found.messages[3] == YES


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [HI, YES | {"weight": 0}]}, "expected an assistant turn to learn from, got none but those to be left out"),
    ({"messages": [HI, YES | {"weight": 0.5}]}, r"expected 0 or 1, true or false in messages\[1\].weight, got 0.5"),
    ({"messages": [HI, YES | {"loss": "no"}]}, r"expected 0 or 1, true or false in messages\[1\].loss, got 'no'"),
    ({"messages": [HI | {"train": True}, YES]}, r"messages\[0\] asks to learn a turn of user"),
    ({"messages": [HI, YES | {"mask": 1}]}, "`mask` in .* may mean learnt or left out"),
    ({"messages": [HI, YES | {"train_detail": [{"train": True}]}]}, "train_detail selects parts of a reply"),
    ({"messages": [HI, YES], "roles_to_train": ["human", "gpt"]}, r'expected \["assistant"\] in roles_to_train'),
    ({"messages": [HI, YES], "roles_to_train": []}, r'expected \["assistant"\] in roles_to_train'),
    ({"prompt": "hi", "completion": "yes", "label": False}, "`label` is false"),
    ({"conversations": [HI, YES], "kto_tag": False}, "`kto_tag` is false"),
]


def test_record_asking_to_learn_what_cannot_be_is_refused(subtests: pytest.Subtests) -> None:
    for record, says in REFUSED:
        with subtests.test(record=record), pytest.raises(UserError, match=rf"^x:1: .*{says}") as caught:
            conversation("x:1", record)
        assert "\n" not in str(caught.value)
