"""Which schedule a step follows."""

from dataclasses import dataclass, fields
from typing import Literal


@dataclass(kw_only=True)
class ScheduleConfig:
    """Pipeline schedule: the order of forward and backward passes in a step."""

    name: str = "1f1b"
    """Name of a pipeline schedule; `megapipe schedule list` prints them all."""
    chunks: int | None = None
    """Stages per rank, for schedules with several; null means the schedule's default."""
    group_size: int | None = None
    """For interleaved_1f1b: consecutive micro-batches that pass through a chunk; null means the number of pipeline
    ranks, or the larger group that is fastest if the ranks do not divide the micro-batches."""
    two_bp: bool = False
    """Split every backward of a schedule that has whole ones, and fill idle time with the weight halves (2BP)."""
    max_pending: int | None = None
    """With two_bp: maximum number of weight halves that a rank may postpone; null means no limit."""
    receive_ahead: int = 1
    """How many compute actions before its use a receive is posted."""
    update: Literal["eager", "lazy"] | None = None
    """For 2bw: when the optimizer steps. eager: right after the last backward of a batch. lazy: right before the new
    weights are needed, which hides the gradient norm but needs a second gradient buffer. null means lazy."""
    file: str = ""
    """Schedule file (docs/schedules.md) instead of a named schedule; leave out name and the options above."""

    def problems(self) -> list[str]:
        """Return one message for each option that cannot be combined with a schedule file."""
        if not self.file:
            return []
        options = (each for each in fields(self) if each.name not in ("file", "receive_ahead"))
        return [
            f"schedule.{each.name} is {getattr(self, each.name)!r}, and schedule.file is {self.file!r}; a file "
            "defines its whole schedule: leave one of the two out"
            for each in options
            if getattr(self, each.name) != each.default
        ]
