"""Contestants and measurements of benchmarks/checkpoint.py."""
