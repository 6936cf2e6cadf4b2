"""What a failed run says: what all ranks come to once, by the first one, and a wrong input else by whoever has it."""

import signal
from collections.abc import Iterator

import pytest

from megapipe.config.errors import ConfigError
from megapipe.training import failures
from megapipe.training.exit_codes import ExitCode
from megapipe.training.failures import status_of
from megapipe.training.spikes import SpikeError


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """SIGTERM as it was before the test."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("error", "status", "variable", "others_tell"),
    [
        (ConfigError("a.b is 3\nc.d is 4"), ExitCode.WRONG_INPUT, "LOCAL_RANK", True),
        (SpikeError("a.b is 3\nc.d is 4"), ExitCode.SPIKES, "RANK", False),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_tells_at_once_and_others_wait_to_be_ended(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    status: ExitCode,
    variable: str,
    others_tell: bool,
    rank: int,
) -> None:
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        assert capsys.readouterr().err == ""
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "a launcher ends it"
        waited.append(seconds)

    monkeypatch.setenv(variable, str(rank))
    monkeypatch.setattr(failures.time, "sleep", sleep)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert status_of(error) == status
    tells = rank == 0 or others_tell
    assert capsys.readouterr().err == ("error: a.b is 3\nerror: c.d is 4\n" if tells else "")
    assert waited == [failures.PATIENCE_SECONDS] * (rank != 0)
