"""Prompts of a given length, cut from long documents."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from drafttrain.core.errors import UserError
from drafttrain.data.prompts import encode_messages

DOCUMENTS = 16
ENDINGS = (".txt", ".md", ".rst", ".py", ".html", ".tex")
Document = tuple[str, str]  # name and text


def read_documents(path: str | None) -> list[Document]:
    """The longest text files of a folder, or one file. None: Python's standard library, which is on every machine.

    Raises UserError where there is none.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if path is None else Path(path).expanduser()
    if root.is_dir():
        paths = root.glob("*.py") if path is None else root.rglob("*")
        files = sorted((f for f in paths if f.is_file() and f.suffix in ENDINGS), key=lambda f: (-f.stat().st_size, f.name))
    else:
        files = [root] if root.is_file() else []
    if not files:
        raise UserError(
            f"measure.documents {path}: expected a text file, or a folder with {', '.join(ENDINGS)} files; found none"
        )
    return [(file.name, file.read_text(encoding="utf-8", errors="replace")) for file in files[:DOCUMENTS]]


def long_prompts(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], length: int, count: int
) -> list[tuple[str, list[int]]]:
    """(name, token ids) of at most `count` prompts of `length` tokens or slightly fewer.

    Each is the beginning of a document, as a user turn where there is a chat template. Shorter documents are skipped. A single
    document is cut into `count` parts.
    """
    named_texts = list(documents)
    prompts: list[tuple[str, list[int]]] = []
    if len(named_texts) == 1:
        name, text = named_texts[0]
        size = len(text) // count
        named_texts = [(f"{name} {i + 1}", text[i * size : (i + 1) * size]) for i in range(count)]
    for name, text in named_texts:
        if len(prompts) < count and (tokens := _cut(tokenizer, text, length)) is not None:
            prompts.append((name, tokens))
    return prompts


def _cut(tokenizer: PreTrainedTokenizerBase, text: str, length: int) -> list[int] | None:
    """The longest beginning whose prompt has at most `length` tokens, within a few tokens; None if the text is too short."""

    def prompt(characters: int) -> list[int]:
        return encode_messages(tokenizer, [{"role": "user", "content": text[:characters]}])

    if len(prompt(min(len(text), 16 * length))) < length:
        return None
    low, high = 0, min(len(text), 16 * length)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(prompt(middle)) <= length else (low, middle)
    return prompt(low)
