"""Training's console and log show a running mean beside what a single batch says."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console as RichConsole

from drafttrain.train.progress import WINDOW, Console, RunningMeans


def figures(tau: float) -> dict[str, Any]:
    shares = dict.fromkeys(("mfu", "target_share", "data_share"))
    return {"loss": 2 * tau, "expected_tau": tau, "agreement": [0.5], "lr": 1e-3, **shares}


def test_running_means_cover_last_window_of_steps() -> None:
    running = RunningMeans()
    means = [running.step(figures(tau)) for tau in (1.34, 3.81, 2.28)]
    assert [m[f"expected_tau_mean{WINDOW}"] for m in means] == pytest.approx([1.34, 2.575, 7.43 / 3])
    assert means[-1][f"loss_mean{WINDOW}"] == pytest.approx(2 * 7.43 / 3)
    for _ in range(WINDOW):
        last = running.step(figures(2.0))
    assert last[f"expected_tau_mean{WINDOW}"] == 2.0, "earlier steps are forgotten"


def test_console_bar_prints_running_means_of_loss_and_tau() -> None:
    text = io.StringIO()
    running = RunningMeans()
    with Console(RichConsole(file=text, width=200)).bar(2, 0) as bar:
        for step, tau in enumerate((1.0, 2.0), start=1):
            values = figures(tau)
            bar.step(step, 10, values | running.step(values), line=True)
    assert "expected tau 2.00 (mean 1.50)" in text.getvalue() and "loss 4.000 (mean 3.000)" in text.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_console_bar_prints_few_lines_without_terminal(terminal: bool) -> None:
    text = io.StringIO()
    with Console(RichConsole(file=text, width=200, force_terminal=terminal)).bar(2400, 0) as bar:
        for step in range(10, 2401, 10):
            bar.step(step, 10, figures(1.0), line=True)
    assert text.getvalue().count("expected tau") == (240 if terminal else 40)
