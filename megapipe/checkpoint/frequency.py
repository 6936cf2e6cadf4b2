"""The interval between saves, chosen so that saving takes at most a given fraction of the training time.

The rule is from CheckFreq (Mohan et al., FAST 2021, section 4.3): the next save starts when the previous one is
durable, and the stall of a save is amortized over enough steps. All times are measured in the run, and updated with
every save. This module does not read a clock.
"""

import math
from dataclasses import dataclass, field

WARM_UP_STEPS = 5
"""Steps at the start of a run that are not measured: they compile, allocate and fill caches."""

FIRST_SAVE_STEPS = 10
"""Steps before the first save, which measures the cost of a save."""


def interval(step_seconds: float, stall_seconds: float, durable_seconds: float, max_overhead: float) -> int:
    """Return the number of steps from one save to the next, at least 1.

    Args:
        step_seconds: duration of one step without a save, T.
        stall_seconds: time that a save adds to the training time, o.
        durable_seconds: time from the start of a save until it is durable, including the stall, t_f.
        max_overhead: largest fraction of the training time that saves may add, p.
    """
    whole = math.ceil((durable_seconds - stall_seconds) / step_seconds)
    return max(1, whole, math.ceil(stall_seconds / (max_overhead * step_seconds)))


@dataclass
class _Steps:
    """Number and total duration of steps since the last save."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds

    @property
    def mean(self) -> float:
        return self.seconds / self.count


@dataclass
class SaveTimer:
    """Decides on one rank when to save, from the measured times of steps and saves.

    Steps that run while a save is written may take longer. The additional time counts as part of the save's stall.

    max_overhead: largest fraction of the training time; None saves only by time. seconds_between: longest time from
    one save to the next; None means no limit.
    """

    max_overhead: float | None
    seconds_between: float | None = None
    _warm_up: int = WARM_UP_STEPS
    _between_saves: _Steps = field(default_factory=_Steps)
    _during_saves: _Steps = field(default_factory=_Steps)
    _since: int = 0
    _elapsed: float = 0.0
    _latest: float = 0.0
    _saving: bool = False
    _step_seconds: float | None = None
    _stall: float | None = None
    _durable: float | None = None

    @property
    def steps_between(self) -> int | None:
        """Steps from one save to the next that keep the overhead below its limit; None until a save has been
        measured."""
        if self.max_overhead is None or self._stall is None or self._durable is None:
            return None
        step_seconds = self._undisturbed()
        if step_seconds is None:
            return None
        disturbance = max(0.0, self._during_saves.seconds - self._during_saves.count * step_seconds)
        return interval(step_seconds, self._stall + disturbance, self._durable, self.max_overhead)

    @property
    def is_due(self) -> bool:
        """Whether to save after the next step; False while a save is being written."""
        if self._saving:
            return False
        late = self.seconds_between is not None and self._elapsed + self._latest >= self.seconds_between
        if self.max_overhead is None:
            return late
        between = self.steps_between
        steps = FIRST_SAVE_STEPS if between is None else between
        return late or self._since + 1 >= steps

    def step(self, seconds: float) -> None:
        """Add the duration of a step, without saves and evaluations."""
        self._since += 1
        self._elapsed += seconds
        self._latest = seconds
        if self._warm_up:
            self._warm_up -= 1
        elif seconds > 0:
            (self._during_saves if self._saving else self._between_saves).add(seconds)

    def save_started(self, stall_seconds: float) -> None:
        """Record that a save has started, and that training continued after a stall of `stall_seconds`."""
        self._step_seconds = self._undisturbed()
        self._stall = stall_seconds
        self._between_saves, self._during_saves, self._since, self._elapsed = _Steps(), _Steps(), 0, 0.0
        self._saving = True

    def save_ended(self, durable_seconds: float | None) -> None:
        """Record that the save in progress is durable, `durable_seconds` after its start; None means that it
        failed."""
        self._saving = False
        if durable_seconds is not None:
            self._durable = durable_seconds

    def _undisturbed(self) -> float | None:
        """Return the mean seconds of steps that run while no save is written: steps since the last save, or else in
        the last interval with such steps."""
        if self._between_saves.count:
            return self._between_saves.mean
        if self._step_seconds is not None:
            return self._step_seconds
        return self._during_saves.mean if self._during_saves.count else None
