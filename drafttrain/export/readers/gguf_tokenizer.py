"""llama.cpp's tokenizer of a GGUF file, read and tried: byte-level BPE, the only kind that is written here."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import regex

from drafttrain.export.readers.parts import Config, MismatchError, TargetParts

# the expressions by which llama.cpp splits a text for each pre-tokenizer's name, in order
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SHORT = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
LINES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
THREE = SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + LINES
ONE = SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + LINES
MARKS = SHORT + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ENDING = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"
CASED = r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))%s((?=[\p{L}])([^A-Z]))%s" + ENDING
O200K = CASED % ("*", "+") + "|" + CASED % ("+", "*") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CUTS = {
    "gpt-2": [WORDS],
    "smollm": [r"\p{N}", WORDS],
    "llama-bpe": [THREE],
    "smaug-bpe": [THREE],
    "qwen2": [ONE],
    "qwen35": [MARKS],
    "gpt-4o": [O200K],
}
UNMARKED = ("gpt-4o",)  # names whose expression, unlike that of the tokenizers, ends a word before a combining mark
WHOLE = ("llama-bpe",)  # names for which a word that is a piece is used without merging
MARK = regex.compile(r"\p{M}")
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


def check_tokenizer(config: Config, target: TargetParts) -> None:
    """Raises MismatchError unless the file's tokenizer has the target's pieces and makes the same tokens from texts."""
    tokens = config.get("tokenizer.ggml.tokens", "tokenizer")
    config.expect("tokenizer.ggml.model", "gpt2", "tokenizer")
    pre = config.get("tokenizer.ggml.pre", "tokenizer")
    config.get("tokenizer.ggml.eos_token_id", "tokenizer")
    if pre not in CUTS:
        raise MismatchError("tokenizer", f"tokenizer.ggml.pre is {pre!r}; the reader knows {', '.join(CUTS)}")
    kinds = config.get("tokenizer.ggml.token_type", "tokenizer")
    if len(tokens) != len(target.embed) or len(kinds) != len(tokens):
        raise MismatchError(
            "tokenizer", f"it has {len(tokens)} tokens, {len(kinds)} kinds, the target {len(target.embed)} tokens"
        )
    own = {piece: i for i, piece in enumerate(tokens) if kinds[i] != UNUSED}
    pieces = target.pieces or {}
    if own != pieces:
        other = next(piece for piece in {**own, **pieces} if own.get(piece) != pieces.get(piece))
        raise MismatchError("tokenizer", f"{other!r} is token {own.get(other)} there, the target's is {pieces.get(other)}")
    bpe = Bpe(own, kinds, config.get("tokenizer.ggml.merges", "tokenizer"), pre)
    texts = target.texts if pre not in UNMARKED else [(text, ids) for text, ids in target.texts if not MARK.search(text)]
    for text, ids in texts:
        made = [*_start(config), *bpe.encode(text), *_end(config)]
        if made != ids:
            at = next((i for i, (a, b) in enumerate(zip(made, ids, strict=False)) if a != b), min(len(made), len(ids)))
            raise MismatchError(
                "tokenizer", f"token {at + 1} of a text is {made[at : at + 1]} there, the target's {ids[at : at + 1]}"
            )


def _start(config: Config) -> list[int]:
    adds = config.values.get("tokenizer.ggml.add_bos_token")
    if adds is None:
        raise MismatchError("tokenizer", f"{config.where} does not say tokenizer.ggml.add_bos_token")
    return [config.get("tokenizer.ggml.bos_token_id", "tokenizer")] if adds else []


def _end(config: Config) -> list[int]:
    return [config.values["tokenizer.ggml.eos_token_id"]] if config.values.get("tokenizer.ggml.add_eos_token") else []


class Bpe:
    """Splits a text into words of bytes, each byte written as one letter, and merges neighbours by the earliest rule in the
    list.
    """

    def __init__(self, pieces: dict[str, int], kinds: list[int], merges: list[str], pre: str) -> None:
        self.pieces, self.whole, self.cuts = pieces, pre in WHOLE, [regex.compile(cut) for cut in CUTS[pre]]
        self.ranks = {_pair(merge): rank for rank, merge in reversed(list(enumerate(merges)))}
        special = sorted((p for p, i in pieces.items() if kinds[i] in (CONTROL, USER_DEFINED)), key=len, reverse=True)
        self.special = regex.compile("(" + "|".join(map(regex.escape, special)) + ")") if special else None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        parts: list[str] = [text] if self.special is None else self.special.split(text)
        found: list[int] = []
        for number, part in enumerate(parts):
            found += [self.pieces[part]] if number % 2 else [i for word in self._words(part) for i in self._merged(word)]
        return found

    def _words(self, text: str) -> Iterator[str]:
        words = [text] if text else []
        for cut in self.cuts:
            words = [piece for word in words for piece in _split(cut, word)]
        yield from ("".join(LETTERS[byte] for byte in word.encode()) for word in words)

    def _merged(self, word: str) -> list[int]:
        if self.whole and word in self.pieces:
            return [self.pieces[word]]
        symbols = list(word)
        while len(symbols) > 1:
            rank, at = min((self.ranks.get(pair, len(self.ranks)), i) for i, pair in enumerate(pairwise(symbols)))
            if rank == len(self.ranks):
                break
            symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
        return [self.pieces[symbol] for symbol in symbols if symbol in self.pieces]


def _pair(merge: str) -> tuple[str, str]:
    """The two pieces of a merge rule. A piece may begin with a space."""
    at = merge.find(" ", 1)
    return merge[:at], merge[at + 1 :]


def _split(cut: Any, word: str) -> Iterator[str]:
    """The matches of an expression, and the parts between them."""
    at = 0
    for match in cut.finditer(word):
        yield from (piece for piece in (word[at : match.start()], match.group()) if piece)
        at = match.end()
    if at < len(word):
        yield word[at:]


def _letters() -> list[str]:
    """GPT-2's letters for bytes: printable bytes are themselves, the others follow in order from 256."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]


LETTERS = _letters()
