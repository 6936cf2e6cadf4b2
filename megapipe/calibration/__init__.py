"""Measuring a machine: its layers, collectives and links, for the planner."""

from megapipe.calibration.machine import profile

__all__ = ["profile"]
