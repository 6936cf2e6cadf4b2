"""Contestants and measures of benchmarks/train_step.py."""
