"""Measures a machine: its layers, collectives and links, and its waits for data; chooses layouts from the
measurements."""
