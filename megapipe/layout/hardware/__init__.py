"""Descriptions of machines for the planner: devices, nodes and links from YAML, and times of kernels and
collectives."""
