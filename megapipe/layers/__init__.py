"""Tensor-parallel layers, attention, MLP, norms, rotary positions, and the split backward.

`megapipe.layers.adopt` gives torch's own layers inside any module a split backward. `ColumnLinear` and `RowLinear` are
linear layers for a user's modules, which tensor ranks shard.
"""

from typing import Any

__all__ = ["ColumnLinear", "RowLinear", "adopt"]


def __getattr__(name: str) -> Any:
    """Import `adopt`, `ColumnLinear` and `RowLinear` at their first use, so that other imports of this package stay
    fast."""
    if name == "adopt":
        from megapipe.layers.adoption import adopt

        return adopt
    if name in ("ColumnLinear", "RowLinear"):
        from megapipe.layers import linear

        return getattr(linear, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
