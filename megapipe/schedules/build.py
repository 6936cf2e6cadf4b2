"""Building a named schedule: generate, place, lower."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

from megapipe.schedules.actions import KIND, Kind
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.generators.registry import Options, find_generator
from megapipe.schedules.generators.weight_halves import Times, split_backwards
from megapipe.schedules.lowering import Spans, lower
from megapipe.schedules.offload import NOTHING, Offload
from megapipe.schedules.schedule import Header, Mode, Schedule, Sections

MOST_FORWARDS = 4_000_000
"""Of all stages in a step: a schedule of more takes minutes and gigabytes to lower and to simulate."""


def build(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    mode: Mode = "train",
    units_per_stage: Sequence[int] | None = None,
    tied_groups: Sequence[Sequence[int]] = (),
    data_parallel: bool = False,
    weight_buffers: int = 0,
    whole_gradients: int = 0,
    zero_stages: Sequence[Sequence[int]] = (),
    receive_ahead: int = 1,
    recompute: Spans = (),
    offload: Offload = NOTHING,
    **options: Unpack[Options],
) -> Schedule:
    """The lowered schedule of that name.

    Args:
        name: a key of ``GENERATORS``.
        num_ranks: pipeline ranks.
        num_microbatches: micro-batches of one optimizer step on this pipeline.
        mode: "train", or "forward" for evaluation: forwards and activation transfers alone.
        units_per_stage: units of each stage, ascending by stage; one each by default.
        tied_groups: per tied weight, the stages that hold a use of it.
        data_parallel: reduce gradients unit by unit: over data-parallel replicas, or tensor ranks that share tokens.
        weight_buffers: units whose gathered weights a rank may hold at once (ZeRO-3); 0 keeps weights whole.
        whole_gradients: units whose gradients a rank may hold whole at once (ZeRO-2); 0 keeps all of them whole.
        zero_stages: per stage, the ZeRO stage of each unit where units differ; of all units the same by default.
        receive_ahead: compute actions between a receive's posting and its use, at most.
        recompute: per stage, runs of units whose forwards keep their input alone and run again before the backward;
            nothing by default.
        offload: what goes to host memory between its uses; nothing by default.
        options: what the named schedule takes besides, see :class:`Options`.

    Raises:
        ScheduleError: an unknown name or option, or sizes that the schedule cannot run.
    """
    compute = order(
        name, num_ranks, num_microbatches, mode=mode, units_per_stage=units_per_stage, tied_groups=tied_groups,
        data_parallel=data_parallel, weight_buffers=weight_buffers, whole_gradients=whole_gradients,
        zero_stages=zero_stages, **options,
    )  # fmt: skip
    return lower(compute, receive_ahead=receive_ahead, recompute=recompute, offload=offload)


def order(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    mode: Mode = "train",
    units_per_stage: Sequence[int] | None = None,
    tied_groups: Sequence[Sequence[int]] = (),
    data_parallel: bool = False,
    weight_buffers: int = 0,
    whole_gradients: int = 0,
    zero_stages: Sequence[Sequence[int]] = (),
    **options: Unpack[Options],
) -> Schedule:
    """The named schedule's compute actions alone, ready for lowering; arguments as in :func:`build`."""
    check_microbatches(name, num_ranks, num_microbatches, **options)
    if weight_buffers < 0:
        raise ScheduleError(f"weight_buffers is {weight_buffers}; it must be at least 0, where 0 keeps weights whole")
    if whole_gradients < 0:
        raise ScheduleError(
            f"whole_gradients is {whole_gradients}; it must be at least 0, where 0 keeps gradients whole"
        )
    generator = find_generator(name)
    placement = generator.placement(num_ranks, generator.number_of_chunks(options))
    arguments = generator.arguments(generator.order_options, options)
    sections = generator.order(num_ranks, num_microbatches, **arguments)
    if options.get("two_bp", False):
        sections = split_backwards(sections, placement, options.get("times", Times()), options.get("max_pending"))
    policy = generator.policy_of(num_ranks, num_microbatches, options)
    header = Header(
        name=name,
        mode=mode,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stages=placement.stages,
        routes=placement.routes,
        units_per_stage=_checked_units(units_per_stage, len(placement.stages)),
        numerical_class=generator.numerical_class,
        versions_per_stage=tuple(policy.versions_by_rank[place.rank] for place in placement.stages),
        tied_groups=_checked_tied(tied_groups, len(placement.stages)),
        data_parallel=data_parallel,
        updates_per_step=policy.updates_per_step,
        gradient_buffers=policy.gradient_buffers,
        weight_buffers=weight_buffers,
        whole_gradients=whole_gradients,
        zero_stages=tuple(tuple(stages) for stages in zero_stages),
    )
    schedule = Schedule(header, sections)
    return forward_only(schedule) if mode == "forward" else schedule


def check_microbatches(name: str, num_ranks: int, num_microbatches: int, **options: Unpack[Options]) -> None:
    """Raise ScheduleError if the named schedule cannot run that many micro-batches on that many ranks."""
    generator = find_generator(name)
    generator.check_options(options)
    for what, value in (("pipeline ranks", num_ranks), ("micro-batches", num_microbatches)):
        if value < 1:
            raise ScheduleError(f"the number of {what} of {name} is {value}; it must be at least 1")
    forwards = num_ranks * generator.number_of_chunks(options) * num_microbatches
    if forwards > MOST_FORWARDS:
        raise ScheduleError(
            f"{name} with {num_microbatches:,} micro-batches has {forwards:,} forwards per step; the maximum is "
            f"{MOST_FORWARDS:,}: use fewer, larger micro-batches"
        )
    if "group_size" in options and options["group_size"] < 1:
        raise ScheduleError(f"{name} needs a group of at least 1 micro-batch, got {options['group_size']}")
    if generator.check is not None:
        generator.check(name, num_ranks, num_microbatches)


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of one step in their order, for evaluation on the newest weights."""
    body = tuple(rows[rows[:, KIND] == Kind.FORWARD] for rows in schedule.expand(1))
    header = replace(
        schedule.header,
        mode="forward",
        versions_per_stage=(1,) * len(schedule.header.stages),
        updates_per_step=1,
        gradient_buffers=1,
    )
    return Schedule(header, Sections.flushing(body), schedule.origin)


def _checked_units(units_per_stage: Sequence[int] | None, num_stages: int) -> tuple[int, ...]:
    units = (1,) * num_stages if units_per_stage is None else tuple(units_per_stage)
    if len(units) != num_stages or min(units) < 1:
        raise ScheduleError(f"units_per_stage {list(units)} must give at least 1 unit to each of {num_stages} stages")
    return units


def _checked_tied(tied_groups: Sequence[Sequence[int]], num_stages: int) -> tuple[tuple[int, ...], ...]:
    groups = tuple(tuple(group) for group in tied_groups)
    for group in groups:
        if not group or any(not 0 <= stage < num_stages for stage in group):
            raise ScheduleError(f"tied group {list(group)} must name at least one stage from 0 to {num_stages - 1}")
    return groups
