"""The ranks of one start meet and agree, or all of them end with one reason."""

import contextlib
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megapipe.parallel import rendezvous
from megapipe.parallel.groups import LaunchError
from megapipe.parallel.rendezvous import Start, StartError, connect, in_words
from tests.support.ranks import free_port


def meet(store: dist.Store, rank: int, world_size: int, timeout: float = 60.0) -> Start:
    return Start(store, rank, world_size, timeout)


def met(*timeouts: float) -> list[Start]:
    """Starts of ranks that have met, each with its time-out."""
    store, size = dist.HashStore(), len(timeouts)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(Start, [store] * size, range(size), [size] * size, timeouts))


def test_every_start_has_its_own_name() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as threads:
        for dying in (2, 1, None):  # the first two starts lose a rank before it has asked
            ranks = [rank for rank in (1, 2) if rank != dying]
            asked = [threads.submit(meet, store, rank, 3) for rank in ranks]
            if dying is not None:
                for start in (meet(store, 0, 3, 0.3), asked[0].result()):
                    with pytest.raises(StartError, match=rf"^rank {dying} did not start within 0\.3 s"):
                        start.wait_for_all()
                store.set(f"start/asks {dying}", "the token of a dead rank")
                continue
            starts = [meet(store, 0, 3), *(each.result() for each in asked)]
            said = [threads.submit(start.exchange, str(start.rank), ",".join) for start in starts]
            assert [each.result() for each in said] == ["0,1,2"] * 3


def test_a_missing_first_rank_is_named() -> None:
    with pytest.raises(LaunchError, match=r"rank 1: rank 0 did not start within 0.1 s"):
        meet(dist.HashStore(), 1, 2, 0.1)


def failed(start: Start, problems: dict[int, str]) -> str:
    start.exchange("", lambda _: "fine")
    try:
        if start.rank in problems:
            start.fail(problems[start.rank])
        return start.exchange("", lambda _: "never asked")
    except StartError as error:
        return str(error)


@pytest.mark.parametrize(
    ("problems", "message"),
    [
        (dict.fromkeys(range(4), "a is 3"), "a is 3"),
        ({1: "a is 3\nb is 4", 2: "b is 4"}, "rank 1: a is 3\nranks 1-2: b is 4"),
    ],
)
def test_problems_of_any_rank_end_all_with_one_message(problems: dict[int, str], message: str) -> None:
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(failed, met(*[60.0] * 4), [problems] * 4)) == {message}


def test_a_problem_is_reported_although_a_rank_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "GRACE_SECONDS", 0.2)
    first, second, _ = met(60.0, 60.0, 60.0)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(first.exchange, "", lambda _: "never asked")
        with pytest.raises(StartError, match=r"^rank 1: a is 3$"):  # rank 2 says nothing
            second.fail("a is 3")
        with pytest.raises(StartError, match=r"^rank 1: a is 3$"):
            asked.result()


def test_a_silent_rank_is_named() -> None:
    with pytest.raises(StartError, match=r"^rank 1 did not respond within 0\.2 s"):
        met(0.2, 60.0)[0].exchange("", lambda _: "never asked")


def test_only_one_rank_reports() -> None:
    first, second = met(60.0, 60.0)
    assert [second.reports_first(), first.reports_first()] == [True, False]
    assert first.first_report(0.01) is None
    second.publish_report("a is 3")
    assert first.first_report(60.0) == "a is 3"
    with ThreadPoolExecutor(1) as threads:
        left = threads.submit(first.leave)
        second.leave()
        left.result(2.0)


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_in_words_name_each_rank_once(ranks: set[int]) -> None:
    words = in_words(ranks)
    named: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", words):
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(ranks)
    assert words.startswith("ranks " if len(ranks) > 1 else "rank ")


def test_a_port_in_use_is_named() -> None:
    with (
        socket.create_server(("", 0)) as listener,
        pytest.raises(LaunchError, match=f"cannot listen on MASTER_PORT={listener.getsockname()[1]} .*in use"),
    ):
        connect("localhost", listener.getsockname()[1], 0, serve=True, timeout=30.0)


@pytest.mark.parametrize(
    ("address", "reason"), [("localhost", "Connection refused"), ("no.such.host.invalid", "[Nn]ame|resol")]
)
def test_an_address_that_nothing_answers_at_is_named(address: str, reason: str) -> None:
    start = time.monotonic()
    with pytest.raises(LaunchError, match=rf"rank 1 .*MASTER_ADDR={address} .*within 0\.3 s.*({reason})"):
        connect(address, free_port(), 1, serve=False, timeout=0.3)
    assert time.monotonic() - start < 10.0


def answer_wrongly(listener: socket.socket) -> None:
    """Answer like a web server or a proxy."""
    with contextlib.suppress(OSError):
        while True:
            with listener.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize("answers", [False, True])
def test_a_listener_that_is_no_store_is_named(
    answers: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_MARGIN_SECONDS", 2.0 if answers else 0.1)
    before = set(threading.enumerate())
    with socket.create_server(("", 0)) as listener:
        if answers:
            threading.Thread(target=answer_wrongly, args=[listener], daemon=True).start()
        with pytest.raises(LaunchError, match=r"within 0\.5 s.*does not answer like rank 0 of a job"):
            connect("localhost", listener.getsockname()[1], 1, serve=False, timeout=0.5)
        assert capfd.readouterr() == ("", ""), "torch prints its stack"
        if answers:
            assert len(set(threading.enumerate()) - before) == 1, "torch has given up"
        listener.shutdown(socket.SHUT_RDWR)
    for thread in set(threading.enumerate()) - before:
        thread.join()  # torch gives up now that the listener is gone
