"""The validator of lowered schedules."""

from megapipe.schedules.validation.validate import Report, validate

__all__ = ["Report", "validate"]
