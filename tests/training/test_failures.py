"""The reason of a failed run is printed by one rank, and every rank gives it to torchrun."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megapipe.checkpoint import CheckpointError
from megapipe.config import ConfigError
from megapipe.engine.step import EngineError
from megapipe.parallel.groups import CommunicationError
from megapipe.parallel.rendezvous import Start
from megapipe.training.resilience import failures
from megapipe.training.resilience.failures import OutOfMemory, status_of
from megapipe.training.resilience.guards import NonFiniteError, SpikeError
from megapipe.training.resilience.signals import ExitCode

WRONG = ConfigError("a.b is 3\nc.d is 4")
REASON = "error: a.b is 3\nerror: c.d is 4\n"


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Restore the SIGTERM handler after the test."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def ranks() -> tuple[Start, Start]:
    """Two ranks whose training has started."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(Start, [store] * 2, range(2), [2] * 2, [60.0] * 2)
    first.is_over = second.is_over = True
    return first, second


def lost() -> EngineError:
    error = EngineError("FORWARD of stage 1 waits")
    error.__cause__ = CommunicationError("lost rank 1")
    return error


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (ConfigError, ExitCode.WRONG_INPUT),
        (CheckpointError, ExitCode.WRONG_INPUT),
        (NonFiniteError, ExitCode.NOT_FINITE),
        (SpikeError, ExitCode.SPIKES),
    ],
)
def test_the_first_rank_to_fail_reports_for_all(
    ranks: tuple[Start, Start], capsys: pytest.CaptureFixture[str], kind: type[Exception], status: ExitCode
) -> None:
    error, (first, second) = kind("a.b is 3\nc.d is 4"), ranks
    assert status_of(error, second) == status
    assert capsys.readouterr().err == REASON
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, "each ends with its own status"
    assert status_of(error, first) == status
    assert capsys.readouterr().err == ""


def test_only_a_lost_peer_is_not_printed(ranks: tuple[Start, Start], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = ranks
    assert status_of(OutOfMemory("no memory left"), second) == ExitCode.FAILED
    assert capsys.readouterr().err == "error: no memory left\n"
    assert status_of(lost(), first) == ExitCode.PEER_LOST
    assert capsys.readouterr().err == ""
    second.leave()
    assert status_of(WRONG, first) == ExitCode.WRONG_INPUT
    assert capsys.readouterr().err == REASON


def test_a_rank_reports_if_the_first_one_published_nothing(
    ranks: tuple[Start, Start], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "PATIENCE_SECONDS", 0.05)
    assert ranks[0].reports_first(), "and is killed before it prints"
    assert status_of(OutOfMemory("no memory left"), ranks[1]) == ExitCode.FAILED
    assert capsys.readouterr().err == "error: no memory left\n"


def test_a_defect_shows_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(KeyError("a name"), None) == ExitCode.FAILED
    assert capsys.readouterr().err.endswith("KeyError: 'a name'\n")


@pytest.mark.parametrize(
    ("error", "line"), [(WRONG, "a.b is 3"), (lost(), "FORWARD of stage 1 waits"), (KeyError("x"), "KeyError: 'x'")]
)
def test_torchrun_prints_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, line: str
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    status = status_of(error)
    summary = ChildFailedError("job", {0: ProcessFailure(0, 1, status, str(file))}).format_msg()
    assert f"traceback : {line}" in summary


def test_a_disk_that_cannot_take_the_reason_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no folder" / "error.json"))
    assert status_of(WRONG) == ExitCode.WRONG_INPUT
    assert capsys.readouterr().err == REASON
