"""Torch reference backends: one module an op, right on every device, dtype and shape."""
