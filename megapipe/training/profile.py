"""profile.trace: records what every rank does in a few steps, one file a rank."""

import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import megapipe
from megapipe.config.run import PretrainConfig
from megapipe.engine.clocks import ClockOffset, clock_offset
from megapipe.engine.engine import Engine
from megapipe.engine.trace import Recorder
from megapipe.parallel.mesh import Mesh
from megapipe.schedules import dumps
from megapipe.schedules.measured.trace_file import SCHEDULE_FILE, RankTrace, fingerprint, write_rank, write_whole
from megapipe.training.output import print_error


class Profiler:
    """Traces the steps that profile.first_step and profile.steps name; does nothing without profile.trace.

    Call `before` ahead of every step and leave the block at the end; what was recorded by then is written.
    """

    def __init__(self, config: PretrainConfig, mesh: Mesh, say: Callable[[str], None], first_step: int) -> None:
        """first_step: number, from 0, of the step that this start of the run begins with."""
        self._config = config
        self._mesh = mesh
        self._say = say
        self._first = first_step + config.profile.first_step - 1
        self._directory = None if config.profile.trace is None else Path(config.profile.trace)
        self._run = ""
        self._offset = ClockOffset(0, 0, False)
        self._recording: tuple[Engine, Recorder] | None = None

    def before(self, step: int, engine: Engine) -> None:
        """Ahead of feeding a step, from 0. All ranks make the same calls: the clocks are compared in one of them.

        A schedule that never flushes ends a step while it is fed the next one: its window closes a call later.
        """
        if self._directory is None:
            return
        late = 0 if engine.schedule.flushes else 1
        opens, closes = self._first - 1 + late, self._first + self._config.profile.steps + late
        if self._recording is not None:
            if step >= closes or engine is not self._recording[0]:
                self.close()
        elif opens <= step < closes:
            # A step early where there is one: ranks wait for each other here, and the pipeline has to recover.
            self._run = self._mesh.world.all_gather_object(time.strftime("%Y-%m-%d %H:%M:%S"))[0]
            self._offset = clock_offset(self._mesh.world)
            recorder = Recorder(engine.schedule, self._mesh.coordinate("pipeline"), self._mesh.device)
            self._recording = engine, recorder
            engine.record(recorder)

    @property
    def recording(self) -> bool:
        """Whether steps are being traced."""
        return self._recording is not None and self._directory is not None

    def close(self) -> None:
        """Write what was recorded, once. A folder that cannot be written costs the trace and not the run."""
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
                write_whole(directory / SCHEDULE_FILE, dumps(engine.schedule))
            write_rank(directory, trace)
        except OSError as error:
            print_error(f"warning: rank {self._mesh.rank} could not write its trace to {directory}: {error}")
            return
        first, last = trace.about["steps"]
        self._say(f"traced steps {first} to {last}: megapipe schedule overlay {directory}")

    def _trace(self, engine: Engine, recorder: Recorder) -> RankTrace:
        wanted = range(self._first, self._first + self._config.profile.steps)
        events = [event for event in recorder.events(self._offset.nanoseconds) if event.step in wanted]
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
        """What ran, the same on all ranks but for the devices."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(Exception):  # a device that has failed cannot be read: the run's own error is to be told
            self.close()
