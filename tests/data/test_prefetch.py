"""The prefetch thread keeps the order, stays bounded, hands on errors and ends when told."""

import itertools
import threading
import time
from collections.abc import Iterator

import pytest

from megapipe.data.prefetch import Prefetcher


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_results_come_in_order_and_the_thread_ends() -> None:
    with Prefetcher(lambda x: x * x, range(50), depth=3) as squares:
        assert list(squares) == [x * x for x in range(50)]
        assert list(squares) == []
    assert prefetch_threads() == []


def test_endless_requests_are_loaded_only_a_bounded_number_ahead() -> None:
    loaded: list[int] = []
    with Prefetcher(loaded.append, itertools.count(), depth=2) as results:
        next(results)
        deadline = time.monotonic() + 10
        while len(loaded) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert loaded == [0, 1, 2, 3]  # one taken, two waiting, one loaded and waiting for room
    assert prefetch_threads() == []


def test_errors_arrive_in_their_turn() -> None:
    def load(x: int) -> int:
        if x == 2:
            raise OSError("disk on fire")
        return x

    with Prefetcher(load, itertools.count(), depth=8) as results:
        assert next(results) == 0
        assert next(results) == 1
        with pytest.raises(OSError, match="disk on fire"):
            next(results)
        assert list(results) == []


def test_errors_of_the_requests_arrive_too() -> None:
    def requests() -> Iterator[int]:
        yield 1
        raise KeyError("plan")

    with Prefetcher(lambda x: x, requests()) as results:
        assert next(results) == 1
        with pytest.raises(KeyError, match="plan"):
            next(results)


def test_running_out_inside_load_is_not_taken_for_the_end() -> None:
    with (
        Prefetcher(lambda x: next(iter(())), [7]) as results,
        pytest.raises(RuntimeError, match="loads 7 raised StopIteration"),
    ):
        list(results)


def test_loading_overlaps_the_consumer() -> None:
    started = threading.Event()

    def load(x: int) -> int:
        if x == 1:
            started.set()
        return x

    with Prefetcher(load, range(2), depth=2) as results:
        assert started.wait(10)  # request 1 is loaded though nothing was taken
        assert list(results) == [0, 1]


@pytest.mark.parametrize("depth", [1, 3])
def test_close_at_any_moment(depth: int) -> None:
    for taken in range(6):
        prefetcher = Prefetcher(lambda x: x, itertools.count(), depth=depth)
        assert list(itertools.islice(prefetcher, taken)) == list(range(taken))
        prefetcher.close()
        prefetcher.close()
        assert list(prefetcher) == []
    assert prefetch_threads() == []


def test_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="depth is 0"):
        Prefetcher(lambda x: x, [], depth=0)
