"""The side-by-side sheet: blind, complete, and to be filled in."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafttrain.decoding.request import Result
from drafttrain.measure.sheet import outputs, write_sheet
from tests.reports import evidence_of, report_of_figures

Open = Callable[..., Any]
PAIRS = [
    {
        "question_id": str(i),
        "category": "c",
        "prompt": f"prompt {i} </pre><b>",
        "plain": f"plain {i}",
        "speculative": f"drafted {i}",
    }
    for i in range(8)
]


@pytest.fixture
def sheet(tmp_path: Path) -> Path:
    report = report_of_figures()
    report["checkpoints"][1]["outputs"] = PAIRS
    assert [file.name for file in write_sheet(tmp_path, report)] == ["sheet.html", "sheet.csv", "sheet-key.csv"]
    return tmp_path


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as text:
        return list(csv.DictReader(text))


def test_blind_comparison_only_key_file_reveals_sides(sheet: Path) -> None:
    shown, key = rows(sheet / "sheet.csv"), rows(sheet / "sheet-key.csv")
    for item, answer in zip(shown, key, strict=True):
        pair = PAIRS[int(answer["question_id"])]
        assert item["prompt"] == pair["prompt"] and item["better"] == ""
        assert {side: pair[answer[side]] for side in "AB"} == {side: item[side] for side in "AB"}
    assert {answer["A"] for answer in key} == {"plain", "speculative"}, "not always in one order"
    assert [answer["question_id"] for answer in key] != sorted(answer["question_id"] for answer in key)
    html = (sheet / "sheet.html").read_text(encoding="utf-8")
    assert "speculative" not in html and "question_id" not in html and "</pre><b>" not in html


def test_blind_comparison_is_not_written_for_lossless_report(tmp_path: Path) -> None:
    assert write_sheet(tmp_path, report_of_figures()) == [] and not list(tmp_path.iterdir())


def test_blind_comparison_omits_identical_texts() -> None:
    class Letters:
        def decode(self, tokens: list[int], **_: Any) -> str:
            return bytes(tokens).decode()

    evidence = evidence_of(list(b"abc"), [1])
    assert outputs(evidence, Letters()) == []  # type: ignore[arg-type]
    evidence.speculative[0] = Result(0, 1, list(b"abd"))  # type: ignore[index]
    (pair,) = outputs(evidence, Letters())  # type: ignore[arg-type]
    assert (pair["plain"], pair["speculative"], pair["prompt"]) == ("abc", "abd", "A")


@pytest.mark.parametrize("width", [1200, 390])
def test_blind_comparison_page_counts_unanswered_items(sheet: Path, opened: Open, width: int) -> None:
    browser = opened(sheet / "sheet.html", width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    left = browser.find_element("id", "left")
    assert left.text == "8 of 8 are unanswered"
    for i in range(1, 9):
        box = browser.find_elements("css selector", f"input[name=better-{i}]")[i % 3]
        browser.execute_script("arguments[0].click()", box)
    assert left.text == "all are answered"
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
