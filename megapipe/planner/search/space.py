"""What a search may vary."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from megapipe.config.errors import ConfigError, nearest
from megapipe.config.run import PretrainConfig
from megapipe.layout.moves import moves_to_host
from megapipe.schedules import ScheduleError
from megapipe.schedules.generators.registry import GENERATORS, find_generator

ZeroStage = Literal[0, 1, 2, 3]
Recompute = Literal["none", "selective", "full"]


MIN_CONTEXT_TOKENS = 2048
"""Minimum number of tokens of a sample on each context rank, by default."""

PROMISING = 24
"""Number of divisions of ranks, the best by their bounds, that are also tried with other schedules."""


@dataclass(frozen=True)
class SearchSpace:
    """The values that a search tries where a field is not pinned.

    A search sets parallel.data, tensor, pipeline, context, sequence and sequence_chunks, batch.micro_size,
    schedule.name and chunks, zero.stage and recompute.method; it leaves all other fields as they are. Sizes of tensor,
    pipeline, context and data parallelism are all divisors of the devices, micro-batch sizes all divisors of a
    replica's batch, and numbers of chunks all up to `all_chunks_up_to`, or above it those that divide the blocks
    evenly. The fields below limit these.

    schedules: names of pipeline schedules, tried with every division of ranks. other_schedules: names tried only with
    the `PROMISING` best divisions. By default generators say which these are; those that train with older weights must
    be named.
    sequence: 0 for no sequence parallelism, 1 for sequence parallelism, n above 1 for sequence parallelism with
    parallel.sequence_chunks n, whose traffic overlaps with products. max_context: by default, each context rank has
    at least `MIN_CONTEXT_TOKENS` tokens.
    """

    schedules: tuple[str, ...] = tuple(name for name, each in GENERATORS.items() if each.search == "all")
    other_schedules: tuple[str, ...] = tuple(name for name, each in GENERATORS.items() if each.search == "promising")
    zero_stages: tuple[ZeroStage, ...] = (0, 1, 2, 3)
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    sequence: tuple[int, ...] = (0, 1, 4)
    max_tensor: int | None = None
    max_pipeline: int | None = None
    max_context: int | None = None
    max_micro_size: int | None = 64
    max_chunks: int | None = None
    all_chunks_up_to: int = 8

    def not_searched(self, base: PretrainConfig, pinned: frozenset[str]) -> list[str]:
        """Return phrases for what a search of this space leaves out; `base` and `pinned` as in `Layouts`."""
        found = []
        if not {"schedule.name", "schedule.chunks"} & pinned and not base.schedule.file:
            if self.other_schedules:
                found.append(
                    f"{', '.join(self.other_schedules)} except on the {PROMISING} most promising divisions of ranks"
                )
            tried = (*self.schedules, *self.other_schedules)
            left = [name for name in GENERATORS if name not in tried]
            found += [f"schedules {', '.join(left)} (--schedules adds them)"] if left else []
        if "schedule.chunks" not in pinned:
            found.append(f"more than {self.all_chunks_up_to} chunks, unless they divide the blocks evenly")
        if "parallel.context" not in pinned and base.data.sequence_length >= MIN_CONTEXT_TOKENS:
            found.append(f"parallel.context with fewer than {MIN_CONTEXT_TOKENS:,} tokens per rank")
        if "parallel.sequence_chunks" not in pinned:
            chunks = ", ".join(str(each) for each in self.sequence if each)
            found.append(f"parallel.sequence_chunks other than {chunks}" if chunks else "sequence parallelism")
        if "batch.micro_size" not in pinned and self.max_micro_size is not None:
            found.append(f"micro-batches above {self.max_micro_size}")
        fixed = ("batch.global_size", "parallel.layers_per_stage", "zero.shard_size", "recompute.num_blocks")
        found.append(f"other values of {', '.join(fixed)}, offload, fp8, and every field not in the table")
        return found

    def problems(self) -> list[str]:
        """Every bound below 1 and every unknown name, one message each."""
        found = []
        for name in (
            "max_tensor", "max_pipeline", "max_context", "max_micro_size", "max_chunks", "all_chunks_up_to",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"{name} is {value}; it must be at least 1")
        for name in ("schedules", "zero_stages", "recompute", "sequence"):
            if not getattr(self, name):
                found.append(f"{name} is empty; set at least one value to try")
        for name in (*self.schedules, *self.other_schedules):
            try:
                find_generator(name)
            except ScheduleError as error:
                found.append(f"schedules: {error}")
        return found


def check_request(base: PretrainConfig, devices: int, pinned: frozenset[str], space: SearchSpace) -> None:
    """Raise one ConfigError with all that is wrong before any layout is looked at."""
    known = set(_paths(base))
    problems = [
        f"pinned field {path!r} is not a field of a configuration{nearest(path, known)}"
        for path in sorted(pinned)
        if path not in known
    ]
    if devices < 1:
        problems.append(f"the number of devices is {devices}; it must be at least 1")
    problems += space.problems() + base.model.problems()
    if moves_to_host(base):
        problems.append(
            "offload is set, but a search does not model copies to host memory; leave it out here, and use it with "
            "megapipe plan predict on the best layout"
        )
    if base.recompute.method == "auto":
        problems.append(
            "recompute.method auto must be resolved before a search: call planner.recompute_auto.limited, or set "
            "none, selective or full"
        )
    if not base.schedule.file:
        try:
            find_generator(base.schedule.name)
        except ScheduleError as error:
            problems.append(f"schedule.name: {error}")
    sizes = {
        "batch.global_size": base.batch.global_size,
        "batch.micro_size": base.batch.micro_size,
        "batch.ramp_start": base.batch.ramp_start,
        "parallel.tensor": base.parallel.tensor,
        "parallel.pipeline": base.parallel.pipeline,
        "parallel.context": base.parallel.context,
        "parallel.data": base.parallel.data,
        "parallel.sequence_chunks": base.parallel.sequence_chunks,
    }
    problems += [
        f"{name} is {size}; it must be at least 1" for name, size in sizes.items() if size is not None and size < 1
    ]
    if problems:
        raise ConfigError(problems)


def _paths(config: Any, prefix: str = "") -> Iterator[str]:
    for each in fields(config):
        value = getattr(config, each.name)
        yield prefix + each.name
        if is_dataclass(value):
            yield from _paths(value, f"{prefix}{each.name}.")
