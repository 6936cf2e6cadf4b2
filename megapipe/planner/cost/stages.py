"""Seconds of every stage: its layers together, by phase."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megapipe.planner.cost.layer_costs import LayerCost
from megapipe.planner.cost.run_layout import RunLayout

Floats = npt.NDArray[np.float64]
MEASURED_WAITS = "measured: time that ranks of a layer wait for one another"


@dataclass(frozen=True)
class StageCost:
    """One stage, seconds of a micro-batch, as `explain` prints it.

    forward to recompute: kernels. tensor, context: waiting for others in a whole micro-batch, what runs again
    included. update, reduction, gather: once, of all its layers.
    """

    stage: int
    rank: int
    layers: tuple[str, ...]
    forward: float
    backward_input: float
    backward_weight: float
    recompute: float
    tensor: float
    context: float
    update: float
    reduction: float
    gather: float


@dataclass(frozen=True)
class StageCosts:
    """All stages: arrays of one entry a stage, shape [stages]; seconds. sources: of `tensor_` and `context_`.

    Phases hold kernels alone; `tensor_` and `context_` what a micro-batch waits for besides. recompute: of layers
    that run again as a whole; what is made again inside a backward is a part of backward_input.
    """

    ranks: npt.NDArray[np.int64]
    layers: npt.NDArray[np.int64]
    forward: Floats
    backward_input: Floats
    backward_weight: Floats
    recompute: Floats
    made_again: Floats
    tensor_forward: Floats
    tensor_input: Floats
    tensor_weight: Floats
    tensor_again: Floats
    context_forward: Floats
    context_input: Floats
    context_weight: Floats
    context_again: Floats
    update: Floats
    reduction: Floats
    gather: Floats
    tensor_source: str
    context_source: str

    @property
    def whole_forward(self) -> Floats:
        """Of a micro-batch, waiting included."""
        return self.forward + self.tensor_forward + self.context_forward

    @property
    def whole_again(self) -> Floats:
        """Of what runs again as a whole, waiting included."""
        return self.recompute + self.tensor_again + self.context_again

    @property
    def input_half(self) -> Floats:
        """Of the backward's input half, waiting included, what runs again as a whole left out."""
        return self.backward_input + self.made_again + self.tensor_input + self.context_input

    def weight_half(self, *, apart: bool) -> Floats:
        """Of the backward's weight half; apart: it waits for others besides, if its backward is split."""
        return self.backward_weight + (self.tensor_weight + self.context_weight if apart else 0.0)

    @cached_property
    def tensor(self) -> Floats:
        """Waiting for tensor ranks in a whole micro-batch."""
        return self.tensor_forward + self.tensor_input + self.tensor_again

    @cached_property
    def context(self) -> Floats:
        """Waiting for context ranks in a whole micro-batch."""
        return self.context_forward + self.context_input + self.context_again

    def by_rank(self, values: Floats) -> Floats:
        """Sums over each rank's stages, shape [pipeline ranks]."""
        return np.bincount(self.ranks, values).astype(np.float64)


def stage_costs(run: RunLayout, kinds: Sequence[LayerCost]) -> StageCosts:
    """Add up the layers of each stage. kinds: costs of one layer of each of `run.kinds`."""
    classes = np.array(run.classes)
    counts = np.zeros((len(run.stages.ranges), len(kinds)))
    again = np.zeros_like(counts)
    spans = run.recomputed
    for stage, members in enumerate(run.stages.ranges):
        counts[stage] = np.bincount(classes[members.start : members.stop], minlength=len(kinds))
        if spans:
            units = [members.start + unit for span in spans[stage] for unit in span]
            again[stage] = np.bincount(classes[units], minlength=len(kinds)) if units else 0.0
    whole = run.config.recompute.method == "full"
    is_block = np.array([run.stages.layers[index].kind == "block" for index in run.kinds])
    made = counts * ~is_block if whole else counts

    measured = any(kind.waits_measured for kind in kinds)

    def total(values: Sequence[float], of: Floats = counts) -> Floats:
        return of @ np.array(values)

    return StageCosts(
        ranks=np.array(run.ranks),
        layers=counts.sum(axis=1).astype(np.int64),
        forward=total([kind.compute.forward for kind in kinds]),
        backward_input=total([kind.compute.backward_input for kind in kinds]),
        backward_weight=total([kind.compute.backward_weight for kind in kinds]),
        recompute=total([kind.compute.recompute for kind in kinds], again),
        made_again=total([kind.compute.recompute for kind in kinds], made),
        tensor_forward=total([kind.tensor.forward for kind in kinds]),
        tensor_input=total([kind.tensor.backward_input for kind in kinds]),
        tensor_weight=total([kind.tensor.backward_weight for kind in kinds]),
        tensor_again=total([kind.tensor.forward for kind in kinds], again),
        context_forward=total([kind.context.forward for kind in kinds]),
        context_input=total([kind.context.backward_input for kind in kinds]),
        context_weight=total([kind.context.backward_weight for kind in kinds]),
        context_again=total([kind.context.forward for kind in kinds], again),
        update=total([kind.compute.update for kind in kinds]) + total([kind.update_traffic for kind in kinds]),
        reduction=total([kind.reduction for kind in kinds]),
        gather=total([kind.gather for kind in kinds]),
        tensor_source=MEASURED_WAITS if measured else "rings, doi 10.1177/1094342005051521, section 4.1",
        context_source=MEASURED_WAITS
        if measured
        else ("rings that overlap with attention, arXiv 2310.01889, section 3"),
    )


def stage_details(run: RunLayout, costs: StageCosts) -> tuple[StageCost, ...]:
    """The same, one entry a stage, with the names of its layers."""
    found = []
    for stage, members in enumerate(run.stages.ranges):
        names = tuple(run.stages.layers[index].name for index in members)
        values = {
            "forward": costs.forward,
            "backward_input": costs.backward_input + costs.made_again,
            "backward_weight": costs.backward_weight,
            **{each.name: getattr(costs, each.name) for each in fields(StageCost) if each.name in _AS_THEY_ARE},
        }
        seconds = {name: float(array[stage]) for name, array in values.items()}
        found.append(StageCost(stage=stage, rank=run.ranks[stage], layers=names, **seconds))
    return tuple(found)


_AS_THEY_ARE = ("recompute", "tensor", "context", "update", "reduction", "gather")
