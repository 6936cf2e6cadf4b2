"""`megapipe runs`: list, show, compare and plot run folders. Nothing here imports torch."""

from megapipe.cli.runs.command import main

__all__ = ["main"]
