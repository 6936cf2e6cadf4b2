"""Ranks that are slower than their like: one of them sets the pace of all.

Every so many steps one step is recorded (engine.trace), and each rank tells how long it was busy in it, its waits for
others left out. Ranks at one place of the pipeline do the same work and are compared with each other; where there are
no two, with everybody.
"""

import statistics
from collections.abc import Callable, Sequence

import torch

from megapipe.config.reliability import ReliabilityConfig
from megapipe.engine.engine import Engine
from megapipe.engine.trace import Recorder
from megapipe.parallel.mesh import Mesh


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
    """Measures a step now and then. All ranks make the same calls."""

    def __init__(self, config: ReliabilityConfig, mesh: Mesh, say: Callable[[str], None]) -> None:
        self._every = config.stragglers_every if mesh.world_size > 1 else None
        self._mesh = mesh
        self._say = say
        coordinates = [mesh.shape.coordinates(rank) for rank in range(mesh.world_size)]
        places = [each["pipeline"] for each in coordinates]
        self._report = StragglerReport(places, config.straggler_factor, config.straggler_reports)
        self._recording: tuple[Engine, Recorder] | None = None

    def before(self, step: int, engine: Engine, *, busy: bool) -> None:
        """Ahead of feeding a step, from 0. busy: somebody else records this engine."""
        if self._recording is not None:
            self._finish(busy)
        if self._every is not None and not busy and (step + 2) % self._every == 0:
            recorder = Recorder(engine.schedule, self._mesh.coordinate("pipeline"), self._mesh.device)
            self._recording = engine, recorder
            engine.record(recorder)

    def _finish(self, busy: bool) -> None:
        assert self._recording is not None
        engine, recorder = self._recording
        self._recording = None
        if not busy:
            engine.record(None)
        own = sum(event.end - event.start - event.wait for event in recorder.events()) / 1e9
        times = torch.tensor([own], dtype=torch.float64, device=self._mesh.device)
        seconds = self._mesh.world.all_gather(times).view(-1).tolist()
        for rank, ratio in self._report.take(seconds):
            self._say(
                f"warning: rank {rank} is slow: busy for {seconds[rank] * 1e3:.1f} ms of a step, {ratio:.2f} times "
                "the median of the ranks with the same work, in several measurements; all others wait for it"
            )
