"""Measure layers, collectives, links and waits for data on a machine, and choose layouts by the measurements."""
