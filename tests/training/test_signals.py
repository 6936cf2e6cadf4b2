"""Signals that end a run: the first is noted, its echo is not, a later one ends at once."""

import signal
from collections.abc import Iterator

import pytest

from megapipe.training import signals
from megapipe.training.signals import StopRequest


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Every signal as it was before the test."""
    before = {each: signal.getsignal(each) for each in signals.SIGNALS}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_first_signal_and_its_echo_only_ask(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert not stop.requested
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert stop.requested
        assert stop.status == 128 + number


def test_later_signal_goes_to_the_handler_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "ECHO_SECONDS", 0.0)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_are_restored() -> None:
    before = [signal.getsignal(each) for each in signals.SIGNALS]
    with StopRequest():
        assert [signal.getsignal(each) for each in signals.SIGNALS] != before
    assert [signal.getsignal(each) for each in signals.SIGNALS] == before


def test_error_is_told_before_a_launcher_ends_the_process() -> None:
    with pytest.raises(ValueError, match="told"), StopRequest():
        raise ValueError("told")
    signal.raise_signal(signal.SIGTERM)  # would have ended the tests
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
