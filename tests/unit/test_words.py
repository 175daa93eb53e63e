"""Names of the package use the field's words: "distribution" for "law", "decode step" for "round", and so on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.syntax import FILES, PACKAGE, parsed

AVOID = {
    "law": "distribution",
    "foretell": "predict",
    "foretold": "predicted",
    "speak": "predict",
    "round": "decode step",
    "tip": "last hidden state",
    "staged": "pending positions",
    "turned": "fell back to plain decoding",
    "house": "architecture",
    "worth": "speedup, acceptance",
    "beside": "next to",
    "behind": "after",
    "lies": "is",
    "stands": "is",
    "texts": "sequences, requests, outputs",
    "lot": "sample",
    "nobody": "padding slot",
    "informed": "name the input",
    "assured": "acceptance probability",
}
PLURALS = {f"{word}s": word for word in AVOID if not word.endswith("s")}
# Keys of the configuration and of files keep their names, and so do functions of libraries.
KEPT = {
    "round",  # Python's and torch's function
    "RoundRobinTarget",
    "same_texts",  # of docs/engines.json
}
# Here texts are strings or outputs, not requests or sequences of tokens.
TEXTS = {"data", "engines", "export"}


def names(tree: ast.Module) -> Iterator[str]:
    """Every identifier that the file defines or uses."""
    for node in ast.walk(tree):
        for field in ("name", "id", "arg", "attr", "asname"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield from value.split(".")


def words(name: str) -> set[str]:
    """The words of a name, in lower case and in the singular: `_JsonLaws_BNV` has json, law, bnv."""
    found = [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]
    return {PLURALS.get(word, word) for word in found}


def test_words_splits_identifiers_into_singular_words() -> None:
    assert words("_JsonLaws_BNV") == {"json", "law", "bnv"}
    assert words("behind_text") == {"behind", "text"}


def test_package_identifiers_avoid_unclear_words() -> None:
    wrong = set()
    for path in FILES:
        own = AVOID.keys() - ({"texts"} if path.relative_to(PACKAGE).parts[0] in TEXTS else set())
        for name in names(parsed(path)):
            if name not in KEPT:
                wrong |= {f"{path.relative_to(PACKAGE)}: {name}; better: {AVOID[word]}" for word in words(name) & own}
    assert not wrong, "\n".join(sorted(wrong))


def test_package_class_names_are_unique() -> None:
    """A class is found by its name alone."""
    places: dict[str, set[str]] = {}
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, set()).add(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
