"""Triton kernels and the kernel registry, imported as megapipe.kernels.

This file contains only a docstring: transformers imports any top-level package named `kernels`, and from the
repository root it finds this folder. kernels/ops.py is the table of ops.
"""
