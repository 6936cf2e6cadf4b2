"""Steps recorded action by action: the traces of profile.trace, one file per rank, and the detection of slow ranks."""

import platform
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import megapipe
from megapipe.config.files import write_whole
from megapipe.config.run import PretrainConfig, ReliabilityConfig
from megapipe.engine.engine import Engine
from megapipe.engine.trace import ClockOffset, Recorder, clock_offset
from megapipe.parallel.mesh import Mesh
from megapipe.schedules import dumps
from megapipe.schedules.actions import Kind
from megapipe.schedules.measured.traces import SCHEDULE_FILE, RankTrace, fingerprint, write_rank
from megapipe.schedules.schedule import SECTIONS
from megapipe.training.observe.records import RANKS, TIME_PARTS, print_error


class Profiler:
    """Traces the steps that profile.first_step and profile.steps name; does nothing without profile.trace.

    Call `before` before every step. The trace is written after the last traced step, at the latest at the end of the
    block.
    """

    def __init__(self, config: PretrainConfig, mesh: Mesh, say: Callable[[str], None], first_step: int) -> None:
        """first_step: number, from 0, of the first step of this start of the run."""
        self._config = config
        self._mesh = mesh
        self._say = say
        self._first = first_step + config.profile.first_step - 1
        self._directory = None if config.profile.trace is None else Path(config.profile.trace)
        self._run = ""
        self._offset = ClockOffset(0, 0, False)
        self._recording: tuple[Engine, Recorder] | None = None

    def before(self, step: int, engine: Engine) -> None:
        """Start or end the trace if it is due; call this before a step (counted from 0) is fed. All ranks make the
        same calls, because they compare their clocks in one of them.

        A schedule that never flushes ends a step while the next one is fed, so its trace starts and ends one call
        later.
        """
        if self._directory is None:
            return
        lag = 0 if engine.schedule.flushes else 1
        start, end = self._first - 1 + lag, self._first + self._config.profile.steps + lag
        if self._recording is not None:
            if step >= end or engine is not self._recording[0]:
                self.close()
        elif start <= step < end:
            # This is one step before the first traced step, if possible: ranks wait for each other here, and the
            # pipeline has to fill again.
            self._run = self._mesh.world.all_gather_object(time.strftime("%Y-%m-%d %H:%M:%S"))[0]
            self._offset = clock_offset(self._mesh.world)
            self._recording = engine, _recorded(engine, self._mesh)

    @property
    def recording(self) -> bool:
        """Whether a trace is in progress."""
        return self._recording is not None and self._directory is not None

    def close(self) -> None:
        """Write the trace, once. If the folder cannot be written, the trace is lost and the run continues."""
        if self._directory is None:
            return
        directory, self._directory = self._directory, None
        if self._recording is None:
            self._say(f"profile.trace: the run ended before step {self._first + 1}, the first step to trace")
            return
        engine, recorder = self._recording
        engine.record(None)
        trace = self._trace(engine, recorder)
        try:
            if self._offset.leads_host:
                write_whole(directory / SCHEDULE_FILE, dumps(engine.schedule).encode())
            write_rank(directory, trace)
        except OSError as error:
            print_error(f"warning: rank {self._mesh.rank} could not write its trace to {directory}: {error}")
            return
        first, last = trace.about["steps"]
        self._say(f"traced steps {first} to {last}: megapipe schedule overlay {directory}")

    def _trace(self, engine: Engine, recorder: Recorder) -> RankTrace:
        traced_steps = range(self._first, self._first + self._config.profile.steps)
        events = [event for event in recorder.events(self._offset.nanoseconds) if event.step in traced_steps]
        steps = [event.step + 1 for event in events]
        return RankTrace(
            run=self._run,
            fingerprint=fingerprint(dumps(engine.schedule)),
            rank=self._mesh.rank,
            layout=dict(self._mesh.shape.sizes),
            coordinates={name: self._mesh.coordinate(name) for name in self._mesh.shape.sizes},
            about=self._about(engine, [min(steps, default=0), max(steps, default=0)]),
            clock_error=self._offset.error,
            events=events,
        )

    def _about(self, engine: Engine, steps: list[int]) -> dict[str, Any]:
        """Return the model, versions and steps of the trace; only the devices differ between ranks."""
        config, device = self._config, self._mesh.device
        return {
            "schedule": engine.schedule.header.name,
            "steps": steps,
            "model": asdict(config.model),
            "precision": config.training.precision,
            "sequence_length": config.data.sequence_length,
            "micro_size": config.batch.micro_size,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
            "versions": {
                "megapipe": megapipe.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A device that has failed cannot be read, and the run's own error must be reported.
        with nullcontext() if error is None else suppress(Exception):
            self.close()


_PARTS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward",
    Kind.BACKWARD_WEIGHT: "backward",
    Kind.RECOMPUTE: "backward",
    Kind.UPDATE: "optimizer",
}
"""Part of a step's time by kind of action; all other kinds start communication or copies."""


def _recorded(engine: Engine, mesh: Mesh) -> Recorder:
    """Let an engine record its next actions, and return the recorder."""
    recorder = Recorder(engine.schedule, mesh.coordinate("pipeline"), mesh.device)
    engine.record(recorder)
    return recorder


class StragglerReport:
    """Finds ranks that are slow in several measurements in a row.

    Ranks with the same place in the pipeline do the same work, so their times without waits are compared with each
    other; a rank without such a peer is compared with all other ranks. work: for each rank, a number that is equal for
    ranks with the same work.
    """

    def __init__(self, work: Sequence[int], factor: float, reports: int) -> None:
        self._factor = factor
        self._reports = reports
        self._streaks = [0] * len(work)
        ranks = range(len(work))
        others = [[other for other in ranks if other != rank] for rank in ranks]
        same_work = [[other for other in others[rank] if work[other] == work[rank]] for rank in ranks]
        self._peers = [same_work[rank] or others[rank] for rank in ranks]

    def add(self, seconds: Sequence[float]) -> list[tuple[int, float]]:
        """Add a measurement, and return (rank, its time / median of its peers) for each rank to report now.

        seconds: time of each rank, without waits.
        """
        slow = []
        for rank, mine in enumerate(seconds):
            typical = statistics.median(seconds[peer] for peer in self._peers[rank]) if self._peers[rank] else mine
            ratio = mine / typical if typical > 0 else 1.0
            self._streaks[rank] = self._streaks[rank] + 1 if ratio > self._factor else 0
            if self._streaks[rank] and self._streaks[rank] % self._reports == 0:
                slow.append((rank, ratio))
        return slow


class StragglerWatch:
    """Measures one step in `reliability.stragglers_every` steps, and reports it as event `ranks`. All ranks make the
    same calls."""

    def __init__(
        self, config: ReliabilityConfig, mesh: Mesh, say: Callable[[str], None], notify: Callable[..., None]
    ) -> None:
        self._every = config.stragglers_every
        self._mesh = mesh
        self._say = say
        self._notify = notify
        places = [mesh.shape.coordinates(rank)["pipeline"] for rank in range(mesh.world_size)]
        self._report = StragglerReport(places, config.straggler_factor, config.straggler_reports)
        self._recording: tuple[int, Engine, Recorder] | None = None

    def before(self, step: int, engine: Engine, *, busy: bool) -> None:
        """Start or end a measurement; call this before a step (counted from 0) is fed.

        busy: the profiler records this engine.
        """
        if self._recording is not None:
            self._finish(busy)
        if self._every is not None and not busy and (step + 2) % self._every == 0:
            self._recording = step, engine, _recorded(engine, self._mesh)

    def _finish(self, busy: bool) -> None:
        assert self._recording is not None
        step, engine, recorder = self._recording
        self._recording = None
        if not busy:
            engine.record(None)
        seconds = time_parts(engine, recorder, self._mesh.coordinate("pipeline"))
        values = [*seconds.values(), peak_bytes(self._mesh.device)]
        measurement = torch.tensor(values, dtype=torch.float64, device=self._mesh.device)
        ranks = self._mesh.world.all_gather(measurement).view(self._mesh.world_size, -1).tolist()
        *times, peaks = zip(*ranks, strict=True)
        by_part = {part: [round(value, 6) for value in column] for part, column in zip(TIME_PARTS, times, strict=True)}
        self._notify(RANKS, step=step + 1, **by_part, peak_bytes=[int(value) for value in peaks])
        busy_seconds = [sum(rank[: TIME_PARTS.index("waiting")]) for rank in ranks]
        for rank, ratio in self._report.add(busy_seconds):
            self._say(
                f"warning: rank {rank} is slow: busy for {busy_seconds[rank] * 1e3:.1f} ms of a step, {ratio:.2f} "
                "times the median of the ranks with the same work, in several measurements; all others wait for it"
            )


def time_parts(engine: Engine, recorder: Recorder, rank: int) -> dict[str, float]:
    """Return the recorded seconds of this rank by part of a step. rank: pipeline rank."""
    kinds = {section: [action.kind for action in engine.schedule.actions(section, rank)] for section in SECTIONS}
    seconds = dict.fromkeys(TIME_PARTS, 0.0)
    for event in recorder.events():
        part = _PARTS.get(kinds[event.section][event.position], "communication")
        seconds[part] += (event.end - event.start - event.wait) / 1e9
        seconds["waiting"] += event.wait / 1e9
    return seconds


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this rank: on a GPU of its tensors there, on a CPU of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
