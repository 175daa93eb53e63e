"""The JSON automaton agrees with Python's own parser, on whole texts and on what can still become one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.decoding.guards.json_text import JsonText

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def parses(text: str) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


def read(text: str, fence: bool = True) -> tuple[int | None, bool]:
    checker = JsonText(fence)
    return checker.feed(text), checker.complete


@settings(max_examples=50)
@given(VALUES, st.sampled_from([None, 1]), st.booleans(), st.data())
def test_json_text_accepts_every_prefix_of_valid_json(
    value: object, indent: int | None, ascii_only: bool, data: st.DataObject
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert read(f" {text}\n") == (None, True)
    assert read(f"```json\n{text}\n```\n") == (None, True)
    assert read(text[: data.draw(st.integers(0, len(text)))])[0] is None
    whole = JsonText()
    whole.feed(f"```\n {text} \n```")
    assert json.loads(whole.value) == value


@given(st.text(alphabet='{}[]",:0123456789-+.eEtrufalsn\\ \n', max_size=12))
def test_json_text_completes_exactly_for_parsable_strings(text: str) -> None:
    fault, complete = read(text, fence=False)
    assert (fault is None and complete) == parses(text)


@given(VALUES, st.sampled_from('{}[]",:01-.eatx`\\ \x01'), st.data())
def test_json_text_stray_character_fault_is_not_before_its_position(value: object, stray: str, data: st.DataObject) -> None:
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text)))
    fault, complete = read(text[:at] + stray + text[at:], fence=False)
    assert complete == parses(text[:at] + stray + text[at:])
    assert fault is None or fault >= at


PLACES = [
    # text, place of its fault, whether it is complete
    ("Here is", 0, False),
    ('{"a": 1} Here', 9, False),
    ('{"a" 1}', 5, False),
    ("{'a': 1}", 1, False),
    ("[1,]", 3, False),
    ('{"a": 1,}', 8, False),
    ("[1}", 2, False),
    ('{"a": NaN}', 6, False),
    ('"a\nb"', 2, False),
    ('"\\x"', 2, False),
    ("01", 1, False),
    ("12", None, True),
    ("1.", None, False),
    ("tru", None, False),
    ("trux", 3, False),
    ("", None, False),
    ("``", None, False),
    ("``a", 2, False),
    ("```json\n[1]", None, False),
    ("```json\n[1]\n``", None, False),
    ("```json\n[1]\n```\n", None, True),
    ("```json\n[1]\n``` x", 16, False),
    ("[1]```", 3, False),
    ("```json [1]", 8, False),
]


def test_json_text_names_place_of_fault_and_whether_complete(subtests: pytest.Subtests) -> None:
    for text, fault, complete in PLACES:
        with subtests.test(text=text):
            assert read(text) == (fault, complete)


def test_json_text_respects_fence_option_and_chunked_input() -> None:
    assert read("```json\n1\n```", fence=False) == (0, False)
    checker = JsonText()
    assert [checker.feed(part) for part in ('{"', 'a":', " [tr", "ue", ", 1", "2]", "}")] == [None] * 7 and checker.complete
    assert checker.feed("\n") is None and checker.feed("x") == 0 and not checker.complete and checker.feed(" ") == 0
