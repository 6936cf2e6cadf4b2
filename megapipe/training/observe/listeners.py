"""Delivery of a run's records to its listeners, so that no listener can fail or stall training.

Listeners are called in threads: those of one lane in one thread, in order. A listener that raises an error is closed
and turned off with one warning; `retry`, which the loop calls at each save, opens it again. A lane that blocks, such
as a stopped terminal or a server that does not answer, loses its newest calls, but does not block training.
"""

import contextlib
import netrc
import os
import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

from megapipe.config.run import PretrainConfig
from megapipe.training.observe.records import RANKS, TIME_PARTS, EvaluationRecord, Listener, StepRecord, print_error

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
        for warnings. open_listener: makes the listener; it is called again after the listener has failed.
        """
        if lane not in self._lanes:
            self._lanes[lane] = _Lane(lane, self._warn)
        self._lanes[lane].guards.append(_Guard(name, open_listener))

    def say(self, line: str) -> None:
        self._send("say", line)

    def event(self, name: str, **fields: Any) -> None:
        self._send("event", name, **fields)

    def step(self, record: StepRecord) -> None:
        self._send("step", record)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._send("evaluation", record)

    def retry(self) -> None:
        """Reopen the listeners that have failed."""
        self._send("retry")

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Deliver the calls that wait and close all listeners. A lane that takes longer is abandoned."""
        for lane in reversed(list(self._lanes.values())):
            if not lane.close(seconds):
                late = "had not started when the run ended; its records may be lost"
                slow = f"did not finish within {seconds:g} s; its last records may be lost"
                self._warn(lane.name, f"warning: {lane.name} {late if lane.opens else slow}")

    def _send(self, method: str, *arguments: Any, **fields: Any) -> None:
        for lane in self._lanes.values():
            lane.put((method, arguments, fields))

    def _warn(self, lane: str, line: str) -> None:
        """Report a lane's problem in the other lanes, and on standard error if it is the terminal's lane."""
        # A copy, because another thread may add a lane.
        for other in list(self._lanes.values()):
            if other.name != lane or lane != TERMINAL:
                other.put(("say", (line,), {}))
        if lane == TERMINAL:
            print_error(line)

    def __enter__(self) -> "Listeners":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
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
        self.guards: list[_Guard] = []
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._stalled = False
        self._thread = threading.Thread(target=self._run, name=f"{_THREAD_NAME}{name}", daemon=True)
        self._thread.start()

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
        return any(guard.opens for guard in self.guards)

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
        # A warning of this lane may follow the end.
        while not closing or not self._calls.empty():
            call = self._calls.get()
            if call is None:
                closing = True
                continue
            self._deliver(call)
        self._deliver(("close", (), {}))

    def _deliver(self, call: _Call) -> None:
        for guard in list(self.guards):
            line = guard.call(*call)
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

    def call(self, method: str, arguments: tuple[Any, ...], fields: dict[str, Any]) -> str | None:
        """Call a method of the listener, and return a warning or a note for the other lanes, or None. Method `retry`
        turns the listener on again."""
        if method == "retry":
            self._off = False
            return None
        if self._off or (method == "close" and self._listener is None):
            return None
        try:
            if self._listener is None:
                self.opens = True
                try:
                    self._listener = self._open()
                finally:
                    self.opens = False
                # For a listener of lines, this shows at once whether it works again.
                if self._warned:
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


WANDB_HOST = "https://api.wandb.ai"


def add_trackers(listeners: Listeners, config: PretrainConfig, resumed: bool) -> None:
    """Add the trackers that the configuration asks for. resumed: the run continues from a checkpoint."""
    folder = Path(config.training.directory) / "tensorboard"
    if config.tracking.tensorboard:
        listeners.add("TensorBoard", "TensorBoard", lambda: TensorBoard(folder))
        listeners.say(f"TensorBoard: tensorboard --logdir {folder}")
    if config.tracking.wandb_project:
        name = "Weights & Biases"
        listeners.add(name, name, lambda: WeightsAndBiases(config, resumed, listeners.say))


def step_scalars(record: StepRecord) -> dict[str, float]:
    """Return the values of a step, by curve."""
    loads = record.expert_load_variations
    return {
        "train/loss": record.loss,
        "train/learning_rate": record.learning_rate,
        "train/gradient_norm": record.gradient_norm,
        "train/consumed_samples": record.consumed_samples,
        "train/batch_size": record.samples,
        "speed/tokens_per_second": record.tokens / record.seconds,
        "speed/mfu": record.mfu,
        "speed/step_seconds": record.seconds,
        "speed/data_seconds": record.data_seconds,
        **{f"train/{name}_loss": loss for name, loss in record.terms.items()},
        **({} if record.loss_scale is None else {"train/loss_scale": record.loss_scale}),
        **({"experts/mean_load_variation": fmean(loads), "experts/worst_load_variation": max(loads)} if loads else {}),
    }


class Tracker(Listener):
    """Turns records into named values for `log`. Trackers start in the background, so that a server that cannot be
    reached does not delay training."""

    @abstractmethod
    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Store values, by the name of their curve, for a step."""

    def step(self, record: StepRecord) -> None:
        self.log(step_scalars(record), record.step)

    def evaluation(self, record: EvaluationRecord) -> None:
        scalars = {
            "validation/loss": record.loss,
            "validation/perplexity": record.perplexity,
            **{f"validation/{name}_loss": loss for name, loss in record.terms.items()},
            **{f"validation/{name}_accuracy": share for name, share in record.accuracies.items()},
        }
        self.log(scalars, record.step)

    def event(self, name: str, **fields: Any) -> None:
        """Store the mean of each part of the step time, and each rank's memory; other events have no curves."""
        if name == RANKS:
            times = {f"step_time/{part}": fmean(fields[part]) for part in TIME_PARTS}
            memory = {f"memory/rank_{rank}_peak_bytes": float(peak) for rank, peak in enumerate(fields["peak_bytes"])}
            self.log(times | memory, fields["step"])


class TensorBoard(Tracker):
    """Writes event files in `directory`; a resumed run adds one that continues the curves."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory))

    def evaluation(self, record: EvaluationRecord) -> None:
        """Write the values to disk at once, because an evaluation may end the run."""
        super().evaluation(record)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)


class WeightsAndBiases(Tracker):
    """Logs to a wandb run in the run's folder.

    WANDB_MODE is used if it is set. Otherwise the run is online if an API key is configured, else offline, because
    wandb would ask for a key. A resumed run continues the wandb run whose id is in the folder.
    """

    def __init__(self, config: PretrainConfig, resumed: bool, say: Callable[[str], None]) -> None:
        import wandb

        directory = Path(config.training.directory)
        directory.mkdir(parents=True, exist_ok=True)
        identity = directory / "wandb-run-id"
        previous = identity.read_text().strip() if resumed and identity.exists() else None
        mode = wandb_mode()
        self._run = wandb.init(
            project=config.tracking.wandb_project,
            dir=str(directory),
            mode=mode,  # type: ignore[arg-type]  # one of its literals, or what WANDB_MODE holds
            id=previous,
            resume="allow" if previous else None,
            config=asdict(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        try:
            identity.write_text(self._run.id + "\n")
        except OSError:
            self._run.finish()  # the next attempt starts another run
            raise
        say(f"Weights & Biases: {mode} run {self._run.id} in {directory / 'wandb'}")

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


def wandb_mode() -> str:
    """Return WANDB_MODE if it is set; otherwise `online` if wandb finds an API key without asking, else `offline`."""
    if "WANDB_MODE" in os.environ:
        return os.environ["WANDB_MODE"]
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    host = urlsplit(os.environ.get("WANDB_BASE_URL", WANDB_HOST)).hostname or ""
    try:
        credentials = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        credentials = None
    return "online" if credentials else "offline"
