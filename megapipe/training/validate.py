"""The whole configuration against the world it is to run in, before any process group starts.

config/ checks each field; here every room's own rule is asked. All problems are told at once.
"""

from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.costs.gpt import tensor_problems
from megapipe.optim.learning_rate import learning_rate_problems
from megapipe.training.batch_plan import ramp_problems
from megapipe.training.context_layout import context_problems
from megapipe.training.kernel_choices import kernel_problems
from megapipe.training.scheduling import schedule_problems


def data_parallel_size(config: PretrainConfig, world_size: int) -> int:
    """Replicas: as asked, or what the world size leaves over pipeline, context and tensor."""
    parallel = config.parallel
    if parallel.data is not None:
        return parallel.data
    return max(1, world_size // (parallel.pipeline * parallel.context * parallel.tensor))


def num_microbatches(config: PretrainConfig, world_size: int) -> int:
    """Micro-batches of one replica in one step."""
    return config.batch.global_size // (config.batch.micro_size * data_parallel_size(config, world_size))


def validate(config: PretrainConfig, world_size: int) -> None:
    """Raise one ConfigError with every problem; return quietly when all can run on `world_size` ranks."""
    problems = config.model.problems() + config.problems()
    problems += learning_rate_problems(config.optimizer, config.training.steps)
    problems += kernel_problems(config)
    if not problems:
        problems = _layout_problems(config, world_size) or _batch_problems(config, world_size)
        problems += tensor_problems(config.model, config.parallel.tensor) or context_problems(config)
        replicas = data_parallel_size(config, world_size) * config.parallel.context
        problems += config.zero.replica_problems(replicas)
    if not problems:
        problems = schedule_problems(config, data_parallel_size(config, world_size))
    if problems:
        raise ConfigError(problems)


def _layout_problems(config: PretrainConfig, world_size: int) -> list[str]:
    parallel = config.parallel
    model_ranks = parallel.pipeline * parallel.context * parallel.tensor
    shared = f" x parallel.context {parallel.context}" if parallel.context > 1 else ""
    data = parallel.data
    if data is not None and data * model_ranks != world_size:
        return [
            f"parallel.data {data} x parallel.pipeline {parallel.pipeline}{shared} x parallel.tensor "
            f"{parallel.tensor} = {data * model_ranks} ranks, but the world size is {world_size}; start torchrun with "
            f"--nproc_per_node {data * model_ranks} on one host, or change a parallel size"
        ]
    if world_size % model_ranks:
        return [
            f"world size {world_size} is not a multiple of parallel.pipeline {parallel.pipeline}{shared} x "
            f"parallel.tensor {parallel.tensor} = {model_ranks}; start torchrun with --nproc_per_node "
            f"{model_ranks} (or a multiple), or change a parallel size"
        ]
    return []


def _batch_problems(config: PretrainConfig, world_size: int) -> list[str]:
    return ramp_problems(config.batch, config.batch.micro_size * data_parallel_size(config, world_size))
