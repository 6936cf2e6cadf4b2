"""Tensor-parallel layers, attention, MLP, norms, rotary positions, and the split backward.

`megapipe.layers.adopt` gives torch's own layers inside any module a backward that splits.
"""

from typing import Any

__all__ = ["adopt"]


def __getattr__(name: str) -> Any:
    """Imported when asked for: the room's other modules shall not pay for it."""
    if name == "adopt":
        from megapipe.layers.adoption import adopt

        return adopt
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
