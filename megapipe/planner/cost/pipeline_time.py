"""How long the micro-batches of a step take in a pipeline, in closed form by schedule."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Pipeline:
    """Seconds of one micro-batch by pipeline rank, all its stages together: shape [ranks] each.

    forward; backward, with what runs again before it; input_half and weight_half, the parts of a backward that is
    split. chunks: stages a rank. hops: of a message from each rank to the next, shape [ranks], the last one's to the
    first: used with several chunks alone.
    """

    forward: Floats
    backward: Floats
    input_half: Floats
    weight_half: Floats
    chunks: int
    hops: Floats

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.forward)

    @property
    def work(self) -> Floats:
        """Of a whole micro-batch."""
        return self.forward + self.backward


@dataclass(frozen=True)
class PipelineTime:
    """Seconds of a step's forwards and backwards, in its parts.

    busy: of the rank with the most work. bubble: its waiting for others' compute. messages: for their messages.
    source: of the formula.
    """

    busy: float
    bubble: float
    messages: float
    source: str

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.busy + self.bubble + self.messages


def _flush(pipeline: Pipeline, count: int) -> tuple[float, float, str]:
    """Each rank's first and last micro-batch pass all the others'; the slowest rank sets the pace between them."""
    work = pipeline.work
    rounds = -(-count // pipeline.size)
    hop = float(pipeline.hops[:-1].sum())
    messages = 2 * hop * rounds + (2 * hop - 2 * float(pipeline.hops[:-1].max()) if rounds > 1 else 0.0)
    return float(work.sum() - work.max()), messages, "(p - 1) (tf + tb), arXiv 2104.04473, section 2.2.1"


def _gpipe(pipeline: Pipeline, count: int) -> tuple[float, float, str]:
    forward, backward = pipeline.forward, pipeline.backward
    fill = float(forward.sum() - forward.max() + backward.sum() - backward.max())
    uneven = float(forward.max() + backward.max() - pipeline.work.max()) * count
    return fill + uneven, 2 * float(pipeline.hops[:-1].sum()), "(p - 1) (tf + tb), arXiv 1811.06965, section 2.3"


def _interleaved(pipeline: Pipeline, count: int) -> tuple[float, float, str]:
    work, chunks = pipeline.work, pipeline.chunks
    fill = float(work.sum() - work.max()) / chunks
    missing = max(0, pipeline.size - count) * (chunks - 1) / chunks * float(work.mean())
    passes = chunks if count <= pipeline.size else 1
    return (
        fill + missing,
        2 * passes * float(pipeline.hops[:-1].sum()),
        "(p - 1) (tf + tb) / v, arXiv 2104.04473, section 2.2.2",
    )


def _zb_h1(pipeline: Pipeline, count: int) -> tuple[float, float, str]:
    each = pipeline.forward + pipeline.input_half - pipeline.weight_half
    return _zero_bubble(pipeline, each, "(p - 1) (TF + TB - TW), arXiv 2401.10241, table 1")


def _zb_h2(pipeline: Pipeline, count: int) -> tuple[float, float, str]:
    each = pipeline.forward + pipeline.input_half - 2 * pipeline.weight_half
    return _zero_bubble(pipeline, each, "(p - 1) (TF + TB - 2 TW), arXiv 2401.10241, table 1")


def _zero_bubble(pipeline: Pipeline, each: Floats, source: str) -> tuple[float, float, str]:
    bubble = (pipeline.size - 1) * max(0.0, float(each.mean()))
    return bubble, 2 * float(pipeline.hops[:-1].sum()), source


def _endless(pipeline: Pipeline, count: int) -> tuple[float, float, str]:
    return 0.0, 2 * float(pipeline.hops[:-1].sum()), "no flush: the slowest stage, arXiv 2006.09503, section 3"


Formula = Callable[[Pipeline, int], tuple[float, float, str]]
FORMULAS: dict[str, Formula] = {
    "1f1b": _flush,
    "gpipe": _gpipe,
    "interleaved_1f1b": _interleaved,
    "modular": _interleaved,
    "zb_h1": _zb_h1,
    "zb_h2": _zb_h2,
    "zb_v": _zb_h2,
    "zb_auto": _zb_h2,
    "2bw": _endless,
    "pipedream": _endless,
}


def pipeline_time(name: str, pipeline: Pipeline, num_microbatches: int) -> PipelineTime:
    """Of one step under a named schedule with whole backwards, or with halves where it splits them."""
    busy = num_microbatches * float(pipeline.work.max())
    if pipeline.size == 1:
        return PipelineTime(busy, 0.0, 0.0, "one stage")
    bubble, messages, source = FORMULAS[name](pipeline, num_microbatches)
    return PipelineTime(busy, bubble, messages, source)
