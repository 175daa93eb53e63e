"""Progress of long work, on a terminal and in a log file."""

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from drafttrain.core import console
from drafttrain.core.console import counting, stages


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time in seconds, which the test sets."""
    now = [0.0]
    monkeypatch.setattr(console, "monotonic", lambda: now[0])
    yield now


def test_stages_without_terminal_print_done_rate_and_time_left_now_and_then(clock: list[float]) -> None:
    text = io.StringIO()
    with stages(Console(file=text, width=200)) as watch:
        for done in range(11):
            watch("texts", done, 10, 50)
            clock[0] += 20
    lines = [line for line in text.getvalue().splitlines() if " of " in line]
    assert lines == [
        "texts: 2 of 10, 2 tokens/s, 0:02:40 left",
        "texts: 4 of 10, 2 tokens/s, 0:02:00 left",
        "texts: 6 of 10, 2 tokens/s, 0:01:20 left",
        "texts: 8 of 10, 2 tokens/s, 0:00:40 left",
    ]


def test_stages_that_continue_do_not_count_what_was_done_before(clock: list[float]) -> None:
    text = io.StringIO()
    with stages(Console(file=text, width=200)) as watch:
        watch("texts", 90, 100, 0)
        clock[0] += 30
        watch("texts", 90, 100, 60)
        clock[0] += 30
        watch("texts", 95, 100, 60)
    lines = [line for line in text.getvalue().splitlines() if " of " in line]
    assert lines == ["texts: 90 of 100, 2 tokens/s", "texts: 95 of 100, 2 tokens/s, 0:01:00 left"]


def test_stages_that_end_early_or_in_one_part_stop_their_clocks() -> None:
    now, text = [0.0], io.StringIO()
    with stages(Console(file=text, width=100, get_time=lambda: now[0])) as watch:
        watch("one part", 1, 1, 9)
        now[0] += 7
        watch("cut short", 1, 3, 9)
        now[0] += 5
        watch("cut short", 2, 3, 9)
        watch("last", 1, 2, 9)
        now[0] += 60
    one, cut, _ = text.getvalue().splitlines()[-3:]
    assert "0:00:00" in one and "0:00:05" in cut and "0:01:05" not in one + cut


def test_counting_on_terminal_draws_the_bar_alone(clock: list[float]) -> None:
    text = io.StringIO()
    with counting(Console(file=text, width=200, force_terminal=True), "features", 4, "blocks/s") as advance:
        for _ in range(4):
            clock[0] += 60
            advance(1)
    assert "4/4" in text.getvalue() and " of " not in text.getvalue()
