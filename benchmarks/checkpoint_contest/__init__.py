"""Checkpoints by several means of the same state, in turns."""
