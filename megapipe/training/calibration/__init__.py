"""Measuring a machine: its layers, collectives and links, for the planner."""

from megapipe.training.calibration.machine import profile

__all__ = ["profile"]
