"""Rules that a configuration must satisfy to run on a number of ranks, without those that need tensors.

config/ checks each field; this module checks the rules of layout, batch and schedule. training/ adds those of kernels
and optimizers.
"""

from megapipe.config.run import PretrainConfig
from megapipe.layout.batch_plan import data_parallel_size, num_microbatches, ramp_problems
from megapipe.layout.scheduling import schedule_problems
from megapipe.layout.stages import StageLayout, slice_problems
from megapipe.layout.table import build_schedule
from megapipe.layout.units import StateUnits, has_memory_limits
from megapipe.schedules import ScheduleError
from megapipe.spec.family import family_problems
from megapipe.spec.layers import tensor_problems
from megapipe.spec.token_order import TokenOrder, chunks_per_rank, order_of


def run_problems(config: PretrainConfig, world_size: int) -> list[str]:
    """Return one message for each reason why a configuration with valid fields cannot run on `world_size` ranks."""
    replicas = data_parallel_size(config, world_size)
    problems = _layout_problems(config, world_size)
    problems = problems or ramp_problems(config.batch, config.batch.micro_size * replicas)
    problems += family_problems(config.model)
    problems += tensor_problems(config.model, config.parallel.tensor) or context_problems(config)
    problems += config.zero.replica_problems(replicas * config.parallel.context)
    problems = problems or schedule_problems(config, replicas) or slice_problems(config)
    return problems or _lowering_problems(config, world_size, replicas * config.parallel.context)


def _lowering_problems(config: PretrainConfig, world_size: int, replicas: int) -> list[str]:
    """Return a message for each limit of whole weights or gradients that is smaller than a layer, or than the layers
    that one action of a named schedule uses; or one about a schedule file that does not fit the model and the
    layout. replicas: ranks that hold the same weights."""
    file, limited = config.schedule.file, has_memory_limits(config)
    single = 1 in (config.zero.weight_buffers, config.offload.weight_buffers)
    if not (file or limited or single):
        return []
    layout = StageLayout.of(config)
    units = StateUnits(config, layout, replicas)
    problems, tight = units.problems() if limited else [], "" if file else units.tight_weights()
    if problems or not (file or tight):
        return problems
    try:
        build_schedule(config, num_microbatches(config, world_size), layout, replicas=replicas)
    except ScheduleError as error:
        if file:
            return [f"schedule {file}: {error}"]
        return [
            f"{tight}, but {config.schedule.name} overlaps the forward of one layer with "
            "the backward of another; set it to at least two layers, or use another schedule"
        ]
    return []


def token_order(config: PretrainConfig) -> TokenOrder:
    """Return how context ranks shard the tokens of a sample. A BERT's attention is not causal."""
    return order_of(config.parallel.context_attention, causal=config.model.is_causal)


def context_problems(config: PretrainConfig) -> list[str]:
    """Return one message for each reason why context ranks cannot shard samples; the sizes are valid."""
    size, kind = config.parallel.context, config.parallel.context_attention
    if size == 1:
        return []
    problems = []
    if config.model.mtp_layers:
        problems.append(
            f"model.mtp_layers is {config.model.mtp_layers}, which needs whole samples, but "
            f"parallel.context is {size}; set parallel.context to 1, or model.mtp_layers to 0"
        )
    length, parts = config.data.sequence_length, chunks_per_rank(token_order(config)) * size
    if length % parts:
        near = " or ".join(str(each) for each in (length // parts * parts, (length // parts + 1) * parts) if each)
        problems.append(
            f"data.sequence_length {length} is not divisible by {parts}, the number of chunks of a sample with "
            f"parallel.context {size} ({token_order(config)}); use {near}, for example"
        )
    for all_heads in dict.fromkeys(each.num_heads for each in config.model.kinds_of_layers.values()):
        heads = all_heads // config.parallel.tensor
        if kind == "all_to_all" and heads % size:
            working = ", ".join(str(each) for each in range(1, heads + 1) if heads % each == 0)
            problems.append(
                f"model.num_heads {all_heads} with parallel.tensor {config.parallel.tensor} "
                f"gives {heads} heads per tensor rank, which parallel.context "
                f"{size} does not divide, as parallel.context_attention all_to_all "
                f"requires; set it to ring, or parallel.context to one of {working}"
            )
    if kind == "ring" and (chunks := config.model.chunk_sizes(length)):
        problems.append(
            f"model.attention_chunk_size is {chunks[0]}, which parallel.context_attention "
            "ring does not support; set parallel.context_attention to all_to_all"
        )
    if kind == "ring" and config.model.attention == "flex":
        problems.append(
            "model.attention is 'flex', which parallel.context_attention ring does not "
            "support; set model.attention to auto, or parallel.context_attention to all_to_all"
        )
    return problems


def _layout_problems(config: PretrainConfig, world_size: int) -> list[str]:
    parallel = config.parallel
    model_ranks = parallel.pipeline * parallel.context * parallel.tensor
    shared = f" x parallel.context {parallel.context}" if parallel.context > 1 else ""
    data = parallel.data
    if data is not None and data * model_ranks != world_size:
        return [
            f"parallel.data {data} x parallel.pipeline {parallel.pipeline}{shared} "
            f"x parallel.tensor {parallel.tensor} = {data * model_ranks} ranks, "
            f"but the world size is {world_size}; start that many, as with megapipe "
            f"train -n {data * model_ranks} on one host, or change a parallel size"
        ]
    if world_size % model_ranks:
        return [
            f"world size {world_size} is not a multiple of parallel.pipeline "
            f"{parallel.pipeline}{shared} x parallel.tensor {parallel.tensor} "
            f"= {model_ranks}; start that many, as with megapipe train -n "
            f"{model_ranks} on one host, or a multiple, or change a parallel size"
        ]
    return []
