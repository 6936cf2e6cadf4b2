"""Number formats, and the paths that attention takes."""

from typing import Literal

Precision = Literal["fp32", "bf16", "fp16"]
AttentionPath = Literal["sdpa", "unfused"]
ContextAttention = Literal["ring", "all_to_all"]
ELEMENT_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
FULL_BYTES = 4
"""Bytes of an fp32 element: master weights, gradients, moments and statistics in every precision."""
