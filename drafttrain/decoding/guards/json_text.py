"""JSON text as it grows, character by character (RFC 8259): can it still become one whole value?

Around the value there may be blanks, and a ``` fence with or without a language's name.
"""

from __future__ import annotations

BLANKS = " \t\n\r"
TICKS = "```"
DIGITS, HEX = "0123456789", "0123456789abcdefABCDEF"
ESCAPES = '"\\/bfnrt'
NAMED = " \n\r-_+."  # in the line that opens a fence, besides letters and digits
WORDS = {"t": "rue", "f": "alse", "n": "ull"}
CLOSING = {"{": "}", "[": "]"}
WHOLE = ("zero", "integer", "fraction", "exponent")  # states in which a number may end

# state -> (characters, state after one of them), ...: numbers, and the escapes of strings
STEPS: dict[str, tuple[tuple[str, str], ...]] = {
    "minus": (("0", "zero"), ("123456789", "integer")),
    "zero": ((".", "point"), ("eE", "e")),
    "integer": ((DIGITS, "integer"), (".", "point"), ("eE", "e")),
    "point": ((DIGITS, "fraction"),),
    "fraction": ((DIGITS, "fraction"), ("eE", "e")),
    "e": (("+-", "sign"), (DIGITS, "exponent")),
    "sign": ((DIGITS, "exponent"),),
    "exponent": ((DIGITS, "exponent"),),
    "escape": ((ESCAPES, "string"), ("u", "hex1")),
    "hex1": ((HEX, "hex2"),),
    "hex2": ((HEX, "hex3"),),
    "hex3": ((HEX, "hex4"),),
    "hex4": ((HEX, "string"),),
}


class JsonText:
    """A pushdown automaton. `feed` takes the new characters; `complete` is true once the text is a whole value.

    fence: a ``` fence may enclose the value. Its name, if any, ends with the line. value: the value's own text so far.
    """

    def __init__(self, fence: bool = True) -> None:
        self.value = ""
        self._fence, self._fenced, self._broken = fence, False, False
        self._state, self._left = "before", ""  # _left: what must follow, of a word or of ticks
        self._open: list[str] = []
        self._is_key = False  # the string that is open, or was last
        self._takers = {
            "before": self._before,
            "ticks": self._ticks,
            "name": self._name,
            "value": self._value,
            "first": self._first,
            "key": self._key,
            "next key": self._key,
            "colon": self._colon,
            "after": self._after,
            "string": self._string,
            "word": self._word,
            "end": self._end,
        }

    def feed(self, text: str) -> int | None:
        """The number of characters of `text` before the first with which nothing can become JSON; None: all are well."""
        for number, character in enumerate(text):
            if self._broken or not self._takes(character):
                self._broken = True
                return number
        return None

    @property
    def complete(self) -> bool:
        ended = self._state == "end" or (self._state in WHOLE and not self._open)
        return ended and not (self._broken or self._fenced or self._left)

    def _takes(self, character: str) -> bool:
        """Go on by one character; False where there is no way on."""
        if self._state in STEPS:
            follows = next((state for some, state in STEPS[self._state] if character in some), None)
            if follows is not None:
                return self._to(follows, character)
            if self._state not in WHOLE:
                return False
            self._whole()
        return self._takers[self._state](character)

    def _to(self, state: str, character: str) -> bool:
        self._state = state
        self.value += character
        return True

    def _whole(self) -> None:
        """A value has ended."""
        self._state = "after" if self._open else "end"

    def _before(self, character: str) -> bool:
        if character == "`" and self._fence:
            self._state, self._left, self._fenced = "ticks", TICKS[1:], True
            return True
        return self._value(character)

    def _ticks(self, character: str) -> bool:
        self._left = self._left[1:]
        self._state = "ticks" if self._left else "name"
        return character == "`"

    def _name(self, character: str) -> bool:
        if character == "\n":
            self._state = "value"
        return character.isalnum() or character in NAMED

    def _value(self, character: str) -> bool:
        """A value's first character, or blanks before it."""
        if character in CLOSING:
            self._open.append(CLOSING[character])
            return self._to("key" if character == "{" else "first", character)
        if character == '"':
            self._is_key = False
            return self._to("string", character)
        if character in WORDS:
            self._left = WORDS[character]
            return self._to("word", character)
        number = {"-": "minus", "0": "zero"}.get(character) or ("integer" if character in DIGITS else "")
        return self._to(number, character) if number else self._blank(character)

    def _blank(self, character: str) -> bool:
        return character in BLANKS and self._to(self._state, character if self._open else "")

    def _first(self, character: str) -> bool:
        """Behind `[`."""
        if character == "]":
            return self._shut(character)
        return self._blank(character) or self._value(character)

    def _key(self, character: str) -> bool:
        """After `{`, where `}` may follow, or after a comma inside it."""
        if character == '"':
            self._is_key = True
            return self._to("string", character)
        return self._blank(character) or (character == "}" and self._state == "key" and self._shut(character))

    def _colon(self, character: str) -> bool:
        return self._to("value", character) if character == ":" else self._blank(character)

    def _after(self, character: str) -> bool:
        if character == ",":
            return self._to("next key" if self._open[-1] == "}" else "value", character)
        return self._blank(character) or (character == self._open[-1] and self._shut(character))

    def _shut(self, character: str) -> bool:
        self._open.pop()
        self.value += character
        self._whole()
        return True

    def _string(self, character: str) -> bool:
        if character == "\\":
            return self._to("escape", character)
        if character != '"':
            return character >= " " and self._to("string", character)
        self.value += character
        if self._is_key:
            self._state = "colon"
        else:
            self._whole()
        return True

    def _word(self, character: str) -> bool:
        right, self._left = character == self._left[0], self._left[1:]
        self.value += character
        if not self._left:
            self._whole()
        return right

    def _end(self, character: str) -> bool:
        """Behind the value: blanks, and the fence where one is open."""
        if self._left or (character == "`" and self._fenced):
            self._left = (self._left or TICKS)[1:]
            self._fenced = bool(self._left)
            return character == "`"
        return character in BLANKS
