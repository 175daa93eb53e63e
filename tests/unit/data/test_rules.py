"""What each rule finds, and what it costs."""

from __future__ import annotations

import pytest

from drafttrain.data.reply_text import Reply, judge

PROSE = "The parser reads one line, then the next. It keeps what it has seen in a list, and gives that list back at the end."


FAULTS: list[tuple[str, str, set[str]]] = [
    (PROSE, "stop", set()),
    (PROSE, "length", {"truncated"}),
    (PROSE, "content_filter", {"truncated"}),
    (" \n", "stop", {"empty"}),
    ("I see. " + "It is so. " * 15, "length", {"truncated", "loop"}),
    (PROSE * 3, "stop", {"loop"}),
    ("不知道。" * 40, "stop", {"loop"}),
    ("very " * 12 + "long", "stop", set()),
    ("-" * 60, "stop", set()),  # a ruler
    ("It is so. " * 15 + PROSE, "stop", set()),  # it found its way out
    ("I'm sorry, but I can't help with that.", "stop", {"refusal"}),
    ("I’m really sorry, but as an AI language model I have no body.", "stop", {"refusal"}),
    ("Unfortunately, I cannot assist with this request.", "stop", {"refusal"}),
    ("I am unable to provide that.", "stop", {"refusal"}),
    ("I'm sorry to hear that your dog is ill. See a vet.", "stop", set()),
    ("I cannot overstate how useful this is.", "stop", set()),
    (PROSE * 2 + " " + "x" * 60 + " She said: I can't help you.", "stop", set()),  # a story, not an opening
]


def test_judge_reply_gets_expected_faults(subtests: pytest.Subtests) -> None:
    for text, finish, found in FAULTS:
        with subtests.test(text=text, finish=finish):
            assert judge([Reply(text, finish)], []).found == found


def test_judge_conversation_is_kept_up_to_first_fault() -> None:
    replies = [Reply(PROSE, "stop"), Reply("I cannot assist with that.", "stop"), Reply("", "stop")]
    assert (judge(replies, []).kept, judge(replies, []).fault) == (3, None)
    dropped = judge(replies, ["empty", "refusal"])
    assert (dropped.kept, dropped.fault, dropped.found) == (1, "refusal", {"refusal", "empty"})
    assert judge(replies, ["empty"]).kept == 2
    assert judge(replies[1:], ["refusal"]).kept == 0
