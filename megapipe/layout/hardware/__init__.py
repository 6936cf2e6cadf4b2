"""Machines as the planner sees them: devices, nodes and links from YAML, and how long kernels and collectives take."""
