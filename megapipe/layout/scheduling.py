"""The schedule that a configuration asks for: whether it can run, and how it is built."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from megapipe.config.run import PretrainConfig
from megapipe.layout.batch_plan import BatchPlan
from megapipe.schedules import Schedule, ScheduleError, build, check_microbatches, rank_costs, simulate
from megapipe.schedules.actions import KIND, Kind
from megapipe.schedules.balance import check_assignment
from megapipe.schedules.generators.registry import Options, find_generator
from megapipe.schedules.load_file import fit_for_training, read_file
from megapipe.schedules.lowering import Spans
from megapipe.schedules.offload import NOTHING, Offload
from megapipe.schedules.schedule import Mode

STEPS_COMPARED = 8
"""Steps over which the cost of an eager update is predicted, after as many that fill the pipeline."""


def schedule_options(config: PretrainConfig) -> Options:
    """What the configuration asks of its schedule beside the name; what it leaves open is the schedule's to choose."""
    schedule, options = config.schedule, Options()
    if schedule.chunks is not None:
        options["chunks"] = schedule.chunks
    if schedule.group_size is not None:
        options["group_size"] = schedule.group_size
    if schedule.two_bp:
        options["two_bp"] = True
    if schedule.max_pending is not None:
        options["max_pending"] = schedule.max_pending
    if schedule.update is not None:
        options["update"] = schedule.update
    return options


def schedule_name(config: PretrainConfig) -> str:
    """Return the name of the schedule, for a schedule file the one in its header. Raises ScheduleError."""
    if config.schedule.file:
        return read_file(Path(config.schedule.file)).header.name
    return config.schedule.name


def num_stages(config: PretrainConfig) -> int:
    """Stages of the model, over all pipeline ranks. Raises ScheduleError."""
    if config.schedule.file:
        return len(read_file(Path(config.schedule.file)).header.stages)
    generator = find_generator(config.schedule.name)
    return config.parallel.pipeline * generator.number_of_chunks(schedule_options(config))


def build_schedule(
    config: PretrainConfig,
    num_microbatches: int,
    *,
    units_per_stage: Sequence[int],
    tied_groups: Sequence[Sequence[int]],
    data_parallel: bool,
    recompute: Spans = (),
    offload: Offload = NOTHING,
    mode: Mode = "train",
) -> Schedule:
    """The lowered schedule that the configuration names, for micro-batches of one replica in one step.

    units_per_stage, tied_groups: how the model falls into stages. recompute: what of them runs again. offload: what
    of them goes to host memory. Raises ScheduleError.
    """
    pipeline, ahead = config.parallel.pipeline, config.schedule.receive_ahead
    zero = config.zero
    sharded = {
        "weight_buffers": zero.weight_buffers if data_parallel and zero.stage >= 3 else 0,
        "whole_gradients": zero.gradient_buffers if data_parallel and zero.stage >= 2 else 0,
    }
    zero_stages = unit_stages(config, units_per_stage) if any(sharded.values()) else ()
    if config.schedule.file:
        return fit_for_training(
            read_file(Path(config.schedule.file)),
            pipeline,
            num_microbatches,
            mode=mode,
            units_per_stage=units_per_stage,
            tied_groups=tied_groups,
            data_parallel=data_parallel,
            receive_ahead=ahead,
            recompute=recompute,
            **sharded,
            zero_stages=zero_stages,
            offload=offload,
        )
    return build(
        config.schedule.name,
        pipeline,
        num_microbatches,
        mode=mode,
        units_per_stage=units_per_stage,
        tied_groups=tied_groups,
        data_parallel=data_parallel,
        receive_ahead=ahead,
        recompute=recompute,
        **sharded,
        zero_stages=zero_stages,
        offload=offload,
        **schedule_options(config),
    )


def unit_stages(config: PretrainConfig, units_per_stage: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return by pipeline stage the ZeRO stage of each layer; nothing if all have zero.stage."""
    if not config.zero.layer_stages:
        return ()
    names = ["embedding", *(f"blocks.{index}" for index in range(config.model.num_layers)), "head"]
    stages = iter([config.zero.stage_of(name) for name in names])
    return tuple(tuple(islice(stages, count)) for count in units_per_stage)


def schedule_problems(config: PretrainConfig, data_parallel_size: int) -> list[str]:
    """What keeps the schedule from running, one message each; the sizes of batch and world fit already."""
    share = config.batch.micro_size * data_parallel_size
    try:
        if config.schedule.file:
            problems = _file_problems(config, share) or _stage_problems(config, config.schedule.file)
        else:
            problems = _named_problems(config, share) or _stage_problems(config, config.schedule.name)
        return problems + _recomputation_problems(config) + _host_weight_problems(config, share)
    except ScheduleError as error:
        return [f"schedule: {error}"]


def _file_problems(config: PretrainConfig, share: int) -> list[str]:
    """A file is for one number of micro-batches; the rest is held against the run when it is built for the model."""
    if config.batch.ramp_start is not None:
        return [
            "schedule.file is for a fixed number of micro-batches per step, which batch.ramp_start changes; leave one "
            "of the two out"
        ]
    header = read_file(Path(config.schedule.file)).header
    per_step = config.batch.global_size // share
    problems = []
    for what, said, here in (
        ("pipeline ranks", header.num_ranks, config.parallel.pipeline),
        ("micro-batches a step", header.num_microbatches, per_step),
    ):
        if said != here:
            problems.append(f"schedule.file {config.schedule.file} is for {said} {what}, but this run has {here}")
    if header.lowered and config.recompute.method != "none":
        problems.append(
            f"recompute.method is {config.recompute.method}, but schedule.file {config.schedule.file} is lowered and "
            "defines recomputation itself; set recompute.method none, or use a file with only compute actions"
        )
    if header.lowered and (config.offload.activations != "none" or config.offload.optimizer or config.offload.weights):
        problems.append(
            f"offload is set, but schedule.file {config.schedule.file} is lowered and defines copies to host memory "
            "itself; leave offload out, or use a file with only compute actions"
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
        generator.placement(pipeline, chunks)
    except ScheduleError as error:
        return [f"schedule.chunks: {error} ({name})"]
    per_step = config.batch.global_size // share
    policy = generator.policy_of(pipeline, per_step, schedule_options(config))
    return _asynchronous_problems(config, policy.updates_per_step)


def _asynchronous_problems(config: PretrainConfig, updates_per_step: int) -> list[str]:
    """What a schedule cannot do that updates before a step's gradients are complete."""
    if updates_per_step == 1:
        return []
    problems = []
    if config.optimizer.clip_norm is not None:
        problems.append(
            f"optimizer.clip_norm {config.optimizer.clip_norm} needs the gradient norm over all ranks before an "
            f"update, but this schedule updates {updates_per_step} times per step, each rank at its own time; set "
            "optimizer.clip_norm null, or use 2bw, which clips exactly"
        )
    if config.training.precision == "fp16":
        problems.append(
            "training.precision fp16 skips steps whose gradients overflow, but this schedule updates before that is "
            "known; set training.precision bf16, or use 2bw"
        )
    if config.model.tie_embeddings and config.parallel.pipeline > 1:
        problems.append(
            "model.tie_embeddings is true, but the tied weight is on the first and the last rank, which this schedule "
            "updates at different times; set model.tie_embeddings false, or use 2bw"
        )
    return problems


def splits_backwards(config: PretrainConfig) -> bool:
    """Whether the schedule runs the input half and the weight half of backwards apart. Raises ScheduleError."""
    if config.schedule.file:
        body = read_file(Path(config.schedule.file)).sections.body
        return any((rows[:, KIND] == Kind.BACKWARD_INPUT).any() for rows in body)
    return config.schedule.two_bp or find_generator(config.schedule.name).splits


def _recomputation_problems(config: PretrainConfig) -> list[str]:
    if not config.recompute.logits or not splits_backwards(config):
        return []
    return [
        "recompute.logits is true, but this schedule splits the backward into two halves, which would each compute "
        "the logits; set recompute.logits false, or use a schedule with whole backwards, such as 1f1b without "
        "schedule.two_bp"
    ]


def _host_weight_problems(config: PretrainConfig, share: int) -> list[str]:
    """What does not go with weights that leave the device behind their use."""
    if not config.offload.weights or _flushes(config, config.batch.global_size // share):
        return []
    return [
        f"offload.weights is true, but {config.schedule.file or config.schedule.name} never flushes and keeps several "
        "weight versions on the device; set offload.weights false, or use a schedule that flushes, such as 1f1b"
    ]


def _flushes(config: PretrainConfig, num_microbatches: int) -> bool:
    """Whether the schedule ends every step with an empty pipeline."""
    if config.schedule.file:
        return read_file(Path(config.schedule.file)).flushes
    generator, options = find_generator(config.schedule.name), schedule_options(config)
    return generator.policy_of(config.parallel.pipeline, num_microbatches, options).flushes


def _stage_problems(config: PretrainConfig, name: str) -> list[str]:
    layers, stages, pipeline = config.model.num_layers + 2, num_stages(config), config.parallel.pipeline
    if stages > layers:
        chunks = stages // pipeline
        each = f" x {chunks} stages per rank of {name}" if chunks > 1 else ""
        return [
            f"parallel.pipeline {pipeline}{each} exceeds the {layers} layers of the model (embedding, "
            f"{config.model.num_layers} blocks, head); every stage needs at least one: use at most {layers // chunks}"
        ]
    if config.parallel.layers_per_stage is not None:
        try:
            check_assignment(config.parallel.layers_per_stage, layers, stages)
        except ScheduleError as error:
            return [f"parallel.layers_per_stage: {error} (the embedding and the head count as one layer each)"]
    return []


def eager_cost(schedule: Schedule) -> float:
    """How much longer than their work alone steps take, in the long run: what eager updates cost a schedule that
    never flushes, as each waits for the norm over all ranks. Backwards are taken to be twice as long as forwards."""
    costs = rank_costs(schedule.header)
    longer, shorter = simulate(schedule, costs, 2 * STEPS_COMPARED), simulate(schedule, costs, STEPS_COMPARED)
    return (longer.makespan - shorter.makespan) / (longer.ideal - shorter.ideal) - 1.0
