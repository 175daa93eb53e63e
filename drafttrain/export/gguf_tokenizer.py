"""A tokenizer in llama.cpp's form inside a GGUF file: byte-level BPE, the kind of Llama 3, Qwen and GPT-2.

llama.cpp identifies the rule that splits a text into words by a name, and derives settings from that name. So a tokenizer can
be written only if its rule has a name there. A written one is tried: texts are encoded by the expressions that llama.cpp has
for that name, which are not the tokenizer's own.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import regex

from drafttrain.core.errors import ParityError, UserError
from drafttrain.export.gguf_file import GgufFile

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
QWEN35 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + SPACES
LETTERS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s" + CONTRACTIONS + "?|"
O200K = LETTERS % ("*", "+") + LETTERS % ("+", "*") + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
GPT2, DIGITS = "gpt-2's own", "digit by digit"

# (rules that split a text, whether a word that is a piece is used without merging) -> llama.cpp's name
NAMES = {
    ((GPT2,), False): "gpt-2",
    ((DIGITS, GPT2), False): "smollm",
    ((LLAMA3,), True): "llama-bpe",
    ((LLAMA3,), False): "smaug-bpe",
    ((QWEN2,), False): "qwen2",
    ((QWEN35,), False): "qwen35",
    ((O200K,), False): "gpt-4o",
}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
CONVERTER = "llama.cpp's convert_hf_to_gguf.py supports more of them, and reads a directory of format=vllm"


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of tokenizer.json that are written."""

    model: dict[str, Any]
    name: str  # of the pre-tokenizer in llama.cpp
    added: list[dict[str, Any]]  # the added tokens


def refuse(tokenizer: Any) -> str | None:
    """Why llama.cpp cannot have this tokenizer; None where it can."""
    parts = _parts(tokenizer)
    return parts if isinstance(parts, str) else None


def fields(tokenizer: Any, vocab: int, stop_ids: frozenset[int]) -> dict[str, Any]:
    """The tokenizer's GGUF fields. vocab: rows of the embedding, which may exceed the tokenizer's tokens. stop_ids: end
    tokens.
    """
    parts = _parts(tokenizer)
    assert not isinstance(parts, str), "`refuse` was called before"
    if len(tokenizer) > vocab:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, the target {vocab}, and llama.cpp needs a row for each; "
            "remove the tokens that the target does not have from the tokenizer"
        )
    tokens, token_types = [f"[PAD{i}]" for i in range(vocab)], [UNUSED] * vocab
    for piece, i in parts.model["vocab"].items():
        tokens[i], token_types[i] = piece, NORMAL
    for token in parts.added:
        tokens[token["id"]], token_types[token["id"]] = token["content"], CONTROL if token["special"] else USER_DEFINED
    merges = [x if isinstance(x, str) else " ".join(x) for x in parts.model["merges"]]
    gguf_fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": parts.name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": token_types,
        "tokenizer.ggml.merges": merges,
    }
    return gguf_fields | _special(tokenizer, stop_ids)


def _special(tokenizer: Any, stop_ids: frozenset[int]) -> dict[str, Any]:
    """The special tokens. llama.cpp has its own defaults for missing ones, such as token 11 for the end of a text."""
    eos = tokenizer.eos_token_id
    gguf_fields: dict[str, Any] = {"tokenizer.ggml.eos_token_id": eos}
    other_stop_ids = sorted(stop_ids - {eos})
    special_ids = {
        "bos": tokenizer.bos_token_id,
        "padding": tokenizer.pad_token_id,
        "eot": other_stop_ids[0] if other_stop_ids else None,
    }
    gguf_fields |= {f"tokenizer.ggml.{name}_token_id": i for name, i in special_ids.items() if i is not None}
    input_ids = tokenizer("a")["input_ids"]
    gguf_fields["tokenizer.ggml.add_bos_token"] = bool(input_ids) and input_ids[0] == tokenizer.bos_token_id
    gguf_fields["tokenizer.ggml.add_eos_token"] = bool(input_ids) and input_ids[-1] == eos
    if isinstance(tokenizer.chat_template, str):
        gguf_fields["tokenizer.chat_template"] = tokenizer.chat_template
    return gguf_fields


def _parts(tokenizer: Any) -> _Parts | str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return f"the target's tokenizer is no fast one, but GGUF files are written from tokenizer.json; {CONVERTER}"
    content = json.loads(backend.to_str())
    model, added_tokens = content["model"], content["added_tokens"]
    if model["type"] != "BPE" or model.get("byte_fallback") or not model["merges"]:
        variant = f"{model['type']}, {'with byte fallback' if model.get('byte_fallback') else 'no merges'}"
        return (
            f"the target's tokenizer is no byte-level BPE ({variant if model['type'] == 'BPE' else model['type']}); {CONVERTER}"
        )
    if (content["normalizer"] or {}).get("type", "NFC") != "NFC":
        return (
            f"the target's tokenizer normalizes texts ({content['normalizer']['type']}), which llama.cpp does not; {CONVERTER}"
        )
    name = NAMES.get((_cuts(content["pre_tokenizer"]), bool(model.get("ignore_merges"))))
    if name is None:
        return f"the target's tokenizer splits texts by a rule that is not known here; {CONVERTER}"
    if tokenizer.eos_token_id is None:
        return "the target's tokenizer has no end token, and llama.cpp would use token 11 instead; set its eos_token"
    return _Parts(model, name, added_tokens)


def _cuts(pre: dict[str, Any] | None) -> tuple[str, ...]:
    """The rules that split a text, in order, without the last step to bytes. Empty for an unknown kind of rule."""
    if pre is None:
        return ()
    steps: list[dict[str, Any]] = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return ()
    split_patterns = []
    for step in steps[:-1]:
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            split_patterns.append(step["pattern"].get("Regex", ""))
        elif step["type"] == "Digits" and step["individual_digits"]:
            split_patterns.append(DIGITS)
        else:
            return ()
    return tuple(split_patterns) + ((GPT2,) if steps[-1]["use_regex"] else ())


# tokenizers split these differently: contractions, numbers, scripts, marks, spaces and line ends
TEXT = "It's 12345.67, WE'VE 2 don't-cares:\n\n  x = f(a_1)\t+ 'y'  \r\n Größe नमस्ते 你好 🙂 ½ x\u0301... "
UNMARKED_TEXT = "".join(letter for letter in TEXT if not unicodedata.category(letter).startswith("M"))
# the expressions by which llama.cpp splits a text for each pre-tokenizer's name, in order
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SHORT = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
LINES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
THREE = SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + LINES
ONE = SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + LINES
MARKS = SHORT + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ENDING = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"
CASED = r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))%s((?=[\p{L}])([^A-Z]))%s" + ENDING
CASES = CASED % ("*", "+") + "|" + CASED % ("+", "*") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CUTS = {
    "gpt-2": [WORDS],
    "smollm": [r"\p{N}", WORDS],
    "llama-bpe": [THREE],
    "smaug-bpe": [THREE],
    "qwen2": [ONE],
    "qwen35": [MARKS],
    "gpt-4o": [CASES],
}
UNMARKED = ("gpt-4o",)  # names whose expression, unlike that of the tokenizers, ends a word before a combining mark
WHOLE = ("llama-bpe",)  # names for which a word that is a piece is used without merging
MARK = regex.compile(r"\p{M}")


def encoded(tokenizer: Any) -> list[tuple[str, list[int]]]:
    """Texts with their tokens by the target's tokenizer."""
    texts = [TEXT, f"{TEXT}{tokenizer.eos_token or ''}{TEXT}", UNMARKED_TEXT]
    return [(text, list(tokenizer(text, verbose=False)["input_ids"])) for text in texts]


def check_tokenizer(file: GgufFile, rows: int, pieces: Mapping[str, int], texts: Sequence[tuple[str, list[int]]]) -> None:
    """Raise ParityError unless the file's tokenizer has the target's pieces and makes the same tokens from texts.

    rows: of the target's embedding. pieces: the target's token ids. texts: with the target's tokens.
    """
    tokens = file.get("tokenizer.ggml.tokens", "tokenizer")
    file.expect("tokenizer.ggml.model", "gpt2", "tokenizer")
    pre = file.get("tokenizer.ggml.pre", "tokenizer")
    file.get("tokenizer.ggml.eos_token_id", "tokenizer")
    if pre not in CUTS:
        raise ParityError("tokenizer", f"tokenizer.ggml.pre is {pre!r}; the reader knows {', '.join(CUTS)}")
    token_types = file.get("tokenizer.ggml.token_type", "tokenizer")
    if len(tokens) != rows or len(token_types) != len(tokens):
        raise ParityError("tokenizer", f"it has {len(tokens)} tokens, {len(token_types)} kinds, the target {rows} tokens")
    file_vocab = {piece: i for i, piece in enumerate(tokens) if token_types[i] != UNUSED}
    if file_vocab != pieces:
        mismatch = next(piece for piece in {**file_vocab, **pieces} if file_vocab.get(piece) != pieces.get(piece))
        raise ParityError(
            "tokenizer", f"{mismatch!r} is token {file_vocab.get(mismatch)} there, the target's is {pieces.get(mismatch)}"
        )
    bpe = Bpe(file_vocab, token_types, file.get("tokenizer.ggml.merges", "tokenizer"), pre)
    for text, ids in texts:
        if pre in UNMARKED and MARK.search(text):
            continue
        encoded_ids = [*_start(file), *bpe.encode(text), *_end(file)]
        if encoded_ids != ids:
            index = next(
                (i for i, (a, b) in enumerate(zip(encoded_ids, ids, strict=False)) if a != b), min(len(encoded_ids), len(ids))
            )
            raise ParityError(
                "tokenizer",
                f"token {index + 1} of a text is {encoded_ids[index : index + 1]} there, the target's {ids[index : index + 1]}",
            )


def _start(file: GgufFile) -> list[int]:
    add_bos = file.fields.get("tokenizer.ggml.add_bos_token")
    if add_bos is None:
        raise ParityError("tokenizer", f"{file.file.name} does not say tokenizer.ggml.add_bos_token")
    return [file.get("tokenizer.ggml.bos_token_id", "tokenizer")] if add_bos else []


def _end(file: GgufFile) -> list[int]:
    return [file.fields["tokenizer.ggml.eos_token_id"]] if file.fields.get("tokenizer.ggml.add_eos_token") else []


class Bpe:
    """Splits a text into words of bytes, each byte written as one letter, and merges neighbours by the earliest rule in the
    list.
    """

    def __init__(self, pieces: dict[str, int], kinds: list[int], merges: list[str], pre: str) -> None:
        self.pieces, self.whole, self.cuts = pieces, pre in WHOLE, [regex.compile(pattern) for pattern in CUTS[pre]]
        self.ranks = {_pair(merge): rank for rank, merge in reversed(list(enumerate(merges)))}
        special = sorted((p for p, i in pieces.items() if kinds[i] in (CONTROL, USER_DEFINED)), key=len, reverse=True)
        self.special = regex.compile("(" + "|".join(map(regex.escape, special)) + ")") if special else None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        segments: list[str] = [text] if self.special is None else self.special.split(text)
        token_ids: list[int] = []
        for index, segment in enumerate(segments):
            token_ids += (
                [self.pieces[segment]] if index % 2 else [i for word in self._words(segment) for i in self._merged(word)]
            )
        return token_ids

    def _words(self, text: str) -> Iterator[str]:
        words = [text] if text else []
        for pattern in self.cuts:
            words = [piece for word in words for piece in _split(pattern, word)]
        yield from ("".join(BYTE_LETTERS[byte] for byte in word.encode()) for word in words)

    def _merged(self, word: str) -> list[int]:
        if self.whole and word in self.pieces:
            return [self.pieces[word]]
        symbols = list(word)
        while len(symbols) > 1:
            rank, index = min((self.ranks.get(pair, len(self.ranks)), i) for i, pair in enumerate(pairwise(symbols)))
            if rank == len(self.ranks):
                break
            symbols[index : index + 2] = ["".join(symbols[index : index + 2])]
        return [self.pieces[symbol] for symbol in symbols if symbol in self.pieces]


def _pair(merge: str) -> tuple[str, str]:
    """The two pieces of a merge rule. A piece may begin with a space."""
    boundary = merge.find(" ", 1)
    return merge[:boundary], merge[boundary + 1 :]


def _split(pattern: Any, word: str) -> Iterator[str]:
    """The matches of an expression, and the parts between them."""
    start = 0
    for match in pattern.finditer(word):
        yield from (piece for piece in (word[start : match.start()], match.group()) if piece)
        start = match.end()
    if start < len(word):
        yield word[start:]


def _letters() -> list[str]:
    """GPT-2's letters for bytes: printable bytes are themselves, the others follow in order from 256."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    code_points = iter(range(256, 512))
    return [chr(byte if byte in printable else next(code_points)) for byte in range(256)]


BYTE_LETTERS = _letters()
