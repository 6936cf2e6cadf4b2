"""Triton kernels and the kernel registry, imported as megapipe.kernels.

This file holds a docstring alone: transformers imports any top-level package named `kernels`, and from the repository
root it finds this folder. Ops register in kernels/registry.py.
"""
