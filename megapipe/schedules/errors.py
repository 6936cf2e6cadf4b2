"""The exception of the schedules package."""


class ScheduleError(ValueError):
    """A schedule that cannot be built, read or run; the message names the rule that it breaks and how to fix it."""
