"""The whole configuration against the world it is to run in, before any process group starts.

config/ checks each field; here every room's own rule is asked. All problems are told at once.
"""

from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.costs.gpt import tensor_problems
from megapipe.optim.learning_rate import learning_rate_problems
from megapipe.schedules import GENERATORS, ScheduleError, check_microbatches
from megapipe.schedules.balance import check_assignment
from megapipe.schedules.generators.registry import Options, find_generator
from megapipe.training.batch_plan import BatchPlan, ramp_problems


def data_parallel_size(config: PretrainConfig, world_size: int) -> int:
    """Replicas: as asked, or what the world size leaves over pipeline and tensor."""
    parallel = config.parallel
    if parallel.data is not None:
        return parallel.data
    return max(1, world_size // (parallel.pipeline * parallel.tensor))


def num_microbatches(config: PretrainConfig, world_size: int) -> int:
    """Micro-batches of one replica in one step."""
    return config.batch.global_size // (config.batch.micro_size * data_parallel_size(config, world_size))


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
    return options


def num_stages(config: PretrainConfig) -> int:
    """Stages of the model: each pipeline rank holds as many as the schedule gives it. Raises ScheduleError."""
    generator = find_generator(config.schedule.name)
    return config.parallel.pipeline * generator.number_of_chunks(schedule_options(config))


def validate(config: PretrainConfig, world_size: int) -> None:
    """Raise one ConfigError with every problem; return quietly when all can run on `world_size` ranks."""
    problems = config.model.problems() + config.problems()
    problems += learning_rate_problems(config.optimizer, config.training.steps)
    if not problems:
        problems = _layout_problems(config, world_size) or _batch_problems(config, world_size)
        problems += tensor_problems(config.model, config.parallel.tensor)
    if not problems:
        problems = _schedule_problems(config, world_size)
    if problems:
        raise ConfigError(problems)


def _layout_problems(config: PretrainConfig, world_size: int) -> list[str]:
    parallel = config.parallel
    model_ranks = parallel.pipeline * parallel.tensor
    data = parallel.data
    if data is not None and data * model_ranks != world_size:
        return [
            f"parallel.data {data} x parallel.pipeline {parallel.pipeline} x parallel.tensor {parallel.tensor} = "
            f"{data * model_ranks} ranks, but the world size is {world_size}; start torchrun with --nproc_per_node "
            f"{data * model_ranks} on one host, or change a parallel size"
        ]
    if world_size % model_ranks:
        return [
            f"world size {world_size} is not a multiple of parallel.pipeline {parallel.pipeline} x parallel.tensor "
            f"{parallel.tensor} = {model_ranks}; start torchrun with --nproc_per_node {model_ranks} (or a multiple), "
            "or change a parallel size"
        ]
    return []


def _batch_problems(config: PretrainConfig, world_size: int) -> list[str]:
    return ramp_problems(config.batch, config.batch.micro_size * data_parallel_size(config, world_size))


def _schedule_problems(config: PretrainConfig, world_size: int) -> list[str]:
    name, pipeline = config.schedule.name, config.parallel.pipeline
    share = config.batch.micro_size * data_parallel_size(config, world_size)
    for size in BatchPlan.of(config.batch).sizes():
        try:
            check_microbatches(name, pipeline, size // share, **schedule_options(config))
        except ScheduleError as error:
            at = f" (a step of {size} samples on the way up the ramp)" if size != config.batch.global_size else ""
            return [f"schedule.name: {error}{at}"]
    generator, layers = find_generator(name), config.model.num_layers + 2
    if generator.numerical_class == "B":
        return [
            f"schedule.name: {name} never flushes its pipeline, and training runs schedules that flush every step: "
            f"use {', '.join(other.name for other in GENERATORS.values() if other.numerical_class != 'B')}"
        ]
    chunks = num_stages(config) // pipeline
    try:
        generator.placement(pipeline, chunks)
    except ScheduleError as error:
        return [f"schedule.chunks: {error} ({name})"]
    if num_stages(config) > layers:
        each = f" x {chunks} stages a rank of {name}" if chunks > 1 else ""
        return [
            f"parallel.pipeline {pipeline}{each} exceeds the {layers} layers of the model (embedding, "
            f"{config.model.num_layers} blocks, head); every stage needs one: use at most {layers // chunks}"
        ]
    if config.parallel.layers_per_stage is not None:
        try:
            check_assignment(config.parallel.layers_per_stage, layers, num_stages(config))
        except ScheduleError as error:
            return [f"parallel.layers_per_stage: {error} (embedding and head count as one each)"]
    return []
