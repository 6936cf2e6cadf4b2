"""The checks of several ranks that gpu-check runs, here with threads as ranks, and that they can fail."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import ranks_check
from benchmarks.gpu_check import detail
from benchmarks.ranks_check import Check, Different, check_groups, check_links, checks, compared
from megapipe.parallel.in_process import InProcessLink, ThreadGroup, in_process_meshes, run_in_process
from tests.schedules.support import TRAINED


def run_check(name: str, ranks: int) -> list[str]:
    check = next(check for check in checks(ranks) if check.name == name)
    results: list[str] = run_in_process(in_process_meshes(check.sizes, timeout=20.0), check.run)
    return results


def test_links_and_groups_of_threads() -> None:
    assert run_check("links", 4) == ["36 messages over 12 links"] * 4
    lines = run_check("groups", 4)
    assert "data of 2" in lines[0]
    assert "pipeline of 2" in lines[0]


@pytest.mark.parametrize("name", ["1f1b", "2bw", "ZeRO 2"])
def test_training_equals_one_device(name: str) -> None:
    lines = run_check(name, 2)
    assert lines[0] == lines[1]
    assert "the same bits as one device" in lines[0] or name == "ZeRO 2"


def test_every_schedule_has_a_check() -> None:
    for ranks in (2, 8):
        names = [check.name for check in checks(ranks)]
        assert len(set(names)) == len(names)
        assert set(TRAINED) < set(names)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_a_wrong_collective_is_found(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element is off, in a result or in what was overwritten."""
    right = getattr(ThreadGroup, operation)

    def wrong(self: ThreadGroup, tensor: Tensor, *arguments: Any) -> Any:
        result = right(self, tensor, *arguments)
        changed = result if isinstance(result, Tensor) else tensor
        changed.view(-1)[-1] += 1
        return result

    monkeypatch.setattr(ThreadGroup, operation, wrong)
    with pytest.raises(Different, match="elements are wrong"):
        run_in_process(in_process_meshes({"data": 2}, timeout=20.0), check_groups)


def test_a_wrong_message_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = InProcessLink.send
    monkeypatch.setattr(InProcessLink, "send", lambda self, tensor: right(self, tensor + (self.edge.source == 1)))
    with pytest.raises(Different, match="link 1->0"):
        run_in_process(in_process_meshes({"pipeline": 2}, timeout=20.0), check_links)


def test_losses_that_differ_are_reported() -> None:
    exact = [(4.0, 1.0), (3.5, 2.0)]
    assert compared(exact, exact) == "2 steps, the same bits as one device; losses 4.0000, 3.5000"
    assert "within 5.0e-07 of" in compared([(4.0, 1.0), (3.5, 2.000001)], exact)
    with pytest.raises(Different, match=r"gradient norm 2\.001 on the ranks, 2\.0 on one device"):
        compared([(4.0, 1.0), (3.5, 2.001)], exact)
    with pytest.raises(Different, match="loss nan"):
        compared([(float("nan"), 1.0), (3.5, 2.0)], exact)


def test_a_failure_is_the_last_summary(capsys: pytest.CaptureFixture[str]) -> None:
    (alone,) = in_process_meshes({})
    passing = Check("one", {}, lambda mesh: "all well")
    failing = Check("two", {}, lambda mesh: compared([(1.0, 1.0)], [(2.0, 1.0)]))
    ranks_check.run_checks(alone, [passing])
    assert detail(capsys.readouterr().out) == "all well"
    with pytest.raises(Different):
        ranks_check.run_checks(alone, [passing, failing])
    assert detail(capsys.readouterr().out) == "two, rank 0: loss 1.0 on the ranks, 2.0 on one device"


def test_unknown_checks_and_single_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["ranks_check.py", "--checks", "links"])
    with pytest.raises(SystemExit, match="1 rank was started, and the checks need at least 2"):
        ranks_check.main()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("sys.argv", ["ranks_check.py", "--checks", "linsk"])
    with pytest.raises(SystemExit, match="there is no check 'linsk' for 2 ranks; choose from links; groups; 1f1b"):
        ranks_check.main()
    assert not torch.distributed.is_initialized()
