"""Whether a configuration can run on a number of ranks, as far as that can be told without a tensor.

config/ checks each field; here the layout's, the batch's and the schedule's own rules are asked. training/ adds what
kernels and optimizers demand.
"""

from megapipe.config.bert import BertPretrainConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.batch_plan import ramp_problems
from megapipe.layout.scheduling import build_schedule, schedule_problems
from megapipe.layout.stages import StageLayout
from megapipe.layout.token_order import TokenOrder, chunks_per_rank, order_of
from megapipe.schedules import ScheduleError
from megapipe.spec.layers import tensor_problems


def data_parallel_size(config: PretrainConfig, world_size: int) -> int:
    """Replicas: as asked, or what the world size leaves over pipeline, context and tensor."""
    parallel = config.parallel
    if parallel.data is not None:
        return parallel.data
    return max(1, world_size // (parallel.pipeline * parallel.context * parallel.tensor))


def num_microbatches(config: PretrainConfig, world_size: int) -> int:
    """Micro-batches of one replica in one step."""
    return config.batch.global_size // (config.batch.micro_size * data_parallel_size(config, world_size))


def run_problems(config: PretrainConfig, world_size: int) -> list[str]:
    """What keeps a configuration whose fields are valid from running on `world_size` ranks, one message each."""
    replicas = data_parallel_size(config, world_size)
    problems = _layout_problems(config, world_size)
    problems = problems or ramp_problems(config.batch, config.batch.micro_size * replicas)
    problems += tensor_problems(config.model, config.parallel.tensor) or context_problems(config)
    problems += config.zero.replica_problems(replicas * config.parallel.context)
    return problems or schedule_problems(config, replicas) or _file_problems(config, world_size)


def _file_problems(config: PretrainConfig, world_size: int) -> list[str]:
    """Return at most one message about a schedule file that does not fit the model and the layout."""
    if not config.schedule.file:
        return []
    replicas = data_parallel_size(config, world_size) * config.parallel.context
    try:
        layout = StageLayout.of(config)
        build_schedule(
            config,
            num_microbatches(config, world_size),
            units_per_stage=layout.units_per_stage,
            tied_groups=layout.tied,
            data_parallel=replicas > 1 or config.parallel.sequence,
        )
    except ScheduleError as error:
        return [f"schedule.file {config.schedule.file}: {str(error).splitlines()[0]}"]
    return []


def token_order(config: PretrainConfig) -> TokenOrder:
    """How a sample's tokens lie on the context ranks. A BERT sees both ways."""
    return order_of(config.parallel.context_attention, causal=not isinstance(config, BertPretrainConfig))


def context_problems(config: PretrainConfig) -> list[str]:
    """Why samples cannot be shared out over parallel.context ranks, one message per rule; the sizes are valid."""
    size, kind = config.parallel.context, config.parallel.context_attention
    if size == 1:
        return []
    problems = []
    length, parts = config.data.sequence_length, chunks_per_rank(token_order(config)) * size
    if length % parts:
        near = " or ".join(str(each) for each in (length // parts * parts, (length // parts + 1) * parts) if each)
        problems.append(
            f"data.sequence_length {length} is not divisible by {parts}, the number of chunks of a sample with "
            f"parallel.context {size} ({token_order(config)}); use {near}, for example"
        )
    heads = config.model.num_heads // config.parallel.tensor
    if kind == "all_to_all" and heads % size:
        working = ", ".join(str(each) for each in range(1, heads + 1) if heads % each == 0)
        problems.append(
            f"model.num_heads {config.model.num_heads} with parallel.tensor {config.parallel.tensor} gives {heads} "
            f"heads per tensor rank, which parallel.context {size} does not divide, as parallel.context_attention "
            f"all_to_all requires; set it to ring, or parallel.context to one of {working}"
        )
    if kind == "ring" and config.model.attention == "flex":
        problems.append(
            "model.attention is 'flex', which parallel.context_attention ring does not support; set model.attention "
            "to auto, or parallel.context_attention to all_to_all"
        )
    return problems


def _layout_problems(config: PretrainConfig, world_size: int) -> list[str]:
    parallel = config.parallel
    model_ranks = parallel.pipeline * parallel.context * parallel.tensor
    shared = f" x parallel.context {parallel.context}" if parallel.context > 1 else ""
    data = parallel.data
    if data is not None and data * model_ranks != world_size:
        return [
            f"parallel.data {data} x parallel.pipeline {parallel.pipeline}{shared} x parallel.tensor "
            f"{parallel.tensor} = {data * model_ranks} ranks, but the world size is {world_size}; start "
            f"that many, as with megapipe train -n {data * model_ranks} on one host, or change a parallel size"
        ]
    if world_size % model_ranks:
        return [
            f"world size {world_size} is not a multiple of parallel.pipeline {parallel.pipeline}{shared} x "
            f"parallel.tensor {parallel.tensor} = {model_ranks}; start that many, as with "
            f"megapipe train -n {model_ranks} on one host, or a multiple, or change a parallel size"
        ]
    return []
