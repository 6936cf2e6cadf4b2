"""The one exception of the schedules room."""


class ScheduleError(ValueError):
    """A schedule that cannot be built, read or run; the message names the rule that it breaks and the way out."""
