"""Runs a Schedule: compute, transfers, reductions, updates."""
