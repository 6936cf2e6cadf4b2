"""What is done to the few best layouts alone: stages by time, the order of nodes, the simulated schedule."""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megapipe.config.errors import ConfigError
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.hardware.node_order import OrderCost, best_node_order
from megapipe.layout.prediction import layout_costs
from megapipe.layout.scheduling import num_stages
from megapipe.layout.stages import StageLayout, layers_of
from megapipe.planner.cost.assumptions import ENGINE, Assumptions
from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.cost.layer_times import LayerTimes
from megapipe.planner.cost.model import estimate, predict
from megapipe.planner.search.findings import Found
from megapipe.schedules.balance import balance_layers
from megapipe.spec.dtypes import FULL_BYTES


@dataclass
class Refiner:
    """hardware, times, assumptions: as the estimates use them. actions: computations of a step, over all its pipeline
    ranks, that simulation may still take all together; each takes tens of microseconds."""

    hardware: Hardware
    times: LayerTimes
    actions: int
    assumptions: Assumptions = ENGINE

    def refined(self, found: Sequence[Estimate], known: Sequence[Found] = (), *, stages: bool) -> tuple[Found, ...]:
        """The same layouts, improved, together with those that are known, ordered by what is known best of each.

        The first whose schedule was not simulated is, and takes its new place, until all are or the first is too long
        for what is left. So the one in front stays there only where no other is faster by its estimate. One that
        does not fit by simulation is left out. stages: layers may move between stages.
        """
        ranked = [*known, *(self._ordered(self._by_time(each) if stages else each) for each in found)]
        ranked.sort(key=_order)
        while (at := next((at for at, each in enumerate(ranked) if not each.simulated), None)) is not None:
            needed = _computations(ranked[at].estimate)
            if needed > self.actions:
                break
            self.actions -= needed
            exact = self._simulated(ranked.pop(at))
            if exact.estimate.fits:
                insort(ranked, exact, key=_order)
        return tuple(ranked)

    def _by_time(self, before: Estimate) -> Estimate:
        """Stages balanced by the layers' times where that is faster than by their FLOPs, and fits."""
        config = before.config
        if config.parallel.pipeline == 1 or config.parallel.layers_per_stage is not None or config.schedule.file:
            return before
        known: dict[tuple[str, int], float] = {}
        seconds, layers = [], layers_of(config)
        for layer in layers:
            key = layer.kind, layer.index if config.training.fp8 != "none" else 0
            if key not in known:
                each = self.times.of(config, layer)
                known[key] = each.forward + each.backward_input + each.backward_weight + each.recompute
            seconds.append(known[key])
        sizes = [stop - first for first, stop in balance_layers(seconds, num_stages(config))]
        if sizes == [len(each) for each in StageLayout.of(config).ranges]:
            return before
        parallel = replace(config.parallel, layers_per_stage=sizes)
        moved = replace(config, parallel=parallel)
        after = estimate(moved, self.hardware, times=self.times, assumptions=self.assumptions)
        return after if after.fits and after.step_seconds < before.step_seconds else before

    def _ordered(self, before: Estimate) -> Found:
        """The nodes in the best order found, where links between them have been measured and it is faster."""
        if self.hardware.link_matrix is None:
            return Found(before)
        config = before.config
        parallel = config.parallel
        sizes = {"data": parallel.data or 1, "pipeline": parallel.pipeline}
        sizes |= {"context": parallel.context, "tensor": parallel.tensor}
        message = layout_costs(config).stream
        elements = sum(spec.num_elements for layer in layers_of(config) for spec in layer.parameters.values())
        gradients = FULL_BYTES * elements / (parallel.tensor * parallel.pipeline)
        try:
            order = best_node_order(OrderCost(self.hardware, sizes, message, gradients))
        except ConfigError:  # a mesh that does not cut the nodes evenly has no other order
            return Found(before)
        after = estimate(config, self.hardware, times=self.times, node_order=order, assumptions=self.assumptions)
        return Found(after, node_order=order) if after.step_seconds < before.step_seconds else Found(before)

    def _simulated(self, found: Found) -> Found:
        config = found.estimate.config
        exact = predict(
            config, self.hardware, times=self.times, node_order=found.node_order, assumptions=self.assumptions
        )
        return replace(found, estimate=exact.estimate, simulated=True)


def _computations(estimate: Estimate) -> int:
    """Forwards and backwards of a step, of all stages of one pipeline."""
    config = estimate.config
    count = config.batch.global_size // (config.batch.micro_size * (config.parallel.data or 1))
    return 2 * count * num_stages(config)


def _order(found: Found) -> tuple[float, int]:
    return found.estimate.step_seconds, found.estimate.peak_bytes
