"""A schedule from a file, and whether it is one that a training run can use."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megapipe.config.untrusted import read_bytes
from megapipe.schedules.actions import KIND, SLOT, UNIT, VERSION, Kind
from megapipe.schedules.build import forward_only
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.lowering import Spans, lower
from megapipe.schedules.offload import NOTHING, Offload
from megapipe.schedules.schedule import Header, Mode, Schedule, Sections, StagePlace
from megapipe.schedules.text import loads
from megapipe.schedules.validation import validate


def read_file(path: Path) -> Schedule:
    """Return the schedule in a text file as written: compute actions alone, or lowered.

    Raises ScheduleError for a file that cannot be read, with line and column for text that is not a schedule.
    """
    try:
        text = read_bytes(path, ScheduleError).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ScheduleError(f"cannot read {path}: {why}; choose a text file with a schedule") from None
    return loads(text, str(path))


def load_file(path: Path) -> Schedule:
    """The lowered schedule in a text file. Raises ScheduleError; what is lowered already is not validated."""
    schedule = read_file(path)
    return schedule if schedule.header.lowered else lower(schedule)


def fit_for_training(
    schedule: Schedule,
    num_ranks: int,
    num_microbatches: int,
    *,
    mode: Mode = "train",
    units_per_stage: Sequence[int],
    tied_groups: Sequence[Sequence[int]] = (),
    data_parallel: bool = False,
    weight_buffers: int = 0,
    whole_gradients: int = 0,
    zero_stages: Sequence[Sequence[int]] = (),
    receive_ahead: int = 1,
    recompute: Spans = (),
    offload: Offload = NOTHING,
) -> Schedule:
    """The valid, lowered schedule that a run gets out of one from a file, as :func:`build` gives it for a name.

    Compute actions alone need say nothing of units, tied weights and replicas: those of the run are filled in before
    they are lowered, so that one file serves models of any depth. A lowered schedule must name exactly the run's.

    Args:
        schedule: as :func:`read_file` gives it.
        num_ranks: pipeline ranks.
        num_microbatches: micro-batches of one optimizer step on this pipeline.
        mode: "train", or "forward" for its forwards alone, on the newest weights.
        units_per_stage: units (layers) of each stage, ascending by stage.
        tied_groups: per tied weight, the stages that hold a use of it.
        data_parallel: whether gradients are to be reduced over replicas, or over tensor ranks that share tokens.
        weight_buffers, whole_gradients: units whose weights and gradients a rank may hold whole at once where they are
            sharded; 0 where they are not.
        zero_stages: per stage, the ZeRO stage of each unit where units differ.
        receive_ahead: compute actions between a receive's posting and its use, at most; a lowered file has its own.
        recompute: as in :func:`megapipe.schedules.build`; a lowered file says by itself what runs again.
        offload: the same.

    Raises:
        ScheduleError: the schedule is not valid, or was made for something else than the run.
    """
    header = schedule.header
    if header.mode != "train":
        raise _mismatch(header, f"it is of mode {header.mode!r}", "training needs mode 'train'")
    _check_route(header)
    _check_equal(header, "pipeline ranks", header.num_ranks, num_ranks)
    _check_equal(header, "micro-batches per step", header.num_microbatches, num_microbatches)
    units, tied = tuple(units_per_stage), tuple(tuple(group) for group in tied_groups)
    stages_of_units = tuple(tuple(stages) for stages in zero_stages)
    _check_equal(header, "stages", len(header.stages), len(units))
    for name, said, wanted, unsaid in (
        ("units (layers) by stage", header.units_per_stage, units, (1,) * len(units)),
        ("tied groups", header.tied_groups, tied, ()),
        ("sums of gradients over shards of the tokens or replicas", header.data_parallel, data_parallel, False),
        ("weight_buffers", header.weight_buffers, weight_buffers, 0),
        ("whole_gradients", header.whole_gradients, whole_gradients, 0),
        ("ZeRO stages of units", header.zero_stages, stages_of_units, ()),
    ):
        if header.lowered or said != unsaid:
            _check_equal(header, name, said, wanted)
    if mode == "forward":
        schedule = forward_only(_whole_forwards(schedule))
    if not schedule.header.lowered:
        filled = replace(
            schedule.header,
            units_per_stage=units,
            tied_groups=tied,
            data_parallel=data_parallel,
            weight_buffers=weight_buffers,
            whole_gradients=whole_gradients,
            zero_stages=stages_of_units,
        )
        schedule = replace(schedule, header=filled)
        schedule = lower(schedule, receive_ahead=receive_ahead, recompute=recompute, offload=offload)
    validate(schedule)
    return schedule


def _check_route(header: Header) -> None:
    """Training cuts the model into stages in their order and runs each micro-batch through all of them."""
    if any(place.replica for place in header.stages):
        raise _mismatch(
            header,
            "it runs several copies of the model through one pipeline",
            "training does not sum the gradients of copies; set replica 0 for every stage",
        )
    stages = tuple(range(len(header.stages)))
    moved = [stage for stage, place in enumerate(header.stages) if place != StagePlace(stage, 0, place.rank)]
    if header.routes != (stages,) or moved:
        raise _mismatch(
            header,
            f"it has routes {[list(route) for route in header.routes]} and parts {[p.part for p in header.stages]}",
            f"training runs every micro-batch through stages 0 to {stages[-1]} in order, stage n being part n; leave "
            "out routes, parts and replicas",
        )


def _whole_forwards(schedule: Schedule) -> Schedule:
    """The forwards of one step as a generator would write them: whole chunks, without what lowering added."""
    body = []
    for rows in schedule.expand(1):
        whole = rows[(rows[:, KIND] == Kind.FORWARD) & (rows[:, UNIT] <= 0)]
        whole[:, [UNIT, VERSION, SLOT]] = -1
        body.append(whole)
    header = replace(
        schedule.header, lowered=False, activation_slots=(), gradient_slots=(), weight_buffers=0, whole_gradients=0,
        weights_in_host=False, zero_stages=(),
    )  # fmt: skip
    return replace(schedule, header=header, sections=Sections.flushing(tuple(body)))


def _check_equal(header: Header, name: str, said: object, wanted: object) -> None:
    if said != wanted:
        raise _mismatch(header, f"it was made for {name} {_shown(said)}", f"this run has {_shown(wanted)}")


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return str([list(each) if isinstance(each, tuple) else each for each in value])
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _mismatch(header: Header, problem: str, rule: str) -> ScheduleError:
    return ScheduleError(
        f"schedule {header.name} from a file does not fit this run: {problem}, but {rule}. Change the file or the run "
        "(megapipe schedule write prints a file to start from)"
    )
