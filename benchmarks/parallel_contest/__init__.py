"""Contestants and measures of benchmarks/parallel.py."""
