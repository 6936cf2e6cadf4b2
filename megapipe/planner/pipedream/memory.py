"""Memory of a pipeline stage under PipeDream-2BW.

Narayanan et al. (2021), "Memory-Efficient Pipeline-Parallel DNN Training", arXiv 2006.09503, appendix A.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from megapipe.planner.checks import require_counts

Execution = Literal["no_pipelining", "pipelined", "recomputed"]
"""The planner's r: one micro-batch in the pipeline at a time, a full pipeline, or that with recomputation."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of a model of equal blocks, for one micro-batch of the size at hand.

    weights: `|W|`, of one version of the whole model with whatever is kept per version. activations: A_total, of all
    stages. boundary: the input activations of one stage.
    """

    weights: float
    activations: float
    boundary: float


def stage_bytes(
    footprint: Footprint,
    depth: int,
    execution: Execution = "pipelined",
) -> float:
    """Bytes of one of `depth` equal stages at its fullest, appendix A.

    2BW keeps two versions of the weights; activations of depth micro-batches are in flight, of which recomputation
    keeps the stage inputs and one micro-batch whole. Without pipelining there is one version and one micro-batch.

    Raises:
        ValueError: a name that is not in the literal, or a depth below 1.
    """
    require_counts({"depth": depth})
    if execution not in get_args(Execution):
        raise ValueError(f"execution must be one of {', '.join(get_args(Execution))}, got {execution!r}")
    weights, activations = footprint.weights / depth, footprint.activations / depth
    if execution == "no_pipelining":
        return weights + activations + footprint.boundary
    whole = 1 if execution == "recomputed" else depth
    return 2 * weights + whole * activations + depth * footprint.boundary
