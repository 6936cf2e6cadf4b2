"""Checks of what the planners are given, before they search."""

import math


def require_positive(values: dict[str, float], *, zero: bool = False) -> None:
    """Raise ValueError that names the first value that is no finite positive number (or zero, where that is allowed).

    values: what the message calls a value -> the value.
    """
    for name, value in values.items():
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            rule = "a finite number of at least 0" if zero else "a finite number above 0"
            raise ValueError(f"{name} must be {rule}, got {value}")


def require_counts(values: dict[str, int]) -> None:
    """Raise ValueError that names the first value that is not an integer of at least 1."""
    for name, value in values.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value}")
