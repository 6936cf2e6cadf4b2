"""Torch reference backends: correct on every device, dtype and shape."""
