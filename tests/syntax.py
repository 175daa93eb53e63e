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
