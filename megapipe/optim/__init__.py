"""Optimizers on flat buffers, clipping, learning-rate schedules."""
