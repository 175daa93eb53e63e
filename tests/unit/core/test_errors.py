"""What others wrote reaches a terminal in one printable line."""

from __future__ import annotations

from drafttrain.core.errors import UserError, one_line, printable


def test_printable_escapes_control_characters() -> None:
    assert printable("a\x1b[2J\x07\x9b\u202eb\n\tc") == "a\\x1b[2J\\x07\\x9b\\u202eb\n\tc"
    assert printable("Grüße, 世界 🤷🏽‍♀️") == "Grüße, 世界 🤷🏽‍♀️"
    assert printable("\ud800") == "\\ud800"


def test_user_error_message_is_one_line_of_bounded_length() -> None:
    assert str(UserError("a\n b\x1b]0;x\x07")) == "a b\\x1b]0;x\\x07"
    shown = one_line("begins " + "x" * 10**6 + " set this")
    assert len(shown) < 2000 and shown.startswith("begins ") and shown.endswith("set this")
