"""What a search may vary."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from megapipe.config.errors import ConfigError, nearest
from megapipe.config.run import PretrainConfig
from megapipe.planner.runs.moves import moves_to_host
from megapipe.schedules import ScheduleError
from megapipe.schedules.generators.registry import find_generator

ZeroStage = Literal[0, 1, 2, 3]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class SearchSpace:
    """The values that a search tries where a field is not pinned.

    A search sets parallel.data, tensor, pipeline, context and sequence, batch.micro_size, schedule.name and chunks,
    zero.stage and recompute.method; it leaves all other fields as they are.
    Sizes of tensor, pipeline, context and data parallelism are all divisors of the devices, micro-batch sizes all
    divisors of a replica's batch, numbers of chunks all up to the layers a rank; the bounds here cut these down.
    max_context: 1 leaves samples whole; raise it for long ones. schedules: names of pipeline schedules. 2bw and
    pipedream train with older weights, so they are left to the caller to name.
    """

    schedules: tuple[str, ...] = ("1f1b", "interleaved_1f1b")
    zero_stages: tuple[ZeroStage, ...] = (0, 1, 2, 3)
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    sequence: tuple[bool, ...] = (False, True)
    max_tensor: int | None = None
    max_pipeline: int | None = None
    max_context: int = 1
    max_micro_size: int | None = 64
    max_chunks: int | None = 8

    def problems(self) -> list[str]:
        """Every bound below 1 and every unknown name, one message each."""
        found = []
        for name in ("max_tensor", "max_pipeline", "max_context", "max_micro_size", "max_chunks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"{name} is {value}; it must be at least 1")
        for name in ("schedules", "zero_stages", "recompute", "sequence"):
            if not getattr(self, name):
                found.append(f"{name} is empty; name at least one value to try")
        for name in self.schedules:
            try:
                find_generator(name)
            except ScheduleError as error:
                found.append(f"schedules: {error}")
        return found


def check_request(base: PretrainConfig, devices: int, pinned: frozenset[str], space: SearchSpace) -> None:
    """Raise one ConfigError with all that is wrong before any layout is looked at."""
    known = set(_paths(base))
    problems = [
        f"pinned field {path!r} is in no configuration{nearest(path, known)}"
        for path in sorted(pinned)
        if path not in known
    ]
    if devices < 1:
        problems.append(f"{devices} devices asked for: a run takes 1 or more")
    problems += space.problems() + base.model.problems()
    if moves_to_host(base):
        problems.append(
            "offload: searches know nothing of copies to host memory; leave the group out, and give it to predict "
            "with the layout that was found"
        )
    if base.recompute.method == "auto":
        problems.append(
            "recompute.method auto: let planner.recompute_auto.limited open it for the search, or name none, "
            "selective or full"
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
