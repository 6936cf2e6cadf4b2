"""Print figures as tables."""

from collections.abc import Sequence

from pipeline_contest.bubble import Bubble
from pipeline_contest.gpt import GptFigure
from pipeline_contest.race import Figure

GOALS = """Goals: the excess of megapipe is never above torch's. At 10 ms, if a rank has several stages or backwards
are split, it is at most half of torch's. It is at most 1.2 times the excess of the bare loop over the same link, plus
half a percentage point. The processor time is at most half of torch's."""


def show_race(figures: Sequence[Figure]) -> None:
    """Print a race, with the figures of each contestant relative to torch's."""
    first = figures[0]
    peer = next(figure for figure in figures if figure.contestant == "torch")
    size = f"{first.num_ranks} ranks, {first.num_microbatches} micro-batches, {first.milliseconds:g} ms"
    print(f"\n{first.schedule}, {size}")
    heads = ("step ms", "allowed", "late ms", "excess %", "of torch", "cpu us", "of torch")
    print(f"  {'':24}" + "".join(f"{head:>10}" for head in heads))
    for each in figures:
        line = f"  {each.contestant:24}{each.seconds * 1e3:10.1f}{each.finish * 1e3:10.1f}{each.late * 1e3:10.2f}"
        if each.contestant == "autograd alone":
            line += f"{'':20}"
        else:
            line += f"{each.excess:10.2f}{each.excess / peer.excess:10.2f}"
        print(line + f"{each.processor:10.1f}{each.processor / peer.processor:10.2f}", flush=True)


def show_bubble(bubble: Bubble) -> None:
    """Print the comparison of 2bw with a single rank."""
    print(f"\n2bw, {bubble.num_ranks} ranks, {bubble.num_microbatches} micro-batches, {bubble.milliseconds:g} ms")
    print(f"  {bubble.pipeline:8.3f} ms for a micro-batch, {bubble.pipeline_awake:8.3f} without oversleeping")
    print(f"  {bubble.alone:8.3f} ms on one rank alone,   {bubble.alone_awake:8.3f} without oversleeping")
    processor = f"{bubble.pipeline_processor:.3f} ms on the busiest rank, {bubble.alone_processor:.3f} ms alone"
    print(f"  processor time of a micro-batch: {processor}")
    print(f"  ratio {bubble.ratio:.4f} (goal: 1.03), {bubble.bound:.4f} with a core for each rank", flush=True)


def show_gpt(figure: GptFigure) -> None:
    """Print a race with real stages."""
    print(f"\nGPT stages, {figure.schedule}, {figure.num_ranks} ranks, {figure.num_microbatches} micro-batches")
    times = f"megapipe {figure.seconds * 1e3:.1f} ms, torch {figure.torch_seconds * 1e3:.1f} ms"
    print(f"  {times}, ratio {figure.ratio:.3f}", flush=True)
