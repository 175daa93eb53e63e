"""An extension of mkdocs.yml: the comment beside a field becomes its text in the reference."""

from __future__ import annotations

import io
import tokenize
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """Fields of dataclasses are documented by a comment on their line, not by a docstring."""

    def on_attribute(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        if attr.docstring is None and attr.parent is not None and attr.parent.is_class and (text := comment(attr.source)):
            attr.docstring = griffe.Docstring(text[:1].upper() + text[1:], lineno=attr.lineno, parent=attr)


def comment(source: str) -> str:
    """The comment in some source text; empty without one."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, IndentationError):
        return ""
    return next((token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT), "")
