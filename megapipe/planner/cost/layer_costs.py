"""Seconds of a micro-batch through one layer, and of its weights' traffic once a step."""

from dataclasses import dataclass

from megapipe.layout.hardware.collectives import GroupLinks
from megapipe.layout.units import Unit
from megapipe.planner.cost.assumptions import Assumptions
from megapipe.planner.cost.exchanges import (
    exchanges_seconds,
    group_seconds,
    layer_exchange_seconds,
    shard_groups,
)
from megapipe.planner.cost.layer_times import LayerSeconds, LayerTimes, PhaseSeconds
from megapipe.planner.cost.replicas import tensor_by_tensor_seconds
from megapipe.planner.cost.run_layout import RunLayout
from megapipe.planner.galvatron.costs import overlapped
from megapipe.spec.ops import Flops
from megapipe.spec.parameters import LayerSpec


@dataclass(frozen=True)
class LayerCost:
    """One layer on one rank.

    compute: kernels. tensor, context: what a micro-batch waits for others beside its kernels, the part that hides
    behind them left out; waits_measured: on such ranks, not told by the model. reduction: of its gradient, once;
    gather: of its weights, once; update_traffic: what an update exchanges.
    """

    compute: LayerSeconds
    tensor: PhaseSeconds
    context: PhaseSeconds
    reduction: float
    gather: float
    update_traffic: float
    waits_measured: bool = False


def layer_cost(
    run: RunLayout, layer: LayerSpec, flops: Flops, times: LayerTimes, assumptions: Assumptions
) -> LayerCost:
    """What a layer costs in a run."""
    compute = times.of(run.config, layer)
    tensor = layer_exchange_seconds(run.costs, run.placement, layer, "tensor")
    context = layer_exchange_seconds(run.costs, run.placement, layer, "context")
    tensor = _beside_products(tensor, compute, run.config.parallel.sequence_chunks, assumptions.slow_down)
    if run.config.parallel.context_attention == "ring":
        context = _beside_attention(context, compute, flops, assumptions.slow_down)
    crosses = any(group.crosses for group in run.placement.groups("tensor", "context"))
    waits = None if crosses else compute.waits
    if waits is not None:
        tensor, context = _as_measured(tensor, context, waits, run.config.parallel.tensor > 1)
    unit = Unit(tuple(spec for spec in layer.parameters.values() if spec.name not in run.tied))
    reduction, gather = replica_seconds(run, unit)
    if assumptions.tensor_by_tensor and run.costs.of_units.shards > 1:
        reduction, gather = tensor_by_tensor_seconds(run, unit, _replica_groups(run)[0])
        # A forward that runs again gathers once more: three gathers in place of two.
        gather *= 1.5 if run.config.recompute.method == "full" and layer.kind == "block" else 1.0
    partial = run.costs.partial_reduction(layer).get("tensor", [])
    reduction += exchanges_seconds(run.placement, partial, "tensor")
    traffic = run.costs.of_units.update(unit)
    exchanged = exchanges_seconds(run.placement, traffic.get("tensor", []), "tensor")
    exchanged += group_seconds(traffic.get(run.costs.of_units.shard_group, []), _replica_groups(run)[0])
    return LayerCost(compute, tensor, context, reduction, gather, exchanged, waits is not None)


def replica_seconds(run: RunLayout, unit: Unit) -> tuple[float, float]:
    """Of one reduction of a unit's gradient over its replicas, and of one gather of its weights."""
    units = run.costs.of_units
    if not unit.specs or run.costs.replicas == 1:
        return 0.0, 0.0
    shards, copies = _replica_groups(run)
    reductions = [each for exchanges in units.reduction(unit).values() for each in exchanges]
    gathers = [each for exchanges in units.gather(unit).values() for each in exchanges]
    over_copies = [each for exchanges in units.copies_reduction(unit).values() for each in exchanges]
    return group_seconds(reductions, shards) + group_seconds(over_copies, copies), group_seconds(gathers, shards)


def _replica_groups(run: RunLayout) -> tuple[GroupLinks, GroupLinks]:
    """The slowest group of replicas that share one copy of the state, and of those that hold the same shard."""
    every = run.placement.groups("data", "context")
    slowest = min(every, key=lambda group: (group.crossing or group.inside.bandwidth, -group.size))
    shards = run.config.zero.num_shards(run.costs.replicas)
    return shard_groups(slowest, run.costs.replicas if shards == 1 else shards)


def _as_measured(
    tensor: PhaseSeconds, context: PhaseSeconds, waits: PhaseSeconds, has_tensor: bool
) -> tuple[PhaseSeconds, PhaseSeconds]:
    """Measured waiting, told apart by what the model finds each dimension to have of it.

    Layers without messages wait as well: their ranks come from one that has some.
    """
    both, of_tensor = sum(tensor) + sum(context), sum(tensor)
    share = of_tensor / both if both else float(has_tensor)
    return waits.scaled(share), waits.scaled(1.0 - share)


def _beside_products(tensor: PhaseSeconds, compute: LayerSeconds, chunks: int, slow_down: float) -> PhaseSeconds:
    """Pieces of the tokens are gathered and scattered beside the products of others: all but the first one's hide."""
    if chunks == 1:
        return tensor
    hidden = 1.0 - 1.0 / chunks
    products = compute.forward, compute.backward_input, compute.backward_weight
    return PhaseSeconds(
        *(
            overlapped(work, talk * hidden, slow_down) - work + talk / chunks
            for talk, work in zip(tensor, products, strict=True)
        )
    )


def _beside_attention(context: PhaseSeconds, compute: LayerSeconds, flops: Flops, slow_down: float) -> PhaseSeconds:
    """A ring's keys and values travel beside attention's products, whose share of the time is that of their FLOPs."""
    share = 1.0 - flops.backward_weight / flops.forward if flops.forward else 0.0
    of_input = 2 * share / (1 + share)
    works = compute.forward * share, compute.backward_input * of_input, 0.0
    return PhaseSeconds(*(overlapped(work, talk, slow_down) - work for talk, work in zip(context, works, strict=True)))
