"""The validator of schedules."""

from megapipe.schedules.validation.rows import check_compute, check_stages
from megapipe.schedules.validation.validate import STREAMS_PER_PRIORITY, Report, validate
from megapipe.schedules.validation.waits import needs_resident_kernels

__all__ = ["STREAMS_PER_PRIORITY", "Report", "check_compute", "check_stages", "needs_resident_kernels", "validate"]
