"""Shared helpers of the schedule tests: reading a rank's order, drawing layouts, changing one action."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from megapipe.schedules import GENERATORS, Offload, Rows, Schedule, Sections, build
from megapipe.schedules.actions import KIND, short_word
from megapipe.schedules.schedule import SECTIONS, Mode, SectionName
from megapipe.schedules.states import WHOLE_STATES, StateTable, StateUnit, WeightHome
from tests.schedules.streams import RECEIVES, SENDS


def words(schedule: Schedule, rank: int, section: SectionName = "body") -> str:
    """A rank's actions as words without versions and slots."""
    slices = schedule.header.slices
    return " ".join(short_word(action, slices) for action in schedule.actions(section, rank))


OPTIONS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "interleaved_1f1b": {"chunks": st.integers(1, 3), "group_size": st.integers(1, 6)},
    "seq1f1b": {"slices": st.integers(1, 4), "chunks": st.integers(1, 3)},
    "modular": {"chunks": st.integers(1, 3)},
    "zb_v": {"chunks": st.just(2)},
    "gis": {"chunks": st.integers(1, 3), "group_size": st.integers(1, 6)},
    "gis_h": {"chunks": st.integers(1, 3)},
    "v_auto": {"memory_limit": st.integers(2, 8)},
    "zb_auto": {"memory_limit": st.integers(1, 8)},
    "2bw": {"update": st.sampled_from(["eager", "lazy"])},
    "pipedream": {"vertical_sync": st.booleans()},
}
NEVER_FLUSHING = ("2bw", "pipedream")


BOTH_WAYS = tuple(name for name in GENERATORS if GENERATORS[name].search == "never")
"""Schedules that hold each part of the model on two ranks, which training refuses."""
TRAINED = tuple(name for name in GENERATORS if name not in BOTH_WAYS)


def fewest_microbatches(name: str, num_ranks: int) -> int:
    """The fewest that a schedule runs with; those of `BOTH_WAYS` run a multiple of it."""
    return num_ranks if name in (*NEVER_FLUSHING, *BOTH_WAYS) else 2 * num_ranks if name == "dualpipe_v" else 1


def chunks_at_once(name: str) -> int:
    """How many chunks an action is of."""
    return 2 if name == "dualpipe_v" else 1


@st.composite
def layouts(draw: st.DrawFn, name: str, max_ranks: int = 4, max_microbatches: int = 6) -> dict[str, Any]:
    """Arguments of ``build`` for the named schedule."""
    both_ways = name in BOTH_WAYS
    ranks = draw(st.sampled_from(range(2, max_ranks + 1, 2)) if both_ways else st.integers(1, max_ranks))
    fewest = fewest_microbatches(name, ranks)
    options = {option: draw(values) for option, values in OPTIONS.get(name, {}).items() if draw(st.booleans())}
    if GENERATORS[name].takes_two_bp and draw(st.booleans()):
        options |= {"two_bp": True, "max_pending": draw(st.integers(1, 4))}
    stages = ranks * options.get("chunks", GENERATORS[name].chunks)
    tied = st.lists(st.integers(0, stages - 1), min_size=1, max_size=3, unique=True)
    if name == "pipedream":
        tied = tied.filter(lambda group: len(group) == 1)
    data_parallel = draw(st.booleans())
    units = draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    if both_ways:
        units = units[: stages // 2] * 2
        half = stages // 2  # the twin of a stage has the same part of the model, and so the same tied weights
        tied = tied.map(lambda group: sorted({each % half + twin for each in group for twin in (0, half)}))
    more = st.integers(0, max(max_microbatches - fewest, 0))
    return options | {
        "num_ranks": ranks,
        "num_microbatches": fewest + draw(more.map(lambda count: count // ranks * ranks) if both_ways else more),
        "units_per_stage": units,
        "tied_groups": draw(st.lists(tied, max_size=2)),
        "data_parallel": data_parallel,
        "states": draw(state_tables(units, at_once=chunks_at_once(name)))
        if data_parallel and not both_ways
        else WHOLE_STATES,
        "receive_ahead": draw(st.integers(1, 3)),
    }


@st.composite
def state_tables(
    draw: st.DrawFn, units_per_stage: Sequence[int], home: WeightHome = "sharded", at_once: int = 1
) -> StateTable:
    """Draw the sharded state of each layer: all layers alike, or one or two units of any size, each in its way.

    at_once: layers that one action uses.
    """
    weights, gradients = draw(st.sampled_from([0, *range(at_once, 5)])), draw(st.integers(0, 3))
    if draw(st.booleans()):
        pools = {"weight_pool": weights, "gradient_pool": gradients if home == "sharded" else 0}
        return StateTable.uniform(units_per_stage, **pools, weights=home)
    gradients_too = st.booleans() if home == "sharded" else st.just(False)
    a_unit = st.tuples(st.sampled_from(["whole", home]), gradients_too, st.integers(0, 3))
    most = draw(st.integers(1, 2))
    units = tuple(
        tuple(
            StateUnit(layer, *fields)
            for layer in range(layers)
            for fields in draw(st.lists(a_unit, min_size=1, max_size=most))
        )
        for layers in units_per_stage
    )
    return StateTable(units, 3 * most * at_once + weights, 3 * most + gradients)


def sharded(name: str, ranks: int, microbatches: int, layers: Sequence[int], **options: Any) -> Schedule:
    """Build a schedule of replicas with layers of size 1. options: pools of `StateTable`, and those of `build`."""
    pools = {pool: options.pop(pool) for pool in ("weight_pool", "gradient_pool") if pool in options}
    states = StateTable.uniform(layers, **pools)
    return build(name, ranks, microbatches, units_per_stage=layers, data_parallel=True, states=states, **options)


def in_host(*layers_per_stage: int, pool: int = 2) -> dict[str, Any]:
    """Arguments that keep all weights in host memory, with room for some units on the device."""
    states = StateTable.uniform(layers_per_stage, weight_pool=pool, weights="host")
    return {"units_per_stage": layers_per_stage, "states": states, "offload": Offload(optimizer=True)}


OVERLAPPED = """megapipe schedule 2
name overlapped
class A
microbatches 4
stage 0 rank 0
stage 1 rank 1

body
rank 0: F0.0 F0.1 F0.2+B0.0 F0.3+B0.1 B0.2 B0.3
rank 1: F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3
"""


def one_unit_a_layer(schedule: Schedule) -> bool:
    """Whether state units are layers."""
    return tuple(map(len, schedule.header.stage_states)) == schedule.header.units_per_stage


@st.composite
def spans(draw: st.DrawFn, units_per_stage: Sequence[int]) -> list[list[range]]:
    """Draw the spans that each stage recomputes: any disjoint spans of its units, or none."""
    cuts = [sorted(draw(st.sets(st.integers(0, units)))) for units in units_per_stage]
    return [[range(*pair) for pair in pairwise(edges) if draw(st.booleans())] for edges in cuts]


@st.composite
def offloads(draw: st.DrawFn, units_per_stage: Sequence[int], again: Sequence[Sequence[range]] = ()) -> Offload:
    """Draw what moves to host memory: activations of any units without recomputation, and optimizer state."""
    units = []
    for stage, count in enumerate(units_per_stage):
        free = set(range(count)) - {unit for span in (again[stage] if again else ()) for unit in span}
        units.append(tuple(sorted(draw(st.sets(st.sampled_from(sorted(free)))))) if free else ())
    return Offload(tuple(units), draw(st.integers(1, 4)), draw(st.booleans()))


@st.composite
def schedules(
    draw: st.DrawFn,
    mode: Mode = "train",
    max_ranks: int = 4,
    max_microbatches: int = 6,
    names: Sequence[str] = tuple(GENERATORS),
) -> Schedule:
    """Any schedule that can be built."""
    name = draw(st.sampled_from(names))
    arguments = draw(layouts(name, max_ranks, max_microbatches))
    if draw(st.booleans()):
        arguments["recompute"] = draw(spans(arguments["units_per_stage"]))
    if draw(st.booleans()):
        units, again = arguments["units_per_stage"], arguments.get("recompute", ())
        arguments["offload"] = draw(offloads(units, again))
        if arguments["offload"].optimizer and name not in (*NEVER_FLUSHING, *BOTH_WAYS) and draw(st.booleans()):
            arguments["states"] = draw(state_tables(units, "host", chunks_at_once(name)))
    return build(name, mode=mode, **arguments)


def with_rank_rows(schedule: Schedule, section: SectionName, rank: int, rows: Rows) -> Schedule:
    """The schedule with one rank's rows of one section replaced."""
    sections = {name: list(schedule.sections[name]) for name in SECTIONS}
    sections[section][rank] = rows
    return replace(schedule, sections=Sections(**{name: tuple(parts) for name, parts in sections.items()}))


@st.composite
def mutations(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """The schedule with one action swapped, shifted, dropped, repeated, moved to another rank or pointed elsewhere: a
    message half of the time."""
    parts = [
        (section, rank)
        for section in SECTIONS
        for rank, rows in enumerate(schedule.sections[section])
        if len(rows) > 0
    ]
    section, rank = draw(st.sampled_from(parts))
    rows = schedule.sections[section][rank].copy()
    messages = np.flatnonzero(np.isin(rows[:, KIND], draw(st.sampled_from([SENDS, RECEIVES]))))
    places = messages.tolist() if len(messages) and draw(st.booleans()) else [*range(len(rows))]
    at, other = draw(st.sampled_from(places)), draw(st.sampled_from(places))
    how = draw(st.sampled_from(["swap", "swap next", "shift", "drop", "repeat", "move", "retarget"]))
    if how == "swap next":
        other = min(at + 1, len(rows) - 1)
        rows[[at, other]] = rows[[other, at]]
    elif how == "swap":
        rows[[at, other]] = rows[[other, at]]
    elif how == "shift":
        target = min(max(at + draw(st.integers(-6, 6).filter(bool)), 0), len(rows) - 1)
        rows = np.insert(np.delete(rows, at, axis=0), target, rows[at], axis=0)
    elif how == "drop":
        rows = np.delete(rows, at, axis=0)
    elif how == "repeat":
        rows = np.insert(rows, draw(st.integers(0, len(rows))), rows[at], axis=0)
    elif how == "move":
        target = draw(st.integers(0, schedule.header.num_ranks - 1))
        there = schedule.sections[section][target]
        moved = np.insert(there, draw(st.integers(0, len(there))), rows[at], axis=0)
        if target != rank:
            schedule = with_rank_rows(schedule, section, target, moved)
            rows = np.delete(rows, at, axis=0)
    else:
        column = draw(st.integers(0, rows.shape[1] - 1))
        rows[at, column] = draw(st.integers(-2, 18 if column == 0 else 6))
    return with_rank_rows(schedule, section, rank, rows)
