"""Which schedule a step follows."""

from dataclasses import dataclass, fields
from typing import Literal


@dataclass(kw_only=True)
class ScheduleConfig:
    """Order of forwards and backwards in a step."""

    name: str = "1f1b"
    """Name of a pipeline schedule; `tools/schedule.py list` prints them all."""
    chunks: int | None = None
    """Stages on each rank, for schedules that place several (null: the schedule's own default)."""
    group_size: int | None = None
    """interleaved_1f1b: micro-batches that go through a chunk in a row (null: the number of pipeline ranks, or the
    larger group that is fastest where the ranks do not divide the micro-batches)."""
    two_bp: bool = False
    """Split every backward of a schedule that has whole ones, and fill idle time with the weight halves (2BP)."""
    max_pending: int | None = None
    """two_bp: maximum number of weight halves that a rank may postpone (null: no limit)."""
    receive_ahead: int = 1
    """How many compute actions before its use a receive is posted."""
    update: Literal["eager", "lazy"] | None = None
    """2bw: when the optimizer steps: right after a batch's last backward, or right before the new weights are needed
    (null: lazy, which hides the gradient norm and costs a second gradient buffer)."""
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
