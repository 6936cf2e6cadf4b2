"""Contestants and measures of benchmarks/pipeline_engine.py."""
