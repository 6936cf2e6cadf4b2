"""Stand-ins for what torch.cuda gives a program: streams, events, properties, memory, which check instead of run."""

import ctypes
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch

from tests.fake_cuda.build import shim
from tests.fake_cuda.timeline import Timeline

TOTAL_MEMORY = 80 << 30


class Properties:
    """Properties of the imitated device: an H100."""

    name = "NVIDIA H100 80GB HBM3"
    total_memory = TOTAL_MEMORY
    multi_processor_count = 132
    L2_cache_size = 50 << 20
    max_threads_per_multi_processor = 2048
    regs_per_multiprocessor = 65536
    shared_memory_per_multiprocessor = 228 << 10
    warp_size = 32
    major, minor = 9, 0
    uuid = "fake"


class Device:
    """The current device, its streams and the program's view of them."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.events: dict[int, dict[int, int]] = {}
        # Kept here: the shim calls them as long as the process lives.
        self._record = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(self._recorded)
        self._block = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(self._blocked)
        self._use = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(timeline.record_stream)

    def install(self, count: int = 1) -> None:
        """Put the stand-ins in place of torch.cuda's functions, for the rest of the process."""
        callbacks = (ctypes.cast(each, ctypes.c_void_p) for each in (self._record, self._block, self._use))
        shim().fake_cuda_connect(*callbacks, count)
        stream, event = _stream_class(self), _event_class(self)
        for name, value in {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: count,
            "current_device": lambda: shim().fake_cuda_device(),
            "set_device": lambda device: shim().fake_cuda_set_device(torch.device(device).index or 0),
            "get_device_capability": lambda device=None: (Properties.major, Properties.minor),
            "get_device_properties": lambda device=None: Properties,
            "get_device_name": lambda device=None: Properties.name,
            "mem_get_info": lambda device=None: (TOTAL_MEMORY - self.timeline.live_total, TOTAL_MEMORY),
            "memory_allocated": lambda device=None: self.timeline.live_total,
            "memory_reserved": lambda device=None: self.timeline.live_total,
            "max_memory_allocated": lambda device=None: self.timeline.peak_total,
            "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": lambda state, device=None: None,
            "manual_seed": lambda seed: None,
            "manual_seed_all": lambda seed: None,
            "is_current_stream_capturing": lambda: False,
            "synchronize": lambda device=None: self.timeline.synchronize_device("torch.cuda.synchronize"),
            "Stream": stream,
            "Event": event,
            "current_stream": lambda device=None: stream.numbered(self.current),
            "default_stream": lambda device=None: stream.numbered(0),
            "stream": self.entered,
            "device": _on_device,
        }.items():
            setattr(torch.cuda, name, value)

    @property
    def current(self) -> int:
        """This thread's current stream."""
        return int(shim().fake_cuda_stream())

    @contextmanager
    def entered(self, stream: Any) -> Iterator[None]:
        """torch.cuda.stream."""
        before = self.current
        if stream is not None:
            shim().fake_cuda_set_stream(stream.stream_id)
        try:
            yield
        finally:
            shim().fake_cuda_set_stream(before)

    def _recorded(self, stream: int) -> int:
        number = len(self.events) + 1
        self.events[number] = self.timeline.record(stream)
        return number

    def _blocked(self, event: int, stream: int) -> None:
        self.timeline.follow(stream, self.events[event])


@contextmanager
def _on_device(device: Any) -> Iterator[None]:
    """torch.cuda.device."""
    before = shim().fake_cuda_device()
    index = device if isinstance(device, int) else torch.device(device).index
    if index is not None:
        shim().fake_cuda_set_device(index)
    try:
        yield
    finally:
        shim().fake_cuda_set_device(before)


def _stream_class(device: Device) -> Any:
    timeline = device.timeline

    class Stream:
        """torch.cuda.Stream."""

        def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
            self.stream_id = timeline.new_stream()
            self.device = torch.device("cuda", shim().fake_cuda_device())

        @classmethod
        def numbered(cls, number: int) -> "Stream":
            stream = cls.__new__(cls)
            stream.stream_id, stream.device = number, torch.device("cuda", shim().fake_cuda_device())
            return stream

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.stream_id == self.stream_id

        def __hash__(self) -> int:
            return hash(self.stream_id)

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def wait_stream(self, stream: "Stream") -> None:
            timeline.wait(self.stream_id, timeline.record(stream.stream_id))

        def record_event(self, event: Any = None) -> Any:
            event = torch.cuda.Event() if event is None else event
            event.record(self)
            return event

        def synchronize(self) -> None:
            timeline.synchronize(timeline.record(self.stream_id), "Stream.synchronize")

    return Stream


def _event_class(device: Device) -> Any:
    timeline = device.timeline

    class Event:
        """torch.cuda.Event. One that was never recorded has nothing to wait for."""

        def __init__(self, **kwargs: Any) -> None:
            self._clock: dict[int, int] = {}

        def record(self, stream: Any = None) -> None:
            self._clock = timeline.record(device.current if stream is None else stream.stream_id)

        def wait(self, stream: Any = None) -> None:
            timeline.wait(device.current if stream is None else stream.stream_id, self._clock)

        def synchronize(self) -> None:
            timeline.synchronize(self._clock, "Event.synchronize")

    return Event


class Baton:
    """Lets one thread of the program run at a time: another one runs while it waits for a lock, a queue or a future.

    FakeTensorMode has one state for all threads, and a run that does not depend on timing is the same every time. A
    thread starts as late as it can, when another one waits, so that what is not waited for is not there yet.
    What ends on one thread and is waited for on another hands over what the first one's clock knows.
    """

    def __init__(self, timeline: Timeline, enter: Callable[[], Any]) -> None:
        """enter: gives a context in which a new thread runs."""
        self._lock = threading.Lock()
        self._timeline = timeline
        self._enter = enter
        self._local = threading.local()

    def install(self) -> None:
        """Take the baton, and let every thread that starts from now on wait for it."""
        self._take()
        self._hand_clocks_over()
        start, run, join = threading.Thread.start, threading.Thread.run, threading.Thread.join
        wait, sleep, baton = threading.Condition.wait, time.sleep, self

        def run_with_baton(thread: threading.Thread) -> None:
            baton._take()
            baton._timeline.learn(thread)
            try:
                with baton._enter():
                    run(thread)
            finally:
                baton._timeline.publish(thread)
                baton._give()

        def start_later(thread: threading.Thread) -> None:
            baton._local.starts = True
            try:
                start(thread)
            finally:
                baton._local.starts = False

        def wait_without_baton(condition: threading.Condition, timeout: float | None = None) -> bool:
            if not baton._has() or getattr(baton._local, "starts", False):
                return wait(condition, timeout)
            baton._give()
            try:
                return wait(condition, timeout)
            finally:
                # Never wait for the baton with a lock in hand: its owner may want that lock.
                if not baton._lock.acquire(blocking=False):
                    saved = condition._release_save()  # type: ignore[attr-defined]
                    baton._lock.acquire()
                    condition._acquire_restore(saved)  # type: ignore[attr-defined]
                baton._local.has_baton = True

        def join_without_baton(thread: threading.Thread, timeout: float | None = None) -> None:
            had_baton = baton._has()
            with baton._away():
                join(thread, timeout)
            if had_baton:
                baton._timeline.learn(thread)

        def sleep_without_baton(seconds: float) -> None:
            with baton._away():
                sleep(seconds)

        time.sleep = sleep_without_baton
        queue.SimpleQueue = queue._PySimpleQueue  # type: ignore[attr-defined,misc]  # the other one blocks in C
        threading.Thread.start = start_later  # type: ignore[method-assign]
        threading.Thread.run = run_with_baton  # type: ignore[method-assign]
        threading.Condition.wait = wait_without_baton  # type: ignore[method-assign]
        threading.Thread.join = join_without_baton  # type: ignore[method-assign]

    def _hand_clocks_over(self) -> None:
        """Copy a thread's clock to the thread that receives its result, its message or its start."""
        for owner, senders, receivers in (
            (threading.Thread, ("start",), ()),
            (threading.Event, ("set",), ("wait", "is_set")),
            (queue.Queue, ("put",), ("get",)),
            (Future, ("set_result", "set_exception"), ("result", "exception")),
        ):
            for name in senders:
                setattr(owner, name, self._before(getattr(owner, name)))
            for name in receivers:
                setattr(owner, name, self._after(getattr(owner, name)))

    def _before(self, method: Any) -> Any:
        @functools.wraps(method)
        def call(owner: Any, *arguments: Any, **named: Any) -> Any:
            self._timeline.publish(owner)
            return method(owner, *arguments, **named)

        return call

    def _after(self, method: Any) -> Any:
        @functools.wraps(method)
        def call(owner: Any, *arguments: Any, **named: Any) -> Any:
            result = method(owner, *arguments, **named)
            self._timeline.learn(owner)
            return result

        return call

    def _has(self) -> bool:
        # A thread of autograd's runs while the thread that waits for it has the baton.
        of_autograd = isinstance(threading.current_thread(), threading._DummyThread)
        return of_autograd or getattr(self._local, "has_baton", False)

    @contextmanager
    def _away(self) -> Iterator[None]:
        """Let other threads run if this one has the baton."""
        has_baton = self._has()
        if has_baton:
            self._give()
        try:
            yield
        finally:
            if has_baton:
                self._take()

    def _take(self) -> None:
        self._lock.acquire()
        self._local.has_baton = True

    def _give(self) -> None:
        self._local.has_baton = False
        self._lock.release()
