"""How long the micro-batches of a step take in a pipeline, in closed form by schedule.

Times count up to the end of the last rank's last backward: updates wait there for the gradients' norm. So the formulas
of zero-bubble schedules differ from their papers', in which updates do not wait. Each was found exact by simulation
for even stages without messages (tests/planner/cost).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.schedules import Options, build, rank_costs, simulate
from megapipe.schedules.generators.looped import default_group_size

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ChunkTimes:
    """Seconds of one micro-batch by chunk and pipeline rank: shape [chunks, ranks] each.

    forward; again: what runs again ahead of a backward, and what sharded weights wait for, which both may be over
    before a message arrives; input_half and weight_half of the backward. hops: of a message from each rank to the
    next, shape [ranks], the last one's to the first. passing: the part of `again` that holds up a micro-batch while
    it passes ranks that have nothing else to do. transfers: the part of `hops` in which the link has room for no other
    message, by default all of it.
    """

    forward: Floats
    again: Floats
    input_half: Floats
    weight_half: Floats
    hops: Floats
    passing: Floats | float = 0.0
    transfers: Floats | None = None

    @property
    def size(self) -> int:
        """Ranks."""
        return self.forward.shape[1]

    @property
    def chunks(self) -> int:
        """Stages a rank."""
        return self.forward.shape[0]

    @property
    def backward(self) -> Floats:
        """Whole, what runs again left out: some of that may run while a rank waits for a gradient (`passing`)."""
        return self.input_half + self.weight_half

    @property
    def fill(self) -> Floats:
        """Of a micro-batch through an idle rank, both ways, by chunk and rank."""
        return self.forward + self.backward + self.passing

    @property
    def work(self) -> Floats:
        """Of a whole micro-batch by rank, shape [ranks]."""
        return (self.forward + self.again + self.backward).sum(axis=0)

    @property
    def hop(self) -> float:
        """Seconds of a message all along the pipeline, one way."""
        return float(self.hops[:-1].sum())

    @property
    def longest_hop(self) -> float:
        """Seconds of its slowest message between neighbours."""
        return float(self.hops[:-1].max())

    @property
    def longest_transfer(self) -> float:
        """Seconds that a message keeps the slowest link between neighbours busy."""
        return float(self._transfers[:-1].max())

    @property
    def longest_round(self) -> float:
        """The same with the link from the last rank to the first, where a rank has several chunks."""
        return float(self._transfers.max()) if self.chunks > 1 else self.longest_transfer

    @property
    def _transfers(self) -> Floats:
        return self.hops if self.transfers is None else self.transfers

    @property
    def loops(self) -> float:
        """Seconds of messages through all chunks and back, round the ring of ranks."""
        return 2 * self.chunks * self.hop + 2 * (self.chunks - 1) * float(self.hops[-1])


class Waiting(NamedTuple):
    """Seconds that the busiest rank waits for others' compute and for their messages, and the formula's source."""

    bubble: float
    messages: float
    source: str


def _others(pipeline: ChunkTimes, values: Floats) -> float:
    """Sum over all ranks but the busiest. values: shape [ranks]."""
    return float(values.sum() - values[pipeline.work.argmax()])


def _one_forward_one_backward(pipeline: ChunkTimes, count: int) -> Waiting:
    """The first forward and the last backward pass all ranks; between, a micro-batch's way there and back takes as
    long as the p micro-batches that the first rank holds, and the messages besides."""
    fill = _others(pipeline, pipeline.fill.sum(axis=0))
    rounds = -(-count // pipeline.size)
    again = 2 * (pipeline.hop - pipeline.longest_hop)
    source = "(p - 1) (tf + tb), arXiv 2104.04473, section 2.2.1"
    return _paced_by_links(pipeline, count, Waiting(fill, 2 * pipeline.hop * rounds + again, source), split=False)


def _paced_by_links(pipeline: ChunkTimes, count: int, waiting: Waiting, *, split: bool) -> Waiting:
    """Of schedules that flush: no less than what a link takes for all messages of a step, behind the first
    micro-batch's way to it, and ahead of the last one's way from there to the end and back.

    split: backwards are halved, and of the weight halves the first stage's alone is on a micro-batch's way, at its
    end. Of two chunks in a V a link carries one's activations and the other's gradients, the same way.
    """
    chunks, halves = pipeline.chunks, pipeline.weight_half
    path = float(pipeline.fill.sum()) + 2 * chunks * pipeline.hop
    if split:
        path -= float(halves.sum() - halves[0, 0])
    least = (chunks * count - 1) * pipeline.longest_transfer + path
    shown = count * float(pipeline.work.max()) + waiting.bubble + waiting.messages
    return waiting._replace(messages=waiting.messages + max(0.0, least - shown))


def _breadth_first(pipeline: ChunkTimes, count: int) -> Waiting:
    """All forwards, then all backwards, chunk by chunk: the slowest stage of each chunk sets its pace, or the slowest
    message where that takes longer."""
    slowest = np.array([each.max(axis=1) for each in (pipeline.forward, pipeline.again + pipeline.backward)])
    pace = count * float(slowest.sum() - pipeline.work.max())
    fill = float((pipeline.fill.sum(axis=1) - pipeline.fill.max(axis=1)).mean())
    lost = float(pipeline.fill.sum(axis=0).mean())
    missing = max(0, pipeline.size - count) * (pipeline.chunks - 1) / pipeline.chunks * lost
    late = np.maximum(0.0, pipeline.longest_round - slowest)
    messages = (count - 1 / pipeline.chunks) * float(late.sum()) + 2 * pipeline.hop
    if count <= pipeline.size:
        messages = max(messages, pipeline.loops)
    source = "(p - 1) (tf + tb) / v, arXiv 1811.06965, section 2.3, and arXiv 2211.05953"
    return Waiting(pace + fill + missing, messages, source)


def _one_group(pipeline: ChunkTimes, count: int) -> float:
    """The bubble where no more micro-batches than ranks pass chunk by chunk.

    Through each chunk the first micro-batch takes `fill` of all ranks, all of them take the slowest rank's work as
    often as there are micro-batches: the next chunk waits for the longer one. Behind the last chunk the shorter one
    is left to pass, but for its own slowest rank.
    """
    work = pipeline.forward + pipeline.again + pipeline.backward
    way, pace = pipeline.fill.sum(axis=1), count * work.max(axis=1)
    behind = np.minimum(way - pipeline.fill.max(axis=1), pace * (count - 1) / count)
    return max(0.0, float(np.maximum(way, pace).sum() + behind.mean() - count * pipeline.work.max()))


def _interleaved(pipeline: ChunkTimes, count: int) -> Waiting:
    """A last group that is smaller than the pipeline leaves idle places: for all work if it is the only group, for
    backwards if it follows other groups."""
    size, chunks = pipeline.size, pipeline.chunks
    fill = _others(pipeline, pipeline.fill.sum(axis=0)) / chunks
    group = default_group_size(size, count, chunks)
    empty = max(0, size - (count - (-(-count // group) - 1) * group))
    lost = pipeline.fill if count < size else pipeline.backward
    missing = empty * (chunks - 1) / chunks * float(lost.sum(axis=0).mean())
    messages = max(pipeline.loops, _busy_links(pipeline, count, fill))
    bubble = _one_group(pipeline, count) if count <= size else fill + missing
    return Waiting(bubble, messages, "(p - 1) (tf + tb) / v, arXiv 2104.04473, section 2.2.2")


def _busy_links(pipeline: ChunkTimes, count: int, fill: float) -> float:
    """What an interleaved schedule waits for where links and not ranks set the pace, found by simulation: with links
    that are alike never more than simulated, nor more than a fifth of the step less.

    A link carries a message each way for every chunk of a micro-batch; of two ranks it carries both ways' at once.
    Nothing runs beside the first group, which the slowest link lets pass one by one; later ones take a round of the
    ring a chunk.
    """
    size, chunks, hop = pipeline.size, pipeline.chunks, pipeline.longest_round
    work = float(pipeline.work.max())
    both = 2 * chunks - 1 if size == 2 else chunks
    ring = (min(count, size) + size - 1) * hop + max(0, count - size) * float(pipeline.hops.mean())
    return max(chunks * ring - size * work - fill, count * both * hop - (count - 1) * work)


def _zb_h1(pipeline: ChunkTimes, count: int) -> Waiting:
    each = (pipeline.forward + pipeline.input_half + pipeline.passing - pipeline.weight_half).sum(axis=0)
    messages = 4 * pipeline.hop - (2 * pipeline.longest_hop if count <= pipeline.size else 0.0)
    waiting = Waiting(max(0.0, _others(pipeline, each)), messages, "(p - 1) (TF + TB - TW), arXiv 2401.10241")
    return _paced_by_links(pipeline, count, waiting, split=True)


def _zb_h2(pipeline: ChunkTimes, count: int) -> Waiting:
    """The last rank starts p - 1 forwards late and the update waits for it; with few micro-batches more than that."""
    forward = pipeline.forward.sum(axis=0)
    each = forward + (pipeline.input_half + pipeline.passing - 2 * pipeline.weight_half).sum(axis=0)
    bubble = max(_others(pipeline, forward), _others(pipeline, each))
    messages = pipeline.hop
    if count < 2 * pipeline.size - 1:
        bubble = max(1.5 * _others(pipeline, forward), _zb_h1(pipeline, count).bubble)
        messages = 1.5 * pipeline.hop + 0.5 * pipeline.longest_hop
    waiting = Waiting(bubble, messages, "(p - 1) max(TF, TF + TB - 2 TW), simulated")
    return _paced_by_links(pipeline, count, waiting, split=True)


def _zb_v(pipeline: ChunkTimes, count: int) -> Waiting:
    forward, half = pipeline.forward.sum(axis=0), pipeline.input_half.sum(axis=0)
    each = (pipeline.input_half + pipeline.passing - pipeline.weight_half).sum(axis=0)
    one = max(_others(pipeline, forward), _others(pipeline, half))
    # With as many micro-batches as ranks it is twice that; each one more fills a forward of it.
    bubble = max(one / 2, _others(pipeline, each), one - (count - pipeline.size) * float(forward.mean()))
    messages = 4 * pipeline.hop if count <= pipeline.size else 5 * pipeline.hop - 2 * pipeline.longest_hop
    waiting = Waiting(bubble, messages, "(p - 1) max(TF / 2, TB / 2, TB - TW), simulated")
    return _paced_by_links(pipeline, count, waiting, split=True)


def _endless(pipeline: ChunkTimes, count: int) -> Waiting:
    source = "no flush: the slowest stage sets the pace, arXiv 2006.09503, section 3"
    messages = 2 * pipeline.hop * count / pipeline.size
    busy = count * (pipeline.longest_transfer - float(pipeline.work.max()))
    return Waiting(0.0, max(messages, busy), source)


Formula = Callable[[ChunkTimes, int], Waiting]
FORMULAS: dict[str, Formula] = {
    "1f1b": _one_forward_one_backward,
    "gpipe": _breadth_first,
    "interleaved_1f1b": _interleaved,
    "modular": _breadth_first,
    "zb_h1": _zb_h1,
    "zb_h2": _zb_h2,
    "zb_v": _zb_v,
    "2bw": _endless,
    "pipedream": _endless,
}
"""By schedule; others are simulated."""


def waiting_of(name: str, options: Options, pipeline: ChunkTimes, num_microbatches: int) -> Waiting:
    """What the rank with the most work waits for in one step.

    Schedules without a formula are simulated with even stages for up to four micro-batches a rank; what that adds
    with more of them is drawn on in a line.
    """
    if pipeline.size == 1:
        return Waiting(0.0, 0.0, "one pipeline rank")
    usual_group = True
    if name == "interleaved_1f1b":
        group = default_group_size(pipeline.size, num_microbatches, pipeline.chunks)
        usual_group = options.get("group_size", group) == group
        options = {"group_size": group, **options}  # the default depends on the total number of micro-batches
    if name in FORMULAS and not options.get("two_bp", False) and usual_group:
        return FORMULAS[name](pipeline, num_microbatches)
    ranks = pipeline.size
    phases = (pipeline.forward, pipeline.input_half, pipeline.weight_half)
    mean = [float(phase.sum(axis=0).mean()) for phase in phases]
    # Ratios to two digits: layouts of one model differ by less, and the cache serves them all.
    ratios = tuple(round(each / mean[0], 2) for each in mean[1:])
    shown, fewer = min(num_microbatches, 4 * ranks), min(num_microbatches, 2 * ranks)
    key = tuple(sorted(options.items()))
    bubble = _simulated_bubble(name, key, ranks, shown, ratios)
    if num_microbatches > shown:
        slope = (bubble - _simulated_bubble(name, key, ranks, fewer, ratios)) / (shown - fewer)
        bubble += max(0.0, slope) * (num_microbatches - shown)
    uneven = float(_others(pipeline, pipeline.work)) / (pipeline.work.max() * (ranks - 1))
    source = f"{name}, simulated with even stages and {shown} micro-batches"
    return Waiting(bubble * mean[0] * min(1.0, uneven), 2 * pipeline.hop, source)


@lru_cache(maxsize=1024)
def _simulated_bubble(
    name: str, options: tuple[tuple[str, object], ...], num_ranks: int, count: int, ratios: tuple[float, ...]
) -> float:
    """Seconds beyond the work, a forward taking one."""
    schedule = build(name, num_ranks, count, **dict(options))  # type: ignore[arg-type]
    costs = rank_costs(schedule.header, forward=1.0, backward_input=ratios[0], backward_weight=ratios[1])
    return simulate(schedule, costs).finish - count * (1.0 + sum(ratios))
