"""The examples of docs/python.md run as they are shown, one after another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SMALL = {"steps=20": "steps=3", "epochs=2": "epochs=1", "minutes=0.5": "minutes=0.05", "max_new_tokens=64": "max_new_tokens=8"}


def blocks(root: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (root / "docs" / "python.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
def test_python_page_examples_run(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks(root):
        for shown, small in SMALL.items():
            block = block.replace(shown, small)
        exec(block, names)
    assert {path.name for path in (tmp_path / "outputs" / "api").iterdir()} >= {"eagle3", "medusa", "own", "report", "vllm"}
    assert (tmp_path / "outputs/api/vllm/README.md").is_file() and (tmp_path / "outputs/api/report/report.html").is_file()


def test_python_page_first_example_has_at_most_22_lines(root: Path) -> None:
    assert len(blocks(root)[0].splitlines()) <= 22
