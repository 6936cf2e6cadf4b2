"""The order that ZB-H1 and ZB-H2 share: 1F1B whose weight halves wait and fill the time that the pipeline would idle.

The input half sends its gradient on at once; the weight halves of a stage run in micro-batch order, so gradients are
summed in the order of one process (Qi et al., arXiv 2401.10241).
"""

from megapipe.schedules.actions import Kind
from megapipe.schedules.building_blocks import Step

FORWARD, INPUT, WEIGHT = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def one_stage(rank: int, count: int, warmup: int, waiting: int, drain_one_by_one: bool) -> list[Step]:
    """Return ``warmup`` forwards, then forwards and input halves in turn, with at most ``waiting`` weight halves left.

    In the drain, each input half is followed by one weight half where ``drain_one_by_one``, else only by those above
    ``waiting``; the rest comes last.
    """
    steps = [(FORWARD, rank, microbatch) for microbatch in range(min(warmup, count))]
    done = 0
    for microbatch in range(count):
        draining = warmup + microbatch >= count
        if not draining:
            steps.append((FORWARD, rank, warmup + microbatch))
        steps.append((INPUT, rank, microbatch))
        if microbatch + 1 - done > (0 if draining and drain_one_by_one else waiting):
            steps.append((WEIGHT, rank, done))
            done += 1
    return steps + [(WEIGHT, rank, microbatch) for microbatch in range(done, count)]
