"""The schedule that a configuration asks for: whether it can run, and how it is built."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import cast

from megapipe.config.run import PretrainConfig
from megapipe.layout.batch_plan import BatchPlan
from megapipe.schedules import Schedule, ScheduleError, check_microbatches, rank_costs, simulate
from megapipe.schedules.actions import KIND, Kind
from megapipe.schedules.build import check_one_route, is_for_all_sizes, order, read_file, read_file_header
from megapipe.schedules.building_blocks import check_assignment
from megapipe.schedules.parameters import FileParameters
from megapipe.schedules.registry import Options, find_generator
from megapipe.schedules.schedule import Header

STEPS_COMPARED = 8
"""Steps over which the cost of an eager update is predicted, after as many that fill the pipeline."""

_CONFIGURED = ("chunks", "slices", "group_size", "two_bp", "max_pending", "update")
"""Options of schedules that the configuration has."""


def schedule_options(config: PretrainConfig) -> Options:
    """Return the options of the schedule that the configuration sets; the schedule chooses the others."""
    given = {name: getattr(config.schedule, name) for name in _CONFIGURED}
    options = {name: value for name, value in given.items() if value is not None and value is not False}
    return cast(Options, options)


def _file_parameters(config: PretrainConfig, num_microbatches: int) -> FileParameters:
    options = cast(Mapping[str, object], schedule_options(config))
    return FileParameters(config.parallel.pipeline, num_microbatches, options)


def read_schedule(config: PretrainConfig, num_microbatches: int) -> Schedule:
    """Return the schedule in the file of the configuration, for a number of micro-batches. Raises ScheduleError."""
    return read_file(Path(config.schedule.file), _file_parameters(config, num_microbatches))


def _file_header(config: PretrainConfig) -> Header:
    """Return the header of the schedule file, which names its stages. While the number of replicas is not known, it
    counts as 1."""
    count = max(1, config.batch.global_size // (config.batch.micro_size * (config.parallel.data or 1)))
    return read_file_header(Path(config.schedule.file), _file_parameters(config, count))


def schedule_name(config: PretrainConfig) -> str:
    """Return the name of the schedule, for a schedule file the one in its header. Raises ScheduleError."""
    if config.schedule.file:
        return _file_header(config).name
    return config.schedule.name


def num_stages(config: PretrainConfig) -> int:
    """Return the number of stages of all pipeline ranks, without shards of the vocabulary. Raises ScheduleError."""
    if config.schedule.file:
        return len(_file_header(config).stages)
    generator = find_generator(config.schedule.name)
    return config.parallel.pipeline * generator.number_of_chunks(schedule_options(config))


def num_slices(config: PretrainConfig) -> int:
    """Return the number of slices of each sequence, 1 if the schedule passes whole ones. Raises ScheduleError."""
    if config.schedule.file:
        return _file_header(config).slices
    return find_generator(config.schedule.name).number_of_slices(schedule_options(config))


def stage_ranks(config: PretrainConfig) -> tuple[int, ...]:
    """Return the pipeline rank of every stage, shards of the vocabulary included. Raises ScheduleError."""
    if config.schedule.file:
        return tuple(place.rank for place in _file_header(config).stages)
    chunks = find_generator(config.schedule.name).number_of_chunks(schedule_options(config))
    placed = _placed(config.schedule.name, config.parallel.pipeline, chunks)
    shards = range(config.parallel.pipeline) if config.parallel.vocabulary_variant else ()
    return (*placed, *shards, *shards)


@lru_cache(maxsize=1024)
def _placed(name: str, pipeline: int, chunks: int) -> tuple[int, ...]:
    return tuple(place.rank for place in find_generator(name).placement(pipeline, chunks).stages)


def schedule_problems(config: PretrainConfig, data_parallel_size: int) -> list[str]:
    """Return one message for each reason why the schedule cannot run; the sizes of batch and world already fit."""
    share = config.batch.micro_size * data_parallel_size
    try:
        problems = _file_problems(config, share) if config.schedule.file else _named_problems(config, share)
        problems = problems or _stage_problems(config, config.schedule.file or config.schedule.name)
        problems = problems or _vocabulary_problems(config, config.batch.global_size // share)
        return problems + _recomputation_problems(config) + _host_weight_problems(config, share)
    except ScheduleError as error:
        return [f"schedule: {error}"]


def _file_problems(config: PretrainConfig, share: int) -> list[str]:
    """Return why a file does not fit the run, such as a wrong number of micro-batches. Further checks need the
    model."""
    path = config.schedule.file
    if config.batch.ramp_start is not None and not is_for_all_sizes(Path(path)):
        return [
            f"the schedule file {path} is for a fixed number of micro-batches "
            "per step, but batch.ramp_start changes it; leave batch.ramp_start "
            "out, name a schedule, or write a file with parameters (format 3)"
        ]
    per_step = config.batch.global_size // share
    for size in BatchPlan.of(config.batch).sizes():
        header = read_schedule(config, size // share).header
    problems = []
    for what, said, here in (
        ("pipeline ranks", header.num_ranks, config.parallel.pipeline),
        ("micro-batches a step", header.whole_microbatches, per_step),
    ):
        if said != here:
            problems.append(
                f"the schedule file {path} is for {said} {what}, but this run has {here}; "
                "change one of the two, or write a file with parameters (format 3)"
            )
    if header.lowered and config.recompute.method != "none":
        problems.append(
            f"recompute.method is {config.recompute.method}, but the schedule file "
            f"{config.schedule.file} is lowered and defines recomputation itself; "
            "set recompute.method none, or use a file with only compute actions"
        )
    if header.lowered and (config.offload.activations != "none" or config.offload.optimizer or config.offload.weights):
        problems.append(
            f"offload is set, but the schedule file {config.schedule.file} is lowered and defines copies to host "
            "memory itself; leave offload out, or use a file with only compute actions"
        )
    return problems or _asynchronous_problems(config, header.updates_per_step)


def _named_problems(config: PretrainConfig, share: int) -> list[str]:
    name, pipeline = config.schedule.name, config.parallel.pipeline
    for size in BatchPlan.of(config.batch).sizes():
        try:
            check_microbatches(name, pipeline, size // share, **schedule_options(config))
        except ScheduleError as error:
            at = f" (at a step of {size} samples during the ramp)" if size != config.batch.global_size else ""
            return [f"schedule.name: {error}{at}"]
    generator = find_generator(name)
    chunks = num_stages(config) // pipeline
    try:
        placement = generator.placement(pipeline, chunks)
    except ScheduleError as error:
        return [f"schedule.chunks: {error} ({name})"]
    check_one_route(name, len(placement.routes))
    per_step = config.batch.global_size // share
    policy = generator.policy_of(pipeline, per_step, schedule_options(config))
    return _asynchronous_problems(config, policy.updates_per_step)


def _asynchronous_problems(config: PretrainConfig, updates_per_step: int) -> list[str]:
    """Return why a schedule that updates before a step's gradients are complete cannot run this configuration."""
    if updates_per_step == 1:
        return []
    problems = []
    if config.optimizer.clip_norm is not None:
        problems.append(
            f"optimizer.clip_norm {config.optimizer.clip_norm} needs the "
            "gradient norm over all ranks before an update, but this schedule "
            f"updates {updates_per_step} times per step, each rank at its own "
            "time; set optimizer.clip_norm null, or use 2bw, which clips exactly"
        )
    if config.training.precision == "fp16":
        problems.append(
            "training.precision fp16 skips steps whose gradients overflow, but this "
            "schedule updates before that is known; set training.precision bf16, or use 2bw"
        )
    for field, used, otherwise in (
        ("tie_embeddings is true", config.model.tie_embeddings, "tie_embeddings false"),
        (f"mtp_layers is {config.model.mtp_layers}", config.model.mtp_layers, "mtp_layers 0"),
    ):
        if used and config.parallel.pipeline > 1:
            problems.append(
                f"model.{field}, but the tied weight is on the first and the last rank, which "
                f"this schedule updates at different times; set model.{otherwise}, or use 2bw"
            )
    if config.model.shares_blocks and config.parallel.pipeline > 1:
        problems.append(
            "model.shared_blocks is true, but each rank has a copy of the shared weights, which this schedule updates "
            "at different times; set model.shared_blocks false, or use 2bw"
        )
    return problems


def splits_backwards(config: PretrainConfig) -> bool:
    """Return whether the schedule splits backwards into input and weight halves. Raises ScheduleError."""
    if config.schedule.file:
        body = read_schedule(config, _file_header(config).num_microbatches).sections.body
        return any((rows[:, KIND] == Kind.BACKWARD_INPUT).any() for rows in body)
    return config.schedule.two_bp or find_generator(config.schedule.name).splits


def _recomputation_problems(config: PretrainConfig) -> list[str]:
    if not config.recompute.logits or not splits_backwards(config):
        return []
    return [
        "recompute.logits is true, but this schedule splits the backward into two "
        "halves, which would each compute the logits; set recompute.logits false, "
        "or use a schedule with whole backwards, such as 1f1b without schedule.two_bp"
    ]


def _vocabulary_problems(config: PretrainConfig, num_microbatches: int) -> list[str]:
    """Return why pipeline ranks cannot share the vocabulary. Raises ScheduleError if the order does not allow it."""
    parallel = config.parallel
    if parallel.vocabulary == "tensor":
        return []
    problems = [
        f"parallel.vocabulary is {parallel.vocabulary}, but {what}; {remedy}, or set parallel.vocabulary tensor"
        for wrong, what, remedy in (
            (parallel.pipeline == 1, "parallel.pipeline is 1", "use more pipeline ranks"),
            (
                not config.model.is_causal,
                "only a GPT's vocabulary can be shared by pipeline ranks",
                "train a GPT",
            ),
            (
                config.model.mtp_layers > 0,
                f"model.mtp_layers is {config.model.mtp_layers}, whose blocks use the output layer on its last rank",
                "set model.mtp_layers 0",
            ),
            (parallel.sequence, "parallel.sequence is true", "set parallel.sequence false"),
            (config.recompute.logits, "recompute.logits is true", "set recompute.logits false"),
            (bool(config.schedule.file), "schedule files do not place its passes", "name a schedule"),
        )
        if wrong
    ]
    if not problems:
        order(
            config.schedule.name,
            parallel.pipeline,
            num_microbatches,
            vocabulary=parallel.vocabulary_variant,
            **schedule_options(config),
        )
    return problems


def _host_weight_problems(config: PretrainConfig, share: int) -> list[str]:
    """Return why the schedule cannot run with weights that leave the device after each use."""
    if not config.offload.weights or _flushes(config, config.batch.global_size // share):
        return []
    return [
        f"offload.weights is true, but {config.schedule.file or config.schedule.name} "
        "never flushes and keeps several weight versions on the device; set "
        "offload.weights false, or use a schedule that flushes, such as 1f1b"
    ]


def _flushes(config: PretrainConfig, num_microbatches: int) -> bool:
    """Return whether the schedule ends every step with an empty pipeline."""
    if config.schedule.file:
        return read_schedule(config, num_microbatches).flushes
    generator, options = find_generator(config.schedule.name), schedule_options(config)
    return generator.policy_of(config.parallel.pipeline, num_microbatches, options).flushes


def _stage_problems(config: PretrainConfig, name: str) -> list[str]:
    layers, stages, pipeline = config.model.num_layers + 2, num_stages(config), config.parallel.pipeline
    if stages > layers:
        chunks = stages // pipeline
        each = f" x {chunks} stages per rank of {name}" if chunks > 1 else ""
        return [
            f"parallel.pipeline {pipeline}{each} exceeds the {layers} layers "
            f"of the model (embedding, {config.model.num_layers} blocks, head); "
            f"every stage needs at least one: use at most {layers // chunks}"
        ]
    if config.parallel.layers_per_stage is not None:
        try:
            check_assignment(config.parallel.layers_per_stage, layers, stages)
        except ScheduleError as error:
            return [f"parallel.layers_per_stage: {error} (the embedding and the head count as one layer each)"]
    return []


def eager_cost(schedule: Schedule) -> float:
    """Return the cost of eager updates in a schedule that never flushes, where each update waits for the norm over all
    ranks: the time of steps, in the long run, over their work, minus 1. Backwards take twice as long as forwards."""
    costs = rank_costs(schedule.header)
    longer, shorter = simulate(schedule, costs, 2 * STEPS_COMPARED), simulate(schedule, costs, STEPS_COMPARED)
    return (longer.makespan - shorter.makespan) / (longer.ideal - shorter.ideal) - 1.0
