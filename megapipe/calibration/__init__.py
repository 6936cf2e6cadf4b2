"""Measure a machine: its layers, collectives and links, and its waits for data. Choose layouts by the measurements."""
