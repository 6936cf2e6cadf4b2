"""PipeDream-2BW's own planner for a model and a machine of this project."""

from dataclasses import replace
from functools import cache
from typing import Any

from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.config.schedule import ScheduleConfig
from megapipe.layout.hardware.description import Hardware
from megapipe.planner.cost.layer_times import LayerTimes
from megapipe.planner.cost.model import estimate
from megapipe.planner.cost.roofline_times import RooflineTimes
from megapipe.planner.pipedream.memory import Footprint
from megapipe.planner.pipedream.two_buffered import BlockModel, Configuration, Machine, plan
from megapipe.planner.search.profiles import SingleDeviceLayer, layer_figures, machine_figures, single_device

GRADIENT_BYTES = 4
"""Of an element: gradients are summed in fp32."""


def two_buffered_plan(
    config: PretrainConfig, hardware: Hardware, devices: int, *, times: LayerTimes | None = None
) -> dict[str, Any]:
    """The answer of algorithm 1 (arXiv 2006.09503) for batches of batch.global_size, ready for JSON.

    The paper's blocks are equal: embedding and head count as spread over them. A version has what the paper gives it,
    weights and all that belongs to them, more than the second copy of the weights that this project keeps, so that
    memory is on the safe side; `settings` are the fields that run the plan here, `by_cost_model` is what this
    project's own cost model says of it. The two differ: the paper's takes no time for an update that the next
    forwards wait for, and a sequence to be as fast in any micro-batch.

    times: of layers; by default the roofline of the first group's device.

    Raises:
        ConfigError: nothing fits, or a precision without a peak.
    """
    times = RooflineTimes(hardware.groups[0].device) if times is None else times
    given = machine_figures(hardware, devices)
    machine = Machine(devices, given.devices_per_node, given.memory_bytes, given.inside, given.outside)

    @cache
    def figures(micro_size: int) -> tuple[SingleDeviceLayer, ...]:
        return layer_figures(config, hardware, times, micro_size)

    blocks = config.model.num_layers
    of_one = figures(1)
    model = BlockModel(
        blocks,
        lambda size: sum(each.forward + each.backward for each in figures(size)) / blocks,
        lambda size: Footprint(
            sum(each.state for each in of_one), sum(each.kept for each in figures(size)), figures(size)[0].boundary
        ),
        GRADIENT_BYTES * sum(each.parameters for each in of_one),
    )
    try:
        found = plan(model, machine, config.batch.global_size)
    except ValueError as error:
        raise ConfigError(f"2bw plan: {error}") from error
    return {
        "source": "PipeDream-2BW's planner, arXiv 2006.09503, algorithm 1",
        "width": found.width,
        "depth": found.depth,
        "micro_size": found.micro_size,
        "execution": found.execution,
        "accumulation": found.accumulation,
        "devices": found.width * found.depth,
        "memory_bytes": found.memory_bytes,
        "tokens_per_s": found.sequences_per_second * config.data.sequence_length,
        "step_time_s": found.batch_size / found.sequences_per_second,
        "settings": _settings(found),
        "by_cost_model": estimate(_configured(config, found), hardware, times=times).as_json(),
    }


def _configured(config: PretrainConfig, found: Configuration) -> PretrainConfig:
    """The run with `_settings`, and nothing else that would change its layout."""
    settings = _settings(found)
    whole = single_device(config, found.micro_size)
    return replace(
        whole,
        parallel=replace(whole.parallel, data=found.width, pipeline=found.depth),
        schedule=replace(whole.schedule, name=settings["schedule.name"]),
        recompute=replace(whole.recompute, method=settings["recompute.method"]),
    )


def _settings(found: Configuration) -> dict[str, Any]:
    """Without pipelining one micro-batch is in a pipeline at a time, which no schedule here does: then a depth of 1 is
    plain accumulation, and deeper ones run with the default schedule, which is never slower."""
    pipelined = found.execution != "no_pipelining"
    return {
        "parallel.data": found.width,
        "parallel.pipeline": found.depth,
        "parallel.tensor": 1,
        "batch.micro_size": found.micro_size,
        "schedule.name": "2bw" if pipelined else ScheduleConfig.name,
        "recompute.method": "full" if found.execution == "recomputed" else "none",
    }
