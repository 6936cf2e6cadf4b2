"""Signals that end a run: the first is noted, its echo is not, a later one ends at once. SIGUSR1 asks for a save."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megapipe.training.resilience import signals
from megapipe.training.resilience.signals import SignalRequests


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Every signal as it was before the test."""
    before = {each: signal.getsignal(each) for each in signals.SIGNALS}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("number", signals.STOPS)
def test_first_signal_and_its_echo_only_ask(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "ECHO_SECONDS", 1000.0)  # however long this process is blocked between the two
    with SignalRequests() as requests:
        assert not requests.stop
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert requests.stop
        assert requests.end() == 128 + number


def test_later_signal_goes_to_the_handler_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "ECHO_SECONDS", 0.0)
    with SignalRequests() as requests:
        signal.raise_signal(signal.SIGINT)
        assert requests.stop
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_no_later_hangup_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "ECHO_SECONDS", 0.0)
    with SignalRequests() as requests:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
        assert requests.end() == 128 + signal.SIGTERM
    signal.raise_signal(signal.SIGHUP)  # would have ended the test process


def test_a_hangup_stays_ignored_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with SignalRequests() as requests:
        signal.raise_signal(signal.SIGHUP)
        assert not requests.stop


def test_sigusr1_requests_one_save_and_never_a_stop() -> None:
    with SignalRequests() as requests:
        assert not requests.take_save()
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert requests.take_save()
        assert not requests.take_save()
        signal.raise_signal(signal.SIGUSR1)
        assert requests.take_save()
        assert not requests.stop


def test_handlers_are_restored() -> None:
    before = [signal.getsignal(each) for each in signals.SIGNALS]
    with SignalRequests():
        assert [signal.getsignal(each) for each in signals.SIGNALS] != before
    assert [signal.getsignal(each) for each in signals.SIGNALS] == before


def test_error_is_reported_before_a_launcher_ends_the_process() -> None:
    with pytest.raises(ValueError, match="reported"), SignalRequests():
        raise ValueError("reported")
    signal.raise_signal(signal.SIGTERM)  # would have ended the test process
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_stopped_runs_print_their_summary_before_being_killed() -> None:
    """Even if another rank was asked: torchrun sends SIGTERM as soon as the first one has ended."""
    with SignalRequests() as requests:
        requests.end()
    signal.raise_signal(signal.SIGTERM)  # would have ended the test process


@pytest.mark.parametrize("number", signals.STOPS)
def test_signals_before_training_end_c_code_at_once(number: signal.Signals) -> None:
    """It waits in C until its input ends: a Python handler would run only after that, and print a traceback. Two other
    signals are ignored."""
    program = (
        "import ctypes, signal\n"
        "from megapipe.training.resilience.signals import before_training\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # what a shell's background jobs do not have
        "before_training()\n"
        "print('waits', flush=True)\n"
        "ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)\n"
    )
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    for each in (signal.SIGUSR1, signal.SIGPIPE, number):
        os.kill(process.pid, each)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == -number
    assert errors == ""
