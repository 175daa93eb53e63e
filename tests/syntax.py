"""The package's syntax trees, each parsed once in a process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "drafttrain"
FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    """Not to be changed."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def statements(path: Path) -> list[ast.AST]:
    """A file's statements at every depth, and its handlers of exceptions. Whoever looks for imports need not walk through
    expressions, which are most of a tree.
    """
    found: list[ast.AST] = []
    left: list[ast.AST] = list(parsed(path).body)
    while left:
        found.append(node := left.pop())
        for part in ("body", "orelse", "handlers", "finalbody", "cases"):
            left += getattr(node, part, ())
    return found
