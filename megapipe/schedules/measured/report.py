"""What the overlay says in words and numbers."""

from statistics import median
from typing import Any, Final

from megapipe.schedules.actions import COMPUTE_STREAM, Kind
from megapipe.schedules.measured.overlay import Overlay, Parting
from megapipe.schedules.measured.run import MeasuredRun
from megapipe.schedules.measured.window import MILLISECOND
from megapipe.schedules.tokens import LETTERS
from megapipe.schedules.validation.failure import action_at

PARTINGS: Final = 8


def headline(overlay: Overlay) -> str:
    """What ran, and which steps are shown, counted from 1."""
    header = overlay.window.table.header
    steps = [step + 1 for step in overlay.window.steps]
    shown = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    shape = f"{header.num_ranks} ranks, {header.num_microbatches} micro-batches"
    return f"{header.name}, {shape}, {shown}: measured over predicted"


def sentence(overlay: Overlay) -> str:
    """How far the slowest rank is from the prediction, and by what."""
    rank = overlay.slowest
    measured, predicted = overlay.ranks[rank]
    mine = [parting for parting in overlay.partings if overlay.window.table.rank[parting.row] == rank]
    wait, work, between = (sum(getattr(each, name) for each in mine) for name in ("wait", "work", "between"))
    return (
        f"rank {rank}, the slowest, took {_shown(measured.span)} ms, predicted were {_shown(predicted.span)} ms "
        f"({overlay.excess:+.1%}): waiting {_lost(wait)} ms, actions {_lost(work)} ms, between actions "
        f"{_lost(between)} ms"
    )


def figures(overlay: Overlay) -> dict[str, Any]:
    """Everything as numbers, in milliseconds."""
    costs = overlay.costs.costs
    names = [kind.name.lower() for kind in (*COMPUTE_STREAM, Kind.UPDATE)]
    columns = [getattr(costs, name) for name in names]
    return {
        "schedule": overlay.window.table.header.name,
        "layout": dict(overlay.run.layout),
        "about": dict(overlay.run.about),
        "steps": [step + 1 for step in overlay.window.steps],
        "summary": sentence(overlay),
        "ranks": [
            {
                side: {**each._asdict(), "bubble": each.bubble}
                for side, each in zip(("measured", "predicted"), both, strict=True)
            }
            for both in overlay.ranks
        ],
        "partings": [_parting(overlay, parting) for parting in overlay.partings[:PARTINGS]],
        "times": {
            "stages": [dict(zip(names, times, strict=True)) for times in zip(*columns, strict=True)],
            "messages": {f"{source}->{target}": link.latency for (source, target), link in costs.links.items()},
            "reduce_scalars": costs.reduce_scalars,
        },
        "between_steps": between_steps(overlay.run),
        "clock_error": overlay.run.clock_error / MILLISECOND,
        "clock_excess": overlay.costs.clock_excess,
    }  # fmt: skip


def between_steps(run: MeasuredRun) -> float | None:
    """Median time of a rank from one flushing step's last action to the next one's first: data, metrics, saving."""
    if not run.schedule.flushes:
        return None
    gaps = []
    for execution, ranks in run.recorded.items():
        following = run.recorded.get(execution._replace(step=execution.step + 1))
        for mine, after in zip(ranks, following or (), strict=False):
            gaps.append(min(event.start for event in after.values()) - max(event.end for event in mine.values()))
    return median(gaps) / MILLISECOND if gaps else None


def _parting(overlay: Overlay, parting: Parting) -> dict[str, Any]:
    table = overlay.window.table
    action = action_at(table, parting.row)
    step, microbatch = divmod(action.microbatch, table.header.num_microbatches)
    return {
        "rank": int(table.rank[parting.row]), "action": LETTERS[action.kind] + f"{action.stage}.{microbatch}",
        "step": overlay.window.first_step + step + 1, "lost": parting.lost, "wait": parting.wait,
        "work": parting.work, "between": parting.between,
    }  # fmt: skip


def text(overlay: Overlay) -> str:
    """The table that the command prints."""
    found = figures(overlay)
    lines = [headline(overlay), "", _row("", "time, ms", "", "bubble", "", "waiting, ms", "", "between")]
    lines.append(_row("rank", *["measured", "predicted"] * 3, "measured"))
    for rank, (measured, predicted) in enumerate(overlay.ranks):
        pairs = ((_shown(side.span), f"{side.bubble:.1%}", _shown(side.wait)) for side in (measured, predicted))
        cells = [cell for pair in zip(*pairs, strict=True) for cell in pair]
        lines.append(_row(str(rank), *cells, _shown(measured.between)))
    lines += ["", f"largest differences, ms lost against the prediction (of {len(overlay.partings)} actions)"]
    lines.append(_row("rank", "action", "step", "lost", "waiting", "slower", "between"))
    for row in found["partings"]:
        times = (_lost(row[name]) for name in ("lost", "wait", "work", "between"))
        lines.append(_row(str(row["rank"]), row["action"], str(row["step"]), *times))
    lines += ["", "medians used for the prediction, ms", *_times(overlay)]
    if found["between_steps"] is not None:
        lines.append(f"  between two steps, not included above: {_shown(found['between_steps'])}")
    if overlay.run.clock_error:
        lines.append(f"  clocks of the hosts agree to within {overlay.run.clock_error / MILLISECOND:.2g} ms")
    # Ranks of one host share a clock (error 0), so there an early arrival is an artifact of the recorded events.
    if 0 < overlay.run.clock_error / MILLISECOND < overlay.costs.clock_excess:
        lines.append(
            f"  warning: a message seems to arrive {overlay.costs.clock_excess:.2g} ms before it was sent; the "
            "clocks of the hosts differ by that much"
        )
    return "\n".join([*lines, "", sentence(overlay)])


def _row(first: str, *cells: str) -> str:
    return f"{first:>4}" + "".join(f"{cell:>12}" for cell in cells)


def _times(overlay: Overlay) -> list[str]:
    costs, header = overlay.costs.costs, overlay.window.table.header
    lines = []
    for stage in range(len(header.stages)):
        times = ((kind, getattr(costs, kind.name.lower())[stage]) for kind in (*COMPUTE_STREAM, Kind.UPDATE))
        shown = ", ".join(f"{kind.name.lower()} {_shown(time)}" for kind, time in times if time > 0)
        lines.append(f"  stage {stage} (rank {header.stages[stage].rank}): {shown}")
    latencies = [link.latency for link in costs.links.values()]
    if latencies:
        lines.append(f"  messages between ranks {_shown(min(latencies))} to {_shown(max(latencies))}")
    lines.append(f"  sum of scalars {_shown(costs.reduce_scalars)}")
    return lines


def _shown(milliseconds: float) -> str:
    """To the microsecond."""
    return f"{round(milliseconds, 3) + 0.0:.3f}"


def _lost(milliseconds: float) -> str:
    return f"{round(milliseconds, 3) + 0.0:+.3f}"
