"""report.html in a real browser: desktop and phone, light and dark, pointer and keyboard, and no network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafttrain.measure.report import page
from tests.reports import report_of_figures

pytest.importorskip("selenium", reason="selenium is not installed")

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By

Open = Callable[..., Any]
INSIDE = """
const box = arguments[0].getBoundingClientRect();
return [...arguments[0].querySelectorAll('.mark')].every(mark => {
  const own = mark.getBoundingClientRect();
  return own.left >= box.left - 1 && own.right <= box.right + 1 && own.top >= box.top - 1 && own.bottom <= box.bottom + 1;
});
"""
CHARTS = ("acceptance", "categories", "speedup", "engines", "step", "waterfall", "training-loss", "training-agreement")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    steps = [{"step": step, "loss": 9 / step, "agreement": [1 - 1 / step, 0.5]} for step in range(1, 400)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (folder / "report.html").write_text(page(report_of_figures(), folder / "metrics.jsonl"), encoding="utf-8")
    return folder / "report.html"


def marks(browser: Any, chart: str) -> list[str]:
    found = browser.find_elements(By.CSS_SELECTOR, f"#{chart} .mark")
    return [mark.get_attribute("aria-label") for mark in found]


@pytest.mark.sampled
@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_report_page_charts_fit_viewport_without_console_errors(opened: Open, file: Path, width: int, dark: bool) -> None:
    browser = opened(file, width, dark)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    for chart in CHARTS:
        (drawn,) = browser.find_elements(By.CSS_SELECTOR, f"#{chart} svg")
        inside = browser.execute_script(INSIDE, drawn)
        assert drawn.is_displayed() and marks(browser, chart) and inside, chart
    back = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(21, 24, 28)" if dark else "rgb(255, 255, 255)")
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def test_report_page_mark_labels_show_report_figures(opened: Open, file: Path) -> None:
    browser = opened(file)
    assert "step-00002, position 2, accepted 60.0%, if all earlier drafts were, 95% interval 50% to 70%" in marks(
        browser, "acceptance"
    )
    assert "step-00001, batch 4, 0.80x (0.70 to 0.90), tau 2.00, 100 tokens/s, plain 100" in marks(browser, "speedup")
    assert (
        "step-00002: faster than plain decoding up to a batch size of about 3." in browser.find_element(By.ID, "crossover").text
    )
    assert any(mark.startswith("step-00001, context 1,024, 1.10x") for mark in marks(browser, "context"))
    said = marks(browser, "engines")
    assert "drafttrain, speculative, 100 tokens/s, batch 1, 8 prompts, 1.60x (1.50 to 1.70), tau 2.40" in said
    plain = next(mark for mark in said if mark.startswith("OpenVINO GenAI, plain, 200 tokens/s"))
    assert plain.endswith("1.20x (1.10 to 1.30), tau 2.00, ours 2.00, 8 outputs identical to its plain decoding")
    assert "verify, 2.000 ms, 70% of the step" in marks(browser, "step")
    fall = marks(browser, "waterfall")
    assert (
        fall[0].startswith("ideal, 2.40 tokens")
        and fall[1].endswith("2.40x becomes 2.40x")
        and fall[-1].startswith("measured, 1.60x")
    )
    assert len(marks(browser, "training-loss")) <= 80 and marks(browser, "training-loss")[0].startswith("steps 1 to 5, loss")


def test_report_page_hover_and_focus_show_tooltip(opened: Open, file: Path) -> None:
    browser = opened(file)
    tip, mark = browser.find_element(By.ID, "tip"), browser.find_element(By.CSS_SELECTOR, "#waterfall .mark")
    assert not tip.is_displayed()
    ActionChains(browser).scroll_to_element(mark).move_to_element(mark).perform()
    assert tip.is_displayed() and "if drafting were free" in tip.text
    ActionChains(browser).move_to_element(browser.find_element(By.TAG_NAME, "h1")).perform()
    assert not tip.is_displayed()
    browser.execute_script("arguments[0].focus()", mark)
    assert tip.is_displayed() and tip.text.startswith("ideal")
    left, right = browser.execute_script(
        "const r = document.getElementById('tip').getBoundingClientRect(); return [r.left, r.right]"
    )
    assert left >= 0 and right <= 1200


def test_report_page_checkpoint_button_switches_charts(opened: Open, file: Path) -> None:
    browser = opened(file)
    assert browser.find_element(By.CSS_SELECTOR, "#chooser [aria-pressed=true]").text == "step-00002 (best)"
    browser.find_elements(By.CSS_SELECTOR, "#chooser button")[0].click()
    assert marks(browser, "waterfall")[-1].startswith("measured, 1.30x")
    assert browser.find_element(By.CSS_SELECTOR, "#chooser [aria-pressed=true]").text == "step-00001"


def test_report_page_outputs_highlight_accepted_draft_tokens(opened: Open, file: Path) -> None:
    browser = opened(file)
    first = browser.find_element(By.CSS_SELECTOR, "#texts details")
    assert "prompt 7 code, tau 2.00, identical to plain decoding" in first.text
    assert first.find_element(By.TAG_NAME, "pre").text == "The fox jumps over the lazy dog and away"
    assert [mark.text.strip() for mark in first.find_elements(By.TAG_NAME, "mark")] == ["over the", "and"]
    assert first.find_element(By.TAG_NAME, "mark").get_attribute("aria-label") == "2 drafts accepted"


def test_report_page_makes_no_network_requests(opened: Open, file: Path) -> None:
    browser = opened(file)
    asked = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    addresses = {one["params"]["request"]["url"] for one in asked if one["method"] == "Network.requestWillBeSent"}
    assert {address.split(":")[0] for address in addresses} <= {"file", "data"}
