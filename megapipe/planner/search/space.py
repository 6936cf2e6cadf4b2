"""The space of a search: the values that it tries, and every layout of them that can run.

A layout is valid if `PretrainConfig.problems` and `layout.validation.run_problems` report nothing. Calling both for
every layout would take most of the search's time, so each rule is checked once per value of the few fields it reads.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

from megapipe.config import ConfigError, nearest
from megapipe.config.field_types import PositiveInt, bound_problems
from megapipe.config.parallel import DIMENSIONS
from megapipe.config.run import PretrainConfig
from megapipe.layout.scheduling import schedule_problems
from megapipe.layout.stages import cached_method
from megapipe.layout.table import moves_to_host
from megapipe.layout.units import has_memory_limits
from megapipe.layout.validation import context_problems
from megapipe.schedules import ScheduleError
from megapipe.schedules.registry import GENERATORS, find_generator, searched
from megapipe.spec.layers import tensor_problems

ZeroStage = Literal[0, 1, 2, 3]
Recompute = Literal["none", "selective", "full"]
Choice = tuple[int, ZeroStage, Recompute]
"""Values of `Layout.sequence`, `zero` and `recompute`."""
Scheduled = list[tuple[str, int | None, tuple[Recompute, ...]]]
"""Names of schedules and numbers of chunks, each with methods of recomputation."""
Value = TypeVar("Value")
SCHEDULE_FIELDS = frozenset({"schedule.name", "schedule.chunks"})
MIN_CONTEXT_TOKENS = 2048
"""Default minimum number of tokens of a sample on each context rank."""
PROMISING = 24
"""Number of divisions of ranks with the lowest bounds that are also tried with other schedules."""


class Branch(NamedTuple):
    """All layouts that divide the ranks in one way. micro_size: micro-batch size; None for all sizes."""

    data: int
    tensor: int
    pipeline: int
    context: int
    micro_size: int | None = None


class Shape(NamedTuple):
    """The division of ranks and batch, and the schedule.

    chunks: stages per rank; None for schedules with one, or if schedule.chunks is pinned to null, the default.
    """

    data: int
    tensor: int
    pipeline: int
    context: int
    micro_size: int
    schedule: str
    chunks: int | None

    @property
    def mesh(self) -> dict[str, int]:
        """Return the number of ranks along each dimension."""
        return {name: getattr(self, name) for name in DIMENSIONS}


class Layout(NamedTuple):
    """A shape with sequence parallelism, sharding and recomputation.

    sequence: 0 for no sequence parallelism, else parallel.sequence_chunks: above 1, traffic overlaps with products.
    """

    shape: Shape
    sequence: int
    zero: ZeroStage
    recompute: Recompute

    @property
    def order(self) -> tuple[object, ...]:
        """Return everything that the order of a layout's actions depends on."""
        shape = self.shape
        samples, spans = shape.data * shape.micro_size, self.recompute == "full"
        return shape.pipeline, shape.schedule, shape.chunks, samples, spans

    def traffic(self, base: PretrainConfig) -> tuple[object, ...]:
        """Return everything that the number of gathers and sums depends on."""
        shape = self.shape
        shards = (shape.tensor, shape.data) if has_memory_limits(base) else shape.data * shape.context > 1
        return *self.order, self.zero, shards

    def applied(self, base: PretrainConfig) -> PretrainConfig:
        """Return the configuration with this layout."""
        return Configurations(base).of(self)


class Configurations:
    """A run's configuration in many layouts. Layouts with equal values for a group of fields share one group object,
    so callers must not change it in place."""

    def __init__(self, base: PretrainConfig) -> None:
        self._base = base
        self._parallel, self._batch = cache(partial(replace, base.parallel)), cache(partial(replace, base.batch))
        self._schedule = cache(partial(replace, base.schedule))
        self._zero, self._recompute = cache(partial(replace, base.zero)), cache(partial(replace, base.recompute))

    def of(self, layout: Layout) -> PretrainConfig:
        """Return the configuration with a layout."""
        shape, on, chunks = layout.shape, layout.sequence > 0, max(1, layout.sequence)
        return replace(
            self._base,
            parallel=self._parallel(**shape.mesh, sequence=on, sequence_chunks=chunks),
            batch=self._batch(micro_size=shape.micro_size),
            schedule=self._schedule(name=shape.schedule, chunks=shape.chunks),
            zero=self._zero(stage=layout.zero),
            recompute=self._recompute(method=layout.recompute),
        )


@dataclass(frozen=True)
class SearchSpace:
    """The values that a search tries where a field is not pinned.

    A search sets parallel.data, tensor, pipeline, context, sequence and sequence_chunks, batch.micro_size,
    schedule.name and chunks, zero.stage and recompute.method; it leaves all other fields unchanged. It tries all
    divisors of the number of devices as sizes of tensor, pipeline, context and data parallelism, all divisors of a
    replica's batch as micro-batch sizes, and all numbers of chunks up to `all_chunks_up_to`, above it only those that
    divide the blocks evenly. The fields below limit these values.

    schedules: names of pipeline schedules to try with every division of ranks. other_schedules: names to try only with
    the `PROMISING` best divisions. The defaults come from the schedule generators; schedules that train with older
    weights must be named explicitly.
    sequence: values of `Layout.sequence`. max_context: by default, each context rank has at least
    `MIN_CONTEXT_TOKENS` tokens.
    """

    schedules: tuple[str, ...] = field(default_factory=lambda: searched("all"))
    other_schedules: tuple[str, ...] = field(default_factory=lambda: searched("promising"))
    zero_stages: tuple[ZeroStage, ...] = (0, 1, 2, 3)
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    sequence: tuple[int, ...] = (0, 1, 4)
    max_tensor: PositiveInt | None = None
    max_pipeline: PositiveInt | None = None
    max_context: PositiveInt | None = None
    max_micro_size: PositiveInt | None = 64
    max_chunks: PositiveInt | None = None
    all_chunks_up_to: PositiveInt = 8

    def not_searched(self, base: PretrainConfig, pinned: frozenset[str]) -> list[str]:
        """Return a phrase for each group of layouts outside this space. See `Layouts` for `base` and `pinned`."""
        phrases = []
        if not SCHEDULE_FIELDS & pinned and not base.schedule.file:
            if self.other_schedules:
                phrases.append(
                    f"{', '.join(self.other_schedules)} except on the {PROMISING} most promising divisions of ranks"
                )
            usable, errors = GENERATORS.loadable()
            tried = (*self.schedules, *self.other_schedules)
            left = [each for each in usable if each.name not in tried and each.search != "never"]
            whole = [each.name for each in left if "slices" not in each.order_options]
            phrases += [f"schedules {', '.join(whole)} (--schedules adds them)"] if whole else []
            phrases += [f"{each.name} (times of slices are not planned)" for each in left if each.name not in whole]
            phrases += map(str, errors)
        if "schedule.chunks" not in pinned:
            phrases.append(f"more than {self.all_chunks_up_to} chunks, unless they divide the blocks evenly")
        if "parallel.context" not in pinned and base.data.sequence_length >= MIN_CONTEXT_TOKENS:
            phrases.append(f"parallel.context with fewer than {MIN_CONTEXT_TOKENS:,} tokens per rank")
        if "parallel.sequence_chunks" not in pinned:
            chunks = ", ".join(str(each) for each in self.sequence if each)
            phrases.append(f"parallel.sequence_chunks other than {chunks}" if chunks else "sequence parallelism")
        if "batch.micro_size" not in pinned and self.max_micro_size is not None:
            phrases.append(f"micro-batches above {self.max_micro_size}")
        fixed = ("batch.global_size", "parallel.layers_per_stage", "zero.shard_size", "recompute.num_blocks")
        phrases.append(f"other values of {', '.join(fixed)}, offload, fp8, and every field not in the table")
        return phrases

    def problems(self) -> list[str]:
        """Return a message for every limit below 1, every empty list and every unknown name."""
        lists, names = ("schedules", "zero_stages", "recompute", "sequence"), (*self.schedules, *self.other_schedules)
        problems = bound_problems(self)
        problems += [f"{each} is empty; set at least one value to try" for each in lists if not getattr(self, each)]
        return problems + [each for name in names for each in _unknown("schedules", name)]


class Layouts:
    """The valid layouts of a run on a number of devices, each exactly once.

    base: configuration with the values of pinned fields, and of fields that no layout sets. devices: number of ranks.
    pinned: paths of fields that keep the value in `base`, such as `parallel.tensor`. If parallel.data is null, the
    search sets it even if it is pinned. space: values to try.

    Raises:
        ConfigError: a pinned path is not a field, a size is below 1, or a schedule is unknown.
    """

    def __init__(self, base: PretrainConfig, devices: int, pinned: frozenset[str], space: SearchSpace) -> None:
        _check_request(base, devices, pinned, space)
        self.base, self.devices, self.space = base, devices, space
        self._pinned = pinned | (SCHEDULE_FIELDS if base.schedule.file else frozenset())
        self._samples = math.gcd(base.batch.global_size, base.batch.ramp_start or base.batch.global_size)
        self._stages = base.model.num_layers + 2
        others = () if SCHEDULE_FIELDS & self._pinned else space.other_schedules
        self.schedules = self._values("schedule.name", base.schedule.name, space.schedules)
        self.other_schedules = tuple(name for name in others if name not in space.schedules)
        pinned_method = cast(Recompute, base.recompute.method)  # auto was rejected above
        self._methods = self._values("recompute.method", pinned_method, space.recompute)
        zeros = self._values("zero.stage", base.zero.stage, space.zero_stages)
        states = {(zero, method): self._state_problems(zero, method) for method in self._methods for zero in zeros}
        if all(states.values()):  # the fields that no layout sets break a rule
            raise ConfigError(min(states.values(), key=len))
        self._states = [state for state, problems in states.items() if not problems]
        self._sequences = self._find_sequences()

    def __iter__(self) -> Iterator[Layout]:
        for mesh in self.meshes():
            for branch in self.narrowed(mesh):
                for shape, choices in self.shapes(branch, self.schedules):
                    yield from (Layout(shape, *choice) for choice in choices)

    def meshes(self) -> Iterator[Branch]:
        """Yield every division of the ranks, without a micro-batch size."""
        base, parallel, space = self.base, self.base.parallel, self.space
        kept = parallel.data if "parallel.data" in self._pinned else None
        widest = space.max_context or max(1, base.data.sequence_length // MIN_CONTEXT_TOKENS)
        for tensor in self._sizes("parallel.tensor", parallel.tensor, self.devices, space.max_tensor):
            if tensor_problems(base.model, tensor):
                continue
            left = self.devices // tensor
            for context in self._sizes("parallel.context", parallel.context, left, widest):
                if context_problems(replace(base, parallel=replace(parallel, tensor=tensor, context=context))):
                    continue
                rest = left // context
                for pipeline in self._sizes("parallel.pipeline", parallel.pipeline, rest, space.max_pipeline):
                    data = rest // pipeline
                    if pipeline <= self._stages and self._samples % data == 0 and kept in (None, data):
                        yield Branch(data, tensor, pipeline, context)

    def narrowed(self, mesh: Branch) -> list[Branch]:
        """Return the branches of a mesh, one for each micro-batch size."""
        pinned, most = self.base.batch.micro_size, self.space.max_micro_size
        sizes = self._sizes("batch.micro_size", pinned, self._samples // mesh.data, most)
        return [mesh._replace(micro_size=size) for size in sizes]

    def shapes(self, branch: Branch, schedules: tuple[str, ...]) -> Iterator[tuple[Shape, tuple[Choice, ...]]]:
        """Yield the shapes of a branch with a micro-batch size, each with the valid choices of the other fields."""
        for schedule, chunks, methods in self._schedules_of(branch, schedules):
            if choices := self.choices(branch, methods):
                yield Shape(*branch, schedule, chunks), choices  # type: ignore[arg-type]

    def count(self, branch: Branch, schedules: tuple[str, ...]) -> int:
        """Return the number of layouts of a branch without creating any."""
        if branch.micro_size is None:
            return sum(self.count(each, schedules) for each in self.narrowed(branch))
        return sum(len(self.choices(branch, methods)) for _, _, methods in self._schedules_of(branch, schedules))

    def choices(self, branch: Branch, methods: tuple[Recompute, ...] | None = None) -> tuple[Choice, ...]:
        """Return the valid choices of a branch. methods: methods of recomputation to allow, by default all."""
        methods = self._methods if methods is None else methods
        return self._choices(branch.tensor, branch.context, branch.data * branch.context, methods)

    @cached_method
    def _choices(self, tensor: int, context: int, replicas: int, methods: tuple[Recompute, ...]) -> tuple[Choice, ...]:
        sequences = [each for each in self._sequences if self._sequence_valid(tensor, context, each)]
        return tuple(
            (sequence, zero, method)
            for zero, method in self._states
            if method in methods and not replace(self.base.zero, stage=zero).replica_problems(replicas)
            for sequence in sequences
        )

    def _find_sequences(self) -> tuple[int, ...]:
        """Return the values of `Layout.sequence` to try."""
        parallel, pinned, values = self.base.parallel, self._pinned, self.space.sequence
        if "parallel.sequence" in pinned:
            values = tuple(each for each in values if (each > 0) == parallel.sequence)
        if "parallel.sequence_chunks" in pinned:
            on = (parallel.sequence_chunks,) if any(values) else ()
            # A configuration rule forbids several chunks without sequence parallelism.
            return on if parallel.sequence_chunks > 1 else (*(each for each in values if each == 0), *on)
        return values

    def _values(self, path: str, pinned: Value, tried: tuple[Value, ...]) -> tuple[Value, ...]:
        return (pinned,) if path in self._pinned else tried

    def _sizes(self, path: str, pinned: int, of: int, most: int | None) -> list[int]:
        """Return the divisors of `of` that the space allows."""
        if path in self._pinned:
            return [pinned] if of % pinned == 0 else []
        return [size for size in divisors(of) if most is None or size <= most]

    def _schedules_of(self, branch: Branch, names: tuple[str, ...]) -> Scheduled:
        return self._scheduled(branch.pipeline, cast(int, branch.micro_size) * branch.data, names)

    @cached_method
    def _scheduled(self, pipeline: int, samples: int, names: tuple[str, ...]) -> Scheduled:
        """Return the schedules that can run, each with the methods that it allows. samples: of a micro-batch over all
        replicas; schedules depend on no other size of the batch."""
        base, scheduled = self.base, []
        parallel, batch = replace(base.parallel, pipeline=pipeline), replace(base.batch, micro_size=samples)
        for name, chunks in self._chunked(pipeline, names):
            schedule = replace(base.schedule, name=name, chunks=chunks)
            config = replace(base, parallel=parallel, batch=batch, schedule=schedule)
            if base.schedule.file:  # only a file limits the methods
                recomputes = [replace(base.recompute, method=each) for each in self._methods]
                problems = [schedule_problems(replace(config, recompute=each), 1) for each in recomputes]
                methods = tuple(each for each, broken in zip(self._methods, problems, strict=True) if not broken)
            else:
                methods = () if schedule_problems(config, 1) else self._methods
            if methods:
                scheduled.append((name, chunks, methods))
        return scheduled

    def _chunked(self, pipeline: int, names: tuple[str, ...]) -> Iterator[tuple[str, int | None]]:
        """Yield names with numbers of chunks. On one rank, a looped schedule takes the same time and memory as the
        plain one, so it is skipped if the plain one is tried."""
        most = min(self._stages // pipeline, self.space.max_chunks or self._stages)
        blocks, every = self.base.model.num_layers, self.space.all_chunks_up_to
        for name in names:
            if "schedule.chunks" in self._pinned:
                yield name, self.base.schedule.chunks
            elif find_generator(name).chunks == 1:
                yield name, None
            elif pipeline > 1 or all(find_generator(other).looped != name for other in names):
                tried = range(2, most + 1)
                yield from ((name, each) for each in tried if each <= every or blocks % (pipeline * each) == 0)

    @cached_method
    def _sequence_valid(self, tensor: int, context: int, sequence: int) -> bool:
        on, chunks = sequence > 0, max(1, sequence)
        parallel = replace(self.base.parallel, tensor=tensor, context=context, sequence=on, sequence_chunks=chunks)
        return not parallel.sequence_problems(self.base.data.sequence_length)

    def _state_problems(self, zero: ZeroStage, recompute: Recompute) -> list[str]:
        """Return the rules of fields that this sharding and recomputation break on any mesh. A corpus is filled in,
        because it need not be named yet."""
        base, data = self.base, self.base.data
        data = replace(data, prefix=data.prefix or ("" if data.blend else "corpus"))
        parallel = replace(base.parallel, tensor=1, context=1, pipeline=1, sequence=False, sequence_chunks=1)
        run = replace(base, data=data, parallel=parallel, zero=replace(base.zero, stage=zero))
        return replace(run, recompute=replace(base.recompute, method=recompute)).problems()


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each < number]


def _check_request(base: PretrainConfig, devices: int, pinned: frozenset[str], space: SearchSpace) -> None:
    """Raise one ConfigError with all problems of a request before any layout is tried."""
    known = set(_paths(base))
    wrong = sorted(pinned - known)
    problems = [f"pinned field {path!r} is not a field of a configuration{nearest(path, known)}" for path in wrong]
    problems += [f"the number of devices is {devices}; it must be at least 1"] if devices < 1 else []
    problems += space.problems() + base.model.problems()
    later = "leave it out here, and use it with megapipe plan predict on the best layout"
    if moves_to_host(base):
        problems.append(f"offload is set, but a search does not model copies to host memory; {later}")
    if any((each.recompute, each.offload, each.fp8) != (None, None, None) for each in base.parallel.layers.values()):
        apart = "parallel.layers sets recompute, offload or fp8"
        problems.append(f"{apart}, but a search treats all blocks alike; {later}")
    if base.parallel.vocabulary_variant:
        problems.append(
            f"parallel.vocabulary is {base.parallel.vocabulary}, but a search leaves output layers whole; {later}"
        )
    if base.recompute.method == "auto":
        problems.append(
            "recompute.method auto must be resolved before a search: call "
            "planner.recompute.limited, or set none, selective or full"
        )
    problems += [] if base.schedule.file else _unknown("schedule.name", base.schedule.name)
    problems += bound_problems(base.batch, "batch") + bound_problems(base.parallel, "parallel")
    if problems:
        raise ConfigError(problems)


def _unknown(field: str, schedule: str) -> list[str]:
    try:
        never = find_generator(schedule).search == "never"
    except ScheduleError as error:
        return [f"{field}: {error}"]
    return [f"{field}: training does not run {schedule}, which is for the simulator; leave it out"] if never else []


def _paths(config: Any, prefix: str = "") -> Iterator[str]:
    for item in fields(config):
        value = getattr(config, item.name)
        yield prefix + item.name
        if is_dataclass(value):
            yield from _paths(value, f"{prefix}{item.name}.")
