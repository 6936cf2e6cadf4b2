"""Runs that survive faults: signals, the watchdog, checks between steps, failures, the identity of a run."""
