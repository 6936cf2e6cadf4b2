"""The validator of lowered schedules."""

from megapipe.schedules.validation.launch_order import needs_resident_kernels
from megapipe.schedules.validation.validate import Report, validate

__all__ = ["Report", "needs_resident_kernels", "validate"]
