"""The cost model: a step's time and memory for one layout on one machine, estimated or by simulation."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Device, Hardware
from megapipe.layout.moves import moves_to_host
from megapipe.planner.cost.assumptions import ENGINE, Assumptions
from megapipe.planner.cost.estimate import Estimate, RankMemory, Term
from megapipe.planner.cost.host_copies import host_copies, slowed
from megapipe.planner.cost.layer_costs import LayerCost, layer_cost
from megapipe.planner.cost.layer_times import LayerTimes
from megapipe.planner.cost.memory import rank_memories
from megapipe.planner.cost.roofline_times import RooflineTimes
from megapipe.planner.cost.run_layout import RunLayout, lay_run
from megapipe.planner.cost.simulated import Prediction, exact_memories, schedule_of, simulated
from megapipe.planner.cost.stages import StageCost, StageCosts, stage_costs, stage_details
from megapipe.planner.cost.step_time import step_terms
from megapipe.planner.measured.times import MeasuredTimes, at_ease, is_measured, shares_a_machine

__all__ = ["Prediction", "estimate", "estimate_run", "explain_stages", "layer_costs", "predict"]


def estimate(
    config: PretrainConfig,
    hardware: Hardware,
    *,
    world_size: int | None = None,
    times: LayerTimes | None = None,
    node_order: Sequence[int] | None = None,
    assumptions: Assumptions = ENGINE,
) -> Estimate:
    """Estimate a step, for searching.

    world_size: ranks; needed where parallel.data is open. times: of layers, by default those measured on the
    machine, or the roofline of its slowest device. node_order: as in `Placement`.

    Raises:
        ConfigError: the configuration cannot run on so many ranks, or the model cannot tell its time.
    """
    run = lay_run(config, hardware, world_size, node_order)
    if run.config.schedule.file:
        return _predicted(run, times, assumptions).estimate
    assumptions = assumptions.on(hardware)
    layers = layer_costs(run, times, assumptions)
    if moves_to_host(run.config):
        costs, source = _of_stages(run, layers)
        return _with_copies(run, costs, assumptions, source)
    return estimate_run(run, layers, rank_memories(run), assumptions)


def estimate_run(
    run: RunLayout, layers: Sequence[LayerCost], memory: tuple[RankMemory, ...], assumptions: Assumptions
) -> Estimate:
    """`estimate` from its parts, for callers that estimate many runs with the same ones.

    layers: by `layer_costs`. memory: by `rank_memories`. assumptions: with the machine's slow-down filled in.
    """
    costs, source = _of_stages(run, layers)
    return _answer(run, step_terms(run, costs, assumptions, source), memory)


def layer_costs(run: RunLayout, times: LayerTimes | None, assumptions: Assumptions) -> tuple[LayerCost, ...]:
    """Of a layer of each of `run.kinds`. times, assumptions: as of `estimate` and `estimate_run`."""
    given = _default_times(run, assumptions) if times is None else times
    return tuple(
        layer_cost(run, run.stages.layers[index], flops, given, assumptions)
        for index, flops in zip(run.kinds, run.flops, strict=True)
    )


def predict(
    config: PretrainConfig,
    hardware: Hardware,
    *,
    world_size: int | None = None,
    times: LayerTimes | None = None,
    node_order: Sequence[int] | None = None,
    assumptions: Assumptions = ENGINE,
) -> Prediction:
    """The same from the lowered schedule: its time by the simulator, its memory action by action.

    How far replicas' traffic slows down the compute beside it comes from the estimate. Arguments and errors as of
    `estimate`.
    """
    run = lay_run(config, hardware, world_size, node_order)
    if times is None and shares_a_machine(run.placement) and not moves_to_host(config):
        run = lay_run(config, at_ease(hardware), world_size, node_order)
        return _predicted(run, MeasuredTimes(hardware, contended=False), assumptions, contended=True)
    return _predicted(run, times, assumptions)


def explain_stages(
    config: PretrainConfig,
    hardware: Hardware,
    *,
    world_size: int | None = None,
    times: LayerTimes | None = None,
    node_order: Sequence[int] | None = None,
    assumptions: Assumptions = ENGINE,
) -> tuple[StageCost, ...]:
    """What each stage costs, arguments and errors as of `estimate`."""
    run = lay_run(config, hardware, world_size, node_order)
    return stage_details(run, _stage_costs(run, times, assumptions.on(hardware))[0])


def _with_copies(run: RunLayout, costs: StageCosts, assumptions: Assumptions, source: str) -> Estimate:
    """Estimate the time; memory is exact, since what has left when is the schedule's own."""
    schedule = schedule_of(run)
    terms = step_terms(run, costs, assumptions, source)
    slower = step_terms(run, slowed(run, costs, schedule, host_copies(run, schedule)), assumptions, source)
    late = sum(term.seconds for term in slower) - sum(term.seconds for term in terms)
    if late > 0.0:
        terms += (
            Term(
                "offload",
                late,
                "copies to and from host memory, as far as they take longer than the compute that overlaps with them",
            ),
        )
    return _answer(run, terms, exact_memories(run, schedule))


def _predicted(
    run: RunLayout, times: LayerTimes | None, assumptions: Assumptions, contended: bool = False
) -> Prediction:
    assumptions = assumptions.on(run.hardware)
    costs, source = _stage_costs(run, times, assumptions)
    schedule, simulation, terms = simulated(run, costs, assumptions, source, contended)
    if not contended and not run.config.schedule.file:
        terms += _slow_down(run, costs, assumptions)
    return Prediction(_answer(run, terms, exact_memories(run, schedule)), schedule, simulation)


def _slow_down(run: RunLayout, costs: StageCosts, assumptions: Assumptions) -> tuple[Term, ...]:
    """What replicas' traffic costs the compute beside it, which the simulator leaves alone: by the estimate."""
    slowed, alone = (
        sum(term.seconds for term in step_terms(run, costs, each, ""))
        for each in (assumptions, replace(assumptions, slow_down=1.0))
    )
    if slowed <= alone:
        return ()
    return (
        Term(
            "slow-down", slowed - alone, "traffic of replicas that overlaps with compute (Galvatron, arXiv 2211.13878)"
        ),
    )


def _stage_costs(run: RunLayout, times: LayerTimes | None, assumptions: Assumptions) -> tuple[StageCosts, str]:
    """Costs of all stages, and where the kernels' times come from."""
    return _of_stages(run, layer_costs(run, times, assumptions))


def _of_stages(run: RunLayout, layers: Sequence[LayerCost]) -> tuple[StageCosts, str]:
    sources = dict.fromkeys(layer.compute.source for layer in layers)
    return stage_costs(run, layers), "; ".join(sources)


def _default_times(run: RunLayout, assumptions: Assumptions) -> LayerTimes:
    if is_measured(run.placement):
        return MeasuredTimes(run.hardware)
    return RooflineTimes(_slowest_device(run), assumptions.megatron_kernels)


def _slowest_device(run: RunLayout) -> Device:
    """Of all that the run uses the one with the lowest peak in its precision: every step waits for it."""
    devices = {id(node.device): node.device for node in run.placement.nodes}.values()
    return min(devices, key=lambda device: device.peak(run.config.training.precision))


def _answer(run: RunLayout, terms: tuple[Term, ...], memory: tuple[RankMemory, ...]) -> Estimate:
    per_replica = [(flops.total, flops.executed) for flops in run.flops]
    counts = Counter(run.classes)
    model_flops = sum(per_replica[kind][0] * count for kind, count in counts.items())
    executed = sum(per_replica[kind][1] * count for kind, count in counts.items()) + _recomputed_flops(run)
    step = run.num_microbatches * run.costs.data
    return Estimate(
        config=run.config,
        world_size=run.world_size,
        step_seconds=float(sum(term.seconds for term in terms)),
        terms=terms,
        memory=memory,
        memory_limits=run.placement.memory_limits,
        model_flops=float(model_flops * step),
        executed_flops=float(executed * step),
    )


def _recomputed_flops(run: RunLayout) -> int:
    """Of a micro-batch's forwards that run again as a whole."""
    spans = run.recomputed
    ranges = run.stages.ranges
    again = Counter(
        run.classes[ranges[stage].start + unit] for stage, own in enumerate(spans) for span in own for unit in span
    )
    return sum(run.flops[kind].forward * count for kind, count in again.items())
