"""Delivery of a run's records to its listeners, so that no listener can fail or stall training.

Listeners are called in threads: those of one lane in one thread, in order. A listener that raises an error is closed
and turned off with one warning; `retry`, which the loop calls at each save, opens it again. A lane that blocks, such
as a stopped terminal or a server that does not answer, loses its newest calls, but does not block training.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from megapipe.training.output import print_error
from megapipe.training.records import EvaluationRecord, Listener, StepRecord

TERMINAL = "terminal"
"""The lane whose listener shows lines to people."""

LONGEST_QUEUE = 10_000
"""Maximum number of calls that wait in a lane."""

CLOSE_SECONDS = 30.0
CLOSE_SECONDS_AFTER_ERROR = 5.0
"""Time that a lane has at the end of the run to deliver the calls that wait in it."""

OPEN_SECONDS = 5.0
"""Time that a listener has to open at the end of the run. A server that has not answered by then may never do so."""

_THREAD_NAME = "reports: "

_Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Method of the lane's listeners and its arguments."""


class Listeners(Listener):
    """The listeners of one rank; none on ranks that report nothing. Closes them at the end of its block.

    An error that ends the block is reported to them as event `failed`.
    """

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}

    def add(self, lane: str, name: str, open_listener: Callable[[], Listener]) -> None:
        """Add a listener, which the lane's thread opens before its first call.

        lane: listeners of one lane share a thread; lanes are closed in reverse order of their first listener. name:
        for warnings. open_listener: makes the listener; it is called again where the listener failed.
        """
        if lane not in self._lanes:
            self._lanes[lane] = _Lane(lane, self._warn)
        self._lanes[lane].add(_Guard(name, open_listener))

    def say(self, line: str) -> None:
        self._send("say", line)

    def event(self, name: str, **fields: Any) -> None:
        self._send("event", name, **fields)

    def step(self, record: StepRecord) -> None:
        self._send("step", record)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._send("evaluation", record)

    def retry(self) -> None:
        """Open the listeners again that have failed."""
        self._send("retry")

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Deliver the calls that wait and close all listeners. A lane that takes longer is abandoned."""
        for lane in reversed(list(self._lanes.values())):
            if lane.close(seconds):
                continue
            if lane.opens:
                line = f"warning: {lane.name} had not started when the run ended; its records may be lost"
            else:
                line = f"warning: {lane.name} did not finish within {seconds:g} s; its last records may be lost"
            self._warn(lane.name, line)

    def _send(self, method: str, *arguments: Any, **fields: Any) -> None:
        for lane in self._lanes.values():
            lane.put((method, arguments, fields))

    def _warn(self, lane: str, line: str) -> None:
        """Report a lane's problem in the other lanes, and on standard error if it is the terminal's lane."""
        for other in list(self._lanes.values()):  # a copy, because another thread may add a lane
            if other.name != lane or lane != TERMINAL:
                other.put(("say", (line,), {}))
        if lane == TERMINAL:
            print_error(line)

    def __enter__(self) -> "Listeners":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.event("failed", error=f"{type(error).__name__}: {error}")
        self.close(CLOSE_SECONDS if error is None else CLOSE_SECONDS_AFTER_ERROR)


def any_abandoned() -> bool:
    """Return whether a lane still runs, after all lanes were closed."""
    return any(thread.name.startswith(_THREAD_NAME) for thread in threading.enumerate())


class _Lane:
    """Listeners that one thread calls, in order. warn: called with the lane's name and a line."""

    def __init__(self, name: str, warn: Callable[[str, str], None]) -> None:
        self.name = name
        self._warn = warn
        self._guards: list[_Guard] = []
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._stalled = False
        self._thread = threading.Thread(target=self._run, name=f"{_THREAD_NAME}{name}", daemon=True)
        self._thread.start()

    def add(self, guard: "_Guard") -> None:
        self._guards.append(guard)

    def put(self, call: _Call) -> None:
        if self._calls.qsize() < LONGEST_QUEUE:
            self._calls.put(call)
        elif not self._stalled:
            self._stalled = True
            self._warn(
                self.name,
                f"warning: {self.name} is blocked, and the records from here on are lost; training continues",
            )

    @property
    def opens(self) -> bool:
        """Whether the lane's thread is opening a listener."""
        return any(guard.opens for guard in self._guards)

    def close(self, seconds: float) -> bool:
        """Close the lane, and return whether everything was delivered in time."""
        deadline = time.monotonic() + seconds
        self._calls.put(None)
        self._thread.join(min(seconds, OPEN_SECONDS))
        if not self.opens:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        closing = False
        while not closing or not self._calls.empty():  # a warning of this lane may follow the end
            call = self._calls.get()
            if call is None:
                closing = True
                continue
            method, arguments, fields = call
            for guard in list(self._guards):
                if method == "retry":
                    guard.retry()
                    continue
                line = guard.call(method, arguments, fields)
                if line is not None:
                    self._warn(self.name, line)
        for guard in self._guards:
            line = guard.call("close", (), {})
            if line is not None:
                self._warn(self.name, line)


class _Guard:
    """One listener: open, or turned off because it failed.

    Attributes:
        opens: whether the listener is being opened.
    """

    def __init__(self, name: str, open_listener: Callable[[], Listener]) -> None:
        self._name = name
        self._open = open_listener
        self._listener: Listener | None = None
        self._off = False
        self._warned = False
        self.opens = False

    def retry(self) -> None:
        self._off = False

    def call(self, method: str, arguments: tuple[Any, ...], fields: dict[str, Any]) -> str | None:
        """Call a method of the listener, and return a warning or a note for the other lanes, or None."""
        if self._off or (method == "close" and self._listener is None):
            return None
        try:
            if self._listener is None:
                self.opens = True
                try:
                    self._listener = self._open()
                finally:
                    self.opens = False
                if self._warned:  # shows at once whether a listener of lines works again
                    self._listener.say("(lines are missing here)")
            if getattr(type(self._listener), method) is getattr(Listener, method):
                return None
            getattr(self._listener, method)(*arguments, **fields)
        except BaseException as error:  # a listener's library may even raise SystemExit
            failed, self._listener, self._off = self._listener, None, True
            with contextlib.suppress(BaseException):
                if failed is not None:
                    failed.close()
            if self._warned:
                return None
            self._warned = True
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            return f"warning: {self._name} failed and is turned off until the next save: {reason}; training continues"
        if self._warned:
            self._warned = False
            return f"note: {self._name} works again"
        return None
