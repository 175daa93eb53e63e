"""compare.html in a real browser: within the page at every width, and what a mark says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafttrain.measure.compare import CompareOptions
from drafttrain.measure.compare.files import page
from drafttrain.measure.compare.ranking import ranked
from drafttrain.measure.compare.runs import RunReport, rows_of
from tests.runs import report

pytest.importorskip("selenium", reason="selenium is not installed")

from selenium.webdriver.common.by import By

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = [report(2.0, 1.4), report(2.5, 1.8, seed=1), report(2.2, 1.2, seed=2)]
    for times, each in enumerate(made, start=1):
        each["checkpoints"][0]["training"]["process_seconds"] *= 5**times
    rows = rows_of([RunReport(f"outputs/a-run-with-a-long-name/{i}", each) for i, each in enumerate(made)], "best")
    path = tmp_path_factory.mktemp("page") / "compare.html"
    path.write_text(page(ranked(rows, CompareOptions(samples=200)), "drafttrain compare"), encoding="utf-8")
    return path


@pytest.mark.sampled
@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_compare_page_fits_viewport_without_console_errors(opened: Open, file: Path, width: int, dark: bool) -> None:
    browser = opened(file, width, dark)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    (shown,) = (svg for svg in browser.find_elements(By.TAG_NAME, "svg") if svg.is_displayed())
    assert len(shown.find_elements(By.CSS_SELECTOR, ".run")) == 3
    assert len(shown.find_elements(By.CSS_SELECTOR, ".ahead")) == 2
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def test_compare_page_clicked_mark_describes_its_run(opened: Open, file: Path) -> None:
    browser = opened(file)
    (first,) = (
        run
        for run in browser.find_elements(By.CSS_SELECTOR, ".run")
        if run.is_displayed() and "1: " in run.get_attribute("data-about")
    )
    first.click()
    said = browser.find_element(By.ID, "about").text
    assert said.startswith("1: a-run-with-a-long-name/1: 1.80x [1.70-1.90], tau 2.") and "CPU h" in said
