"""The parts of benchmarks/kernel_speed.py."""
