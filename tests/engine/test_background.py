"""Background work of a rank: on a thread of its own, in turns, with its errors raised where its result is read."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megapipe.engine.reductions import Turns, run_beside

CPU = torch.device("cpu")


def test_background_work_does_not_block_the_caller() -> None:
    gate = threading.Event()
    future = run_beside(lambda: gate.wait(10), None)
    assert not future.done()
    gate.set()
    assert future.result(10)


def test_errors_come_out_where_results_are_read() -> None:
    def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_beside(fail, None).result(10)


def test_a_failed_turn_does_not_block_the_next_one() -> None:
    turns = Turns()
    broken = turns.run_beside(lambda: 1 / 0, lambda _: None, CPU)
    assert turns.run_beside(lambda: 2, lambda result: result, CPU).result(10) == 2
    assert isinstance(broken.exception(), ZeroDivisionError)


def test_gpu_turns_share_a_stream_and_await_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has 32 streams, which communicators use, too: a new one for each step would soon be one of theirs."""
    made, awaited = list[Any](), list[str]()

    def stream(device: torch.device) -> Any:
        event = SimpleNamespace(synchronize=lambda: awaited.append("event"))
        made.append(
            SimpleNamespace(
                device=device,
                wait_event=lambda _: None,
                record_event=lambda: event,
                synchronize=lambda: awaited.append("stream"),
            )
        )
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(record_event=object))
    turns, gpu = Turns(), torch.device("cuda", 0)
    gate = threading.Event()
    first = turns.run_beside(lambda: gate.wait(10), lambda result: result, gpu)
    gate.set()
    assert first.result(10)
    assert turns.run_beside(lambda: 2, lambda result: result, gpu).result(10) == 2
    assert len(made) == 1
    assert awaited == ["event", "event"]
