"""Measuring a machine: its layers, collectives and links, for the planner."""
