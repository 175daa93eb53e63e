"""Checks growing text against the grammar of JSON (RFC 8259), with llguidance: can the text still become one whole value?

Blanks may surround the value, and so may a ``` fence with or without a language's name.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

TICKS = "```"
BLANKS = " \t\n\r"
GRAMMAR = r"""
value: object | array | STRING | NUMBER | "true" | "false" | "null"
object: "{" WS? (member ("," WS? member)*)? "}"
member: STRING WS? ":" WS? value WS?
array: "[" WS? (element ("," WS? element)*)? "]"
element: value WS?
STRING: /"([^"\\\x00-\x1f]|\\(["\\\/bfnrt]|u[0-9a-fA-F]{4}))*"/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
WS: /[ \t\n\r]+/
"""
BARE = "start: WS? value WS?" + GRAMMAR
FENCED = (
    r"""start: WS? value WS? | WS? "```" NAME? "\n" WS? value WS? "```" WS?
NAME: /[\p{L}\p{N} \r_+.\-]+/"""
    + GRAMMAR
)


class JsonText:
    """One text that grows. fence: whether a ``` fence may surround the value; its name, if any, ends with the line."""

    def __init__(self, fence: bool = True) -> None:
        self._matcher, self._text, self._broken = _start(fence).deep_copy(), "", False

    def feed(self, text: str) -> int | None:
        """Append `text`. Returns the index of the first character with which the text can no longer become JSON, or None.

        Raises RuntimeError when the text exceeds a limit of llguidance.
        """
        if self._broken or not text:
            return 0 if self._broken and text else None
        content = text.encode("utf-8", "surrogatepass")
        accepted = self._matcher.try_consume_tokens(list(content))
        if self._matcher.is_error():
            raise RuntimeError(f"llguidance cannot read this JSON text: {self._matcher.get_error()}")
        self._text += text
        self._broken = accepted < len(content)
        return len(content[:accepted].decode(errors="ignore")) if self._broken else None

    @property
    def complete(self) -> bool:
        """Whether the text is one whole value and nothing is left to close."""
        return not self._broken and bool(self._matcher.is_accepting())

    @property
    def value(self) -> str:
        """The value without the fence and the blanks around it, once the text is complete."""
        text = self._text.strip(BLANKS)
        return text.partition("\n")[2].removesuffix(TICKS).strip(BLANKS) if text.startswith(TICKS) else text


@cache
def _start(fence: bool) -> LLMatcher:
    """A matcher at the beginning of a text; to be copied."""
    from llguidance import LLMatcher, LLTokenizer  # only here: the GPU suites run without it

    matcher = LLMatcher(LLTokenizer("byte"), FENCED if fence else BARE)
    assert not matcher.is_error(), matcher.get_error()
    return matcher
