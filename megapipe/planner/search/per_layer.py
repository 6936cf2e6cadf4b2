"""Galvatron's strategies layer by layer, for a model and a machine of this project: advice.

The trainer runs one strategy for all layers. What a plan by layers gains over that says whether it would be worth
more; where it wants one strategy everywhere, the trainer can run it.
"""

from typing import Any

from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware
from megapipe.planner.cost.layer_times import LayerTimes
from megapipe.planner.cost.roofline_times import RooflineTimes
from megapipe.planner.galvatron.costs import STATES, EqualDevices, LayerProfile
from megapipe.planner.galvatron.search import Plan, search
from megapipe.planner.galvatron.strategies import Strategy
from megapipe.planner.search.profiles import layer_figures, machine_figures
from megapipe.spec.layers import tensor_problems

ADVICE = "this is a paper's method; megapipe cannot train it, because it uses one strategy for all layers"


def per_layer(
    config: PretrainConfig,
    hardware: Hardware,
    devices: int,
    *,
    times: LayerTimes | None = None,
    recompute: bool = True,
    units: int = 128,
) -> dict[str, Any]:
    """The plan of Galvatron's search (`planner.galvatron.search`) for batches of batch.global_size, ready for JSON.

    A layer's state counts a quarter for its weights, as Galvatron's four equal parts want it, so that mixed precision
    comes out right in memory and a little high in traffic.

    times: of layers; by default the roofline of the first group's device. recompute: strategies with recomputation
    are tried too. units: parts in which memory is counted.

    Raises:
        ConfigError: devices that are no power of 2, a precision without a peak, or nothing that fits.
    """
    times = RooflineTimes(hardware.groups[0].device) if times is None else times
    given = machine_figures(hardware, devices)
    machine = EqualDevices(
        devices, min(devices, given.devices_per_node), given.memory_bytes, given.inside, given.outside
    )
    layers = layer_figures(config, hardware, times, micro_size=1)
    profiles = [
        LayerProfile(each.forward, each.state / STATES, max(each.kept, each.boundary), each.boundary)
        for each in layers
    ]
    try:
        plan = search(
            profiles,
            machine,
            [config.batch.global_size],
            recompute=recompute,
            units=units,
            tensor_valid=lambda size: not tensor_problems(config.model, size),
        )
    except ValueError as error:
        raise ConfigError(f"per-layer plan: {error}") from error
    return _as_json(plan, [each.name for each in layers], config)


def _as_json(plan: Plan, names: list[str], config: PretrainConfig) -> dict[str, Any]:
    stages = []
    for stage in plan.stages:
        members = zip(names[stage.first : stage.last], stage.strategies, strict=True)
        stages.append(
            {
                "memory_bytes": stage.memory_bytes,
                "layers": [{"name": name} | _strategy(strategy) for name, strategy in members],
            }
        )
    strategies = {(each.levels, each.recompute) for stage in plan.stages for each in stage.strategies}
    return {
        "note": ADVICE,
        "source": "Galvatron's search, arXiv 2211.13878",
        "step_time_s": plan.seconds,
        "tokens_per_s": plan.sequences_per_second * config.data.sequence_length,
        "pipeline": len(plan.stages),
        "microbatches": plan.microbatches,
        "one_strategy": len(strategies) == 1,
        "stages": stages,
    }


def _strategy(strategy: Strategy) -> dict[str, Any]:
    """Degrees by method, and their order from groups that reach far to groups of neighbours."""
    return {
        "data": strategy.degree("data"),
        "sharded_data": strategy.degree("sharded"),
        "tensor": strategy.degree("tensor"),
        "placement": [method for method, _ in strategy.levels],
        "recompute": strategy.recompute,
    }
