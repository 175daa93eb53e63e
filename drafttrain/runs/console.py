"""Prints whole lines to a rich console: no wrapping, no highlighting, no markup in paths and names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rich.console import Console


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print a line."""
    console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)


def print_note(console: Console, text: str) -> None:
    """Print a note, in yellow."""
    print_line(console, f"note: {text}", "yellow")


def line_printer(console: Console) -> Callable[[str], None]:
    """A function that prints a line."""
    return partial(print_line, console)
