"""Ranks that are slower than their like: one of them sets the pace of all.

Every so many steps one step is recorded (engine.trace), and each rank reports where the time of that step went and its
peak memory. Ranks at one place of the pipeline do the same work, so their times without waits are compared with each
other; a rank without such a peer is compared with all other ranks.
"""

import resource
import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megapipe.config.reliability import ReliabilityConfig
from megapipe.engine.engine import Engine
from megapipe.engine.trace import Recorder
from megapipe.parallel.mesh import Mesh
from megapipe.schedules.actions import Kind
from megapipe.schedules.schedule import SECTIONS
from megapipe.training.records import RANKS, TIME_PARTS

_PARTS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward",
    Kind.BACKWARD_WEIGHT: "backward",
    Kind.RECOMPUTE: "backward",
    Kind.UPDATE: "optimizer",
}
"""Part of a step's time by kind of action; all other kinds start communication or copies."""


class Notify(Protocol):
    """Receives an event of the run, as `Listener.event` does."""

    def __call__(self, name: str, **fields: object) -> None: ...


class StragglerReport:
    """Who has been slow in several measurements in a row.

    like: for each rank, a number that ranks with the same work share.
    """

    def __init__(self, like: Sequence[int], factor: float, reports: int) -> None:
        self._factor = factor
        self._reports = reports
        self._streaks = [0] * len(like)
        peers = [[r for r, other in enumerate(like) if other == mine and r != rank] for rank, mine in enumerate(like)]
        self._peers = [found or [r for r in range(len(like)) if r != rank] for rank, found in enumerate(peers)]

    def take(self, seconds: Sequence[float]) -> list[tuple[int, float]]:
        """One measurement, by rank. Returns (rank, its time over its peers' median) of ranks to be named now."""
        found = []
        for rank, own in enumerate(seconds):
            others = statistics.median(seconds[peer] for peer in self._peers[rank]) if self._peers[rank] else own
            ratio = own / others if others > 0 else 1.0
            self._streaks[rank] = self._streaks[rank] + 1 if ratio > self._factor else 0
            if self._streaks[rank] and self._streaks[rank] % self._reports == 0:
                found.append((rank, ratio))
        return found


class StragglerWatch:
    """Measures one step in `reliability.stragglers_every` steps, and reports it as event `ranks`. All ranks make the
    same calls."""

    def __init__(self, config: ReliabilityConfig, mesh: Mesh, say: Callable[[str], None], notify: Notify) -> None:
        self._every = config.stragglers_every
        self._mesh = mesh
        self._say = say
        self._notify = notify
        coordinates = [mesh.shape.coordinates(rank) for rank in range(mesh.world_size)]
        places = [each["pipeline"] for each in coordinates]
        self._report = StragglerReport(places, config.straggler_factor, config.straggler_reports)
        self._recording: tuple[int, Engine, Recorder] | None = None

    def before(self, step: int, engine: Engine, *, busy: bool) -> None:
        """Start or end a measurement; call this before a step (counted from 0) is fed.

        busy: the profiler records this engine.
        """
        if self._recording is not None:
            self._finish(busy)
        if self._every is not None and not busy and (step + 2) % self._every == 0:
            recorder = Recorder(engine.schedule, self._mesh.coordinate("pipeline"), self._mesh.device)
            self._recording = step, engine, recorder
            engine.record(recorder)

    def _finish(self, busy: bool) -> None:
        assert self._recording is not None
        step, engine, recorder = self._recording
        self._recording = None
        if not busy:
            engine.record(None)
        seconds = time_parts(engine, recorder, self._mesh.coordinate("pipeline"))
        own = torch.tensor(
            [*seconds.values(), peak_bytes(self._mesh.device)], dtype=torch.float64, device=self._mesh.device
        )
        ranks = self._mesh.world.all_gather(own).view(self._mesh.world_size, -1).tolist()
        columns = [list(column) for column in zip(*ranks, strict=True)]
        by_part = {
            part: [round(value, 6) for value in column] for part, column in zip(TIME_PARTS, columns, strict=False)
        }
        self._notify(RANKS, step=step + 1, **by_part, peak_bytes=[int(value) for value in columns[-1]])
        busy_seconds = [sum(rank[: TIME_PARTS.index("waiting")]) for rank in ranks]
        for rank, ratio in self._report.take(busy_seconds):
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
