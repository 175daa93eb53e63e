"""A signal ends what can be ended at once, waits for what is held, and is lost nowhere."""

from __future__ import annotations

import signal
import time

import pytest

from drafttrain.core.errors import Interrupted
from drafttrain.train import interrupt
from drafttrain.train.interrupt import SIGNALS, Interrupt

pytestmark = pytest.mark.usefixtures("ctrl_c_is_heard")


AFTER = 0.05  # seconds, for `RESEND_AFTER`
LONG = 60.0  # seconds that only a lost signal costs


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "RESEND_AFTER", AFTER)


def hear(number: signal.Signals) -> None:
    signal.raise_signal(number)  # its handler runs before this returns


@pytest.mark.parametrize("number", SIGNALS)
def test_interrupt_signal_outside_deferred_raises_and_restores_handler(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=f"by {number.name}"), Interrupt():
        hear(number)
        raise AssertionError("it went on")
    assert signal.getsignal(number) == before


def test_interrupt_signals_in_deferred_set_requested_and_check_raises() -> None:
    with Interrupt() as interrupt:
        with interrupt.deferred():
            hear(signal.SIGTERM)
            hear(signal.SIGUSR1)
            assert interrupt.requested
        with pytest.raises(Interrupted):
            interrupt.check()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("soon")
def test_interrupt_signal_swallowed_by_finaliser_is_sent_again() -> None:
    class Swallows:
        def __del__(self) -> None:
            hear(signal.SIGTERM)

    with pytest.raises(Interrupted), Interrupt():
        Swallows()
        time.sleep(LONG)
        raise AssertionError("it was lost")


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("soon")
def test_interrupt_second_ctrl_c_swallowed_by_finaliser_is_sent_again() -> None:
    class Swallows:
        def __del__(self) -> None:
            hear(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), Interrupt() as interrupt, interrupt.deferred():
        hear(signal.SIGINT)
        Swallows()
        time.sleep(LONG)
        raise AssertionError("it was lost")


@pytest.mark.usefixtures("soon")
def test_interrupt_second_sigterm_during_cleanup_is_ignored() -> None:
    cleaned = False
    with pytest.raises(Interrupted), Interrupt():
        try:
            hear(signal.SIGTERM)
        finally:
            time.sleep(5 * AFTER)  # longer than it takes to be reminded
            hear(signal.SIGTERM)
            cleaned = True
    assert cleaned


def test_interrupt_exception_after_signal_becomes_interrupted() -> None:
    with pytest.raises(Interrupted, match="while it was starting"), Interrupt() as interrupt, interrupt.deferred():
        hear(signal.SIGTERM)
        raise RuntimeError("connection closed by peer")
    with pytest.raises(RuntimeError), Interrupt():
        raise RuntimeError("a bug")


def test_interrupt_ctrl_c_in_deferred_prints_message_and_second_raises(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), Interrupt() as interrupt, interrupt.deferred():
        hear(signal.SIGINT)
        assert interrupt.requested
        said = capfd.readouterr().err
        assert said.count("\n") == 2 and "saving this step first; press Ctrl-C again to end at once" in said
        hear(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("soon")
def test_interrupt_second_ctrl_c_during_cleanup_raises_keyboard_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupt():
        try:
            hear(signal.SIGINT)
        finally:
            time.sleep(5 * AFTER)  # longer than it takes to be reminded
            hear(signal.SIGINT)


def test_interrupt_ignored_sigint_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            hear(signal.SIGINT)
            assert not interrupt.requested
    finally:
        signal.signal(signal.SIGINT, before)
