"""Tensor-parallel layers, attention, MLP, norms, rotary positions, and the split backward.

`megapipe.layers.adopt` gives torch's own layers inside any module a backward that splits. `ColumnLinear` and
`RowLinear` are linear layers for a user's modules that tensor ranks split.
"""

from typing import Any

__all__ = ["ColumnLinear", "RowLinear", "adopt"]


def __getattr__(name: str) -> Any:
    """Imported when asked for: the room's other modules shall not pay for it."""
    if name == "adopt":
        from megapipe.layers.adoption import adopt

        return adopt
    if name in ("ColumnLinear", "RowLinear"):
        from megapipe.layers import linear

        return getattr(linear, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
