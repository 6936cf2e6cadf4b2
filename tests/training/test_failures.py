"""What a failed run says: a mistake of all ranks of a host once, by its first rank, or else by whoever made it."""

import signal
from collections.abc import Iterator

import pytest

from megapipe.config.errors import ConfigError
from megapipe.training import failures
from megapipe.training.exit_codes import ExitCode
from megapipe.training.failures import status_of


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """SIGTERM as it was before the test."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("local_rank", "waits"), [("0", []), ("1", [failures.PATIENCE_SECONDS])])
def test_a_mistake_is_told_at_once_by_the_first_rank_and_by_others_where_nobody_has_ended_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], local_rank: str, waits: list[float]
) -> None:
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        assert capsys.readouterr().err == ""
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "a launcher ends it"
        waited.append(seconds)

    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(failures.time, "sleep", sleep)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert status_of(ConfigError("a.b is 3\nc.d is 4")) == ExitCode.WRONG_INPUT
    assert capsys.readouterr().err == "error: a.b is 3\nerror: c.d is 4\n"
    assert waited == waits
