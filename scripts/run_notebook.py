"""Run a notebook's code cells in order and store their output, without Jupyter: docs/simulate.ipynb.

    python scripts/run_notebook.py NOTEBOOK [--check]

It runs in the notebook's folder. --check: write nothing, and exit with 1 where a cell's output differs from the stored one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any


def outputs_of(notebook: dict[str, Any]) -> list[str]:
    """The output of each code cell; all cells share one namespace."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for cell in code_cells(notebook):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile("".join(cell["source"]), "cell", "exec"), names)
        printed.append(said.getvalue())
    return printed


def kept_outputs(notebook: dict[str, Any]) -> list[str]:
    return ["".join(line for out in cell["outputs"] for line in out["text"]) for cell in code_cells(notebook)]


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def keep(notebook: dict[str, Any], printed: list[str]) -> None:
    for count, (cell, text) in enumerate(zip(code_cells(notebook), printed, strict=True), start=1):
        cell["execution_count"] = count
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell["outputs"] = [stream] if text else []


def main(arguments: list[str]) -> int:
    files = [Path(word) for word in arguments if word != "--check"]
    if len(files) != 1 or not files[0].is_file():
        print("usage: python scripts/run_notebook.py NOTEBOOK [--check]", file=sys.stderr)
        return 1
    notebook = json.loads(files[0].read_text(encoding="utf-8"))
    file = files[0].absolute()
    os.chdir(file.parent)
    printed = outputs_of(notebook)
    if "--check" in arguments:
        return int(printed != kept_outputs(notebook))
    keep(notebook, printed)
    file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
