"""Every layout of a search space that can run.

A layout is valid where `PretrainConfig.problems` and `planner.runs.run_problems` have nothing against it. To ask both
of every layout would take longer than all else, so each rule is asked once for the few fields that it reads, and its
answer is kept.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple, TypeVar, cast

from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.layout.scheduling import schedule_problems
from megapipe.layout.validation import context_problems
from megapipe.planner.search.space import MIN_CONTEXT_TOKENS, Recompute, SearchSpace, ZeroStage, check_request
from megapipe.schedules.generators.registry import find_generator
from megapipe.spec.layers import tensor_problems

Value = TypeVar("Value")


class Shape(NamedTuple):
    """How ranks and a batch are divided, and by which schedule.

    chunks: stages a rank; None for schedules with one, and for the default of a schedule whose chunks are pinned.
    """

    data: int
    tensor: int
    pipeline: int
    context: int
    micro_size: int
    schedule: str
    chunks: int | None


class Layout(NamedTuple):
    """A shape, with its sharding and recomputation.

    sequence: 0 for no sequence parallelism, else parallel.sequence_chunks, 1 for no overlap.
    """

    shape: Shape
    sequence: int
    zero: ZeroStage
    recompute: Recompute

    def applied(self, base: PretrainConfig) -> PretrainConfig:
        """The configuration with this layout."""
        return Configurations(base).of(self)


class Configurations:
    """A run's configuration in many layouts: those that agree on a group of fields share that group, which nobody
    may change in place."""

    def __init__(self, base: PretrainConfig) -> None:
        self._base = base
        self._parallel = cache(partial(replace, base.parallel))
        self._batch = cache(partial(replace, base.batch))
        self._schedule = cache(partial(replace, base.schedule))
        self._zero = cache(partial(replace, base.zero))
        self._recompute = cache(partial(replace, base.recompute))

    def of(self, layout: Layout) -> PretrainConfig:
        """The configuration with a layout."""
        shape = layout.shape
        return replace(
            self._base,
            parallel=self._parallel(
                data=shape.data,
                tensor=shape.tensor,
                pipeline=shape.pipeline,
                context=shape.context,
                sequence=layout.sequence > 0,
                sequence_chunks=max(1, layout.sequence),
            ),
            batch=self._batch(micro_size=shape.micro_size),
            schedule=self._schedule(name=shape.schedule, chunks=shape.chunks),
            zero=self._zero(stage=layout.zero),
            recompute=self._recompute(method=layout.recompute),
        )


class Layouts:
    """The valid layouts of a run on a number of devices, each once.

    Args:
        base: all that a layout does not set; its own values count for fields that are pinned.
        devices: ranks.
        pinned: paths of fields that stay as `base` has them, such as `parallel.tensor`. Fields that no layout sets
            stay anyway, and parallel.data null is open even so.
        space: values to try.

    Raises:
        ConfigError: a pinned path that no configuration has, sizes below 1, an unknown schedule.
    """

    def __init__(self, base: PretrainConfig, devices: int, pinned: frozenset[str], space: SearchSpace) -> None:
        check_request(base, devices, pinned, space)
        self.base, self.devices, self.space = base, devices, space
        self._pinned = pinned | ({"schedule.name", "schedule.chunks"} if base.schedule.file else frozenset())
        sizes = (base.batch.global_size, base.batch.ramp_start or base.batch.global_size)
        self._samples = math.gcd(*sizes)
        self._stages = base.model.num_layers + 2
        self._tensor_valid = cache(lambda tensor: not tensor_problems(base.model, tensor))
        self._context_valid = cache(self._find_context_valid)
        self._sequence_valid = cache(self._find_sequence_valid)
        self._schedule_valid = cache(self._find_schedule_valid)
        self._state_valid = cache(self._find_state_valid)
        self._replicas_valid = cache(self._find_replicas_valid)
        self._sequences = self._find_sequences()
        self._options = cache(self._find_options)
        self._check_base()

    def _check_base(self) -> None:
        """Raise ConfigError where the fields that no layout sets break a rule whatever the layout."""
        zeros = self._values("zero.stage", self.base.zero.stage, self.space.zero_stages)
        methods = self._methods()
        broken = [self._state_problems(zero, method) for zero in zeros for method in methods]
        if all(broken):
            raise ConfigError(min(broken, key=len))

    def __iter__(self) -> Iterator[Layout]:
        for shape in self.shapes():
            yield from self.of(shape)

    def shapes(self) -> Iterator[Shape]:
        """Yield all shapes that could run, with the schedules that are tried everywhere."""
        names = tuple(self._values("schedule.name", self.base.schedule.name, self.space.schedules))
        for tensor, context, pipeline, data in self._meshes():
            for micro_size in self._micro_sizes(data):
                for schedule, chunks in self._schedules(pipeline, names):
                    yield Shape(data, tensor, pipeline, context, micro_size, schedule, chunks)

    def with_other_schedules(self, shapes: Iterable[Shape]) -> Iterator[Shape]:
        """Yield these shapes with each of the space's other schedules; nothing if the schedule is pinned."""
        if not {"schedule.name", "schedule.chunks"}.isdisjoint(self._pinned):
            return
        names = [name for name in self.space.other_schedules if name not in self.space.schedules]
        for shape in shapes:
            for name, chunks in self._schedules(shape.pipeline, names):
                yield shape._replace(schedule=name, chunks=chunks)

    def of(self, shape: Shape) -> Iterator[Layout]:
        """The valid layouts of one shape."""
        share = shape.data * shape.micro_size
        # Of these options only recomputation can conflict with a schedule, and only with one from a file.
        methods = tuple(
            recompute
            for recompute in self._methods()
            if self._schedule_valid(
                shape.schedule,
                shape.chunks,
                shape.pipeline,
                share,
                recompute if self.base.schedule.file else self.base.recompute.method,
            )
        )
        for options in self._options(shape.tensor, shape.context, shape.data * shape.context, methods):
            yield Layout(shape, *options)

    def _find_options(
        self, tensor: int, context: int, replicas: int, methods: tuple[Recompute, ...]
    ) -> list[tuple[int, ZeroStage, Recompute]]:
        """Return the valid combinations of sequence parallelism, ZeRO stage and one of these recomputation methods."""
        return [
            (sequence, zero, recompute)
            for recompute in methods
            for zero in self._values("zero.stage", self.base.zero.stage, self.space.zero_stages)
            if self._state_valid(zero, recompute) and self._replicas_valid(zero, replicas)
            for sequence in self._sequences
            if self._sequence_valid(tensor, context, sequence)
        ]

    def _find_sequences(self) -> tuple[int, ...]:
        """Return the values of `Layout.sequence` to try."""
        parallel, pinned = self.base.parallel, self._pinned
        found = self.space.sequence
        if "parallel.sequence" in pinned:
            found = tuple(each for each in found if (each > 0) == parallel.sequence)
        if "parallel.sequence_chunks" in pinned:
            on = (parallel.sequence_chunks,) if any(found) else ()
            # A configuration rule refuses chunks without sequence parallelism.
            return on if parallel.sequence_chunks > 1 else (*(each for each in found if each == 0), *on)
        return found

    def _values(self, path: str, own: Value, tried: Iterable[Value]) -> Iterable[Value]:
        return (own,) if path in self._pinned else tried

    def _methods(self) -> Iterable[Recompute]:
        # check_request has refused auto.
        return self._values("recompute.method", cast(Recompute, self.base.recompute.method), self.space.recompute)

    def _sizes(self, path: str, own: int, of: int, most: int | None) -> list[int]:
        """Divisors of `of` that the space allows."""
        if path in self._pinned:
            return [own] if of % own == 0 else []
        return [size for size in divisors(of) if most is None or size <= most]

    def _meshes(self) -> Iterator[tuple[int, int, int, int]]:
        """tensor, context, pipeline, data."""
        parallel, space = self.base.parallel, self.space
        kept = parallel.data if "parallel.data" in self._pinned else None
        for tensor in self._sizes("parallel.tensor", parallel.tensor, self.devices, space.max_tensor):
            if not self._tensor_valid(tensor):
                continue
            left = self.devices // tensor
            most = space.max_context or max(1, self.base.data.sequence_length // MIN_CONTEXT_TOKENS)
            for context in self._sizes("parallel.context", parallel.context, left, most):
                if not self._context_valid(tensor, context):
                    continue
                rest = left // context
                for pipeline in self._sizes("parallel.pipeline", parallel.pipeline, rest, space.max_pipeline):
                    data = rest // pipeline
                    if pipeline <= self._stages and self._samples % data == 0 and kept in (None, data):
                        yield tensor, context, pipeline, data

    def _micro_sizes(self, data: int) -> list[int]:
        own, most = self.base.batch.micro_size, self.space.max_micro_size
        return self._sizes("batch.micro_size", own, self._samples // data, most)

    def _schedules(self, pipeline: int, names: Collection[str]) -> Iterator[tuple[str, int | None]]:
        """Names with numbers of chunks. On one rank a looped schedule takes as long as the plain one and holds as
        much, so that it is left out if the plain one is tried."""
        schedule = self.base.schedule
        most = self._stages // pipeline
        if self.space.max_chunks is not None:
            most = min(most, self.space.max_chunks)
        blocks, every = self.base.model.num_layers, self.space.all_chunks_up_to
        for name in names:
            if "schedule.chunks" in self._pinned:
                yield name, schedule.chunks
            elif find_generator(name).chunks == 1:
                yield name, None
            elif pipeline > 1 or all(find_generator(other).looped != name for other in names):
                tried = range(2, most + 1)
                yield from ((name, each) for each in tried if each <= every or blocks % (pipeline * each) == 0)

    def _find_context_valid(self, tensor: int, context: int) -> bool:
        parallel = replace(self.base.parallel, tensor=tensor, context=context)
        return not context_problems(replace(self.base, parallel=parallel))

    def _find_sequence_valid(self, tensor: int, context: int, sequence: int) -> bool:
        parallel = replace(
            self.base.parallel,
            tensor=tensor,
            context=context,
            sequence=sequence > 0,
            sequence_chunks=max(1, sequence),
        )
        return not parallel.sequence_problems(self.base.data.sequence_length)

    def _find_schedule_valid(
        self, name: str, chunks: int | None, pipeline: int, share: int, recompute: Recompute
    ) -> bool:
        """share: samples of a micro-batch on every replica; only their product counts."""
        base = self.base
        config = replace(
            base,
            parallel=replace(base.parallel, pipeline=pipeline),
            batch=replace(base.batch, micro_size=share),
            schedule=replace(base.schedule, name=name, chunks=chunks),
            recompute=replace(base.recompute, method=recompute),
        )
        return not schedule_problems(config, 1)

    def _find_state_valid(self, zero: ZeroStage, recompute: Recompute) -> bool:
        return not self._state_problems(zero, recompute)

    def _state_problems(self, zero: ZeroStage, recompute: Recompute) -> list[str]:
        """Rules of single fields, on a mesh that breaks none, with a corpus where none is named yet."""
        base = self.base
        prefix = base.data.prefix or ("" if base.data.blend else "corpus")
        config = replace(
            base,
            data=replace(base.data, prefix=prefix),
            parallel=replace(base.parallel, tensor=1, context=1, pipeline=1, sequence=False, sequence_chunks=1),
            zero=replace(base.zero, stage=zero),
            recompute=replace(base.recompute, method=recompute),
        )
        return config.problems()

    def _find_replicas_valid(self, zero: ZeroStage, replicas: int) -> bool:
        return not replace(self.base.zero, stage=zero).replica_problems(replicas)


def divisors(number: int) -> list[int]:
    """All, ascending."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each < number]
