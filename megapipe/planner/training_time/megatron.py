"""Megatron-LM's closed form of training time.

Narayanan et al. (2021), "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", arXiv
2104.04473 (SC21).
"""

from megapipe.planner.checks import require_counts, require_positive


def training_seconds(parameters: float, tokens: float, devices: int, device_flops: float) -> float:
    """End-to-end training time in seconds, 8 T P / (n X): section 5.1, equation 4.

    Args:
        parameters: P, of the model. tokens: T, that it is trained on. devices: n.
        device_flops: X, the FLOP/s that each device achieves, recomputation counted.

    Raises:
        ValueError: a value that is not above 0.
    """
    require_positive({"parameters": parameters, "tokens": tokens, "FLOP/s of a device": device_flops})
    require_counts({"devices": devices})
    return 8 * tokens * parameters / (devices * device_flops)
