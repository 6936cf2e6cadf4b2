"""Delivery of a run's records to its listeners, so that no listener can fail or stall training.

Listeners are called in threads, those of one lane in one thread and in order. A listener that raises is closed and
turned off with one warning; `retry`, which the loop calls at each save, opens it again. A lane that takes no more
calls, such as a terminal that is stopped or a server that does not answer, loses its newest calls and not the run.
"""

import contextlib
import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from megapipe.training.output import print_error
from megapipe.training.records import EvaluationRecord, Listener, StepRecord

TERMINAL = "terminal"
"""The lane whose listener shows lines to people."""

LONGEST_QUEUE = 10_000
"""Calls that wait in a lane at most."""

CLOSE_SECONDS = 30.0
CLOSE_SECONDS_AFTER_ERROR = 5.0
"""Time that a lane has for the calls that wait in it when the run ends."""

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
        """Deliver the calls that wait and close all listeners; a lane that takes longer is left behind."""
        for lane in reversed(list(self._lanes.values())):
            if not lane.close(seconds):
                line = f"warning: {lane.name} did not end within {seconds:g} s; its last records may be lost"
                self._warn(lane.name, line)

    def _send(self, method: str, *arguments: Any, **fields: Any) -> None:
        for lane in self._lanes.values():
            lane.put((method, arguments, fields))

    def _warn(self, lane: str, line: str) -> None:
        """Report a problem of a lane in the others, and on standard error where the terminal's own lane has it."""
        for other in list(self._lanes.values()):  # another thread may add a lane meanwhile
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


class _Lane:
    """Listeners that one thread calls, in order. warn: called with the lane's name and a line."""

    def __init__(self, name: str, warn: Callable[[str, str], None]) -> None:
        self.name = name
        self._warn = warn
        self._guards: list[_Guard] = []
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._stalled = False
        self._thread = threading.Thread(target=self._run, name=f"reports: {name}", daemon=True)
        self._thread.start()

    def add(self, guard: "_Guard") -> None:
        self._guards.append(guard)

    def put(self, call: _Call) -> None:
        if self._calls.qsize() < LONGEST_QUEUE:
            self._calls.put(call)
        elif not self._stalled:
            self._stalled = True
            self._warn(
                self.name, f"warning: {self.name} takes no more records and loses those to come; training continues"
            )

    def close(self, seconds: float) -> bool:
        """Whether everything was delivered in time."""
        self._calls.put(None)
        self._thread.join(seconds)
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
    """One listener: open, or turned off because it failed. Methods return a line for people, or None."""

    def __init__(self, name: str, open_listener: Callable[[], Listener]) -> None:
        self._name = name
        self._open = open_listener
        self._listener: Listener | None = None
        self._off = False
        self._warned = False

    def retry(self) -> None:
        self._off = False

    def call(self, method: str, arguments: tuple[Any, ...], fields: dict[str, Any]) -> str | None:
        if self._off or (method == "close" and self._listener is None):
            return None
        try:
            if self._listener is None:
                self._listener = self._open()
                if self._warned:  # a listener of lines shows whether it works; others do so with their next record
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
            return f"warning: {self._name} fails and is turned off until the next save: {reason}; training continues"
        if self._warned:
            self._warned = False
            return f"note: {self._name} works again"
        return None
