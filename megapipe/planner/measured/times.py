"""Times of layers from a machine's own measurements; where there are none, from its roofline."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import log
from typing import TypeVar, cast

from megapipe.config.recompute import RecomputedPart
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware, NodeGroup
from megapipe.layout.hardware.measured import MeasuredLayer, MeasuredWait, Measurements
from megapipe.layout.hardware.placement import Placement
from megapipe.layout.scheduling import splits_backwards
from megapipe.layout.stages import VOCABULARY_ALIGNMENT
from megapipe.layout.units import Unit, UnitCosts
from megapipe.planner.cost.layer_times import LayerSeconds, PhaseSeconds
from megapipe.planner.cost.roofline_times import RooflineTimes
from megapipe.planner.measured.shape import differences, shape_of
from megapipe.spec.parameters import LayerSpec

ONLY_SHARED = {"context_attention": "context", "sequence_parallel": "tensor", "sequence_chunks": "tensor"}
"""Parts of a shape that say nothing of a layer which one rank has alone."""


LAYOUT = {"sequence_parallel", "sequence_chunks", "context_attention", "recomputed_parts", "recompute_logits"}
"""Parts of a shape that layouts of one run may differ in."""


@dataclass(frozen=True)
class MeasuredTimes:
    """`LayerTimes` of a machine with measurements.

    contended: times while all ranks of the run on a node compute at once, for estimates; else those of a rank by
    itself, for simulations that know who computes when.

    Rows are looked up by the ranks that share a layer; between micro-batch sizes times go along straight lines, beyond
    the last in proportion. A number of ranks or a recomputation that was not measured gets the roofline's times in
    proportion to rows of the same layer, another shape the roofline's alone; `source` says so.
    """

    hardware: Hardware
    contended: bool = True

    @cached_property
    def measured(self) -> Measurements:
        """Raises ValueError where the hardware has none."""
        if self.hardware.measured is None:
            raise ValueError(f"hardware {self.hardware.name!r} has no measured times; use RooflineTimes")
        return self.hardware.measured

    def of(self, config: PretrainConfig, layer: LayerSpec) -> LayerSeconds:
        """Seconds of one micro-batch on one rank. Raises ConfigError as `RooflineTimes` does, where that answers."""
        why = self._why_not(config, layer)
        if why:
            return self._roofline(config, layer, why)
        rows = self._rows(config, layer)
        parallel, size = config.parallel, float(config.batch.micro_size)
        busy = self._busy(config)
        slower = self.measured.slowdown(busy) if self.contended else 1.0

        def seconds(name: str) -> float:
            return slower * between([(row.micro_size, getattr(row, name)) for row in rows], size)

        backward_input, backward_weight = seconds("backward_input"), seconds("backward_weight")
        if not splits_backwards(config):
            # Halves that run apart repeat some work: what counts here is the whole.
            share = seconds("backward") / (backward_input + backward_weight)
            backward_input, backward_weight = share * backward_input, share * backward_weight
        again = seconds("recompute") if config.recompute.method == "full" and layer.kind == "block" else 0.0
        beside = f", with {busy} ranks of a node computing" if self.contended and slower > 1.0 else ""
        source = (
            f"measured {self.measured.date} on {self.hardware.name}: tensor {parallel.tensor}, context "
            f"{parallel.context}{beside}"
        )
        update = slower * self._elements(config, layer) * self.measured.update_seconds
        waits = self._waits(config, layer, slower)
        return LayerSeconds(seconds("forward"), backward_input, backward_weight, again, update, source, waits)

    def _busy(self, config: PretrainConfig) -> int:
        """Ranks of the run on one node."""
        parallel = config.parallel
        ranks = (parallel.data or 1) * parallel.pipeline * parallel.context * parallel.tensor
        return min(ranks, self.hardware.groups[0].devices_per_node)

    def _why_not(self, config: PretrainConfig, layer: LayerSpec) -> str:
        """Why no row answers; empty where one does."""
        parallel = config.parallel
        found, wanted = dict(self.measured.shape), shape_of(config)
        for name, dimension in ONLY_SHARED.items():
            if getattr(parallel, dimension) == 1:
                wanted.pop(name)
        if layer.kind != "head":  # the only layer that makes logits
            wanted.pop("recompute_logits")
        different = differences(found, wanted)
        if different:
            return f"measured for another shape ({', '.join(different)})"
        if not self._rows(config, layer):
            return f"tensor {parallel.tensor} with context {parallel.context} was not measured"
        return ""

    def _rows(self, config: PretrainConfig, layer: LayerSpec) -> list[MeasuredLayer]:
        return _of_layer(self.measured.layers, config, layer)

    def _waits(self, config: PretrainConfig, layer: LayerSpec, slower: float) -> PhaseSeconds | None:
        """Inside the layer, if it is shared and that was measured."""
        rows = _of_layer(self.measured.waits, config, layer)
        if not rows:
            return None
        names = (
            ("forward", "backward_input", "backward_weight") if splits_backwards(config) else ("forward", "backward")
        )
        size = float(config.batch.micro_size)
        return PhaseSeconds(
            *(slower * between([(row.micro_size, getattr(row, name)) for row in rows], size) for name in names)
        )

    def _roofline(self, config: PretrainConfig, layer: LayerSpec, why: str) -> LayerSeconds:
        """Of a layer that no row answers for.

        Where the same layer was measured as other ranks share it or with other recomputation, the roofline is taken
        as many times as that measured layer took of its own: layouts that were measured and others that were not can
        then be compared. Without such rows the file's devices are shares of a machine that is busy, and a rank by
        itself is as much faster.
        """
        found = RooflineTimes(self.hardware.groups[0].device).of(config, layer)
        now = self.measured.slowdown(self._busy(config)) if self.contended else 1.0
        like = self._like(config, layer)
        if like is None:
            ease = now / self.measured.contention[-1].factor
            return LayerSeconds(
                ease * found.forward,
                ease * found.backward_input,
                ease * found.backward_weight,
                ease * found.recompute,
                ease * found.update,
                f"{found.source}; {why}",
            )
        measured = replace(self, contended=False).of(like, layer)
        expected = RooflineTimes(self.hardware.groups[0].device).of(like, layer)
        forward = now * measured.forward / expected.forward
        backward = now * (measured.backward_input + measured.backward_weight)
        # What is made again inside a backward was measured with it.
        backward /= expected.backward_input + expected.backward_weight + expected.recompute
        parallel = replace(like.parallel, tensor=config.parallel.tensor, context=config.parallel.context)
        waits = self._waits(config, layer, now) if parallel == config.parallel else None
        return LayerSeconds(
            forward * found.forward,
            backward * found.backward_input,
            backward * found.backward_weight,
            forward * found.recompute,
            now * self._elements(config, layer) * self.measured.update_seconds,
            f"{found.source}, scaled by times {measured.source}; {why}",
            waits,
        )

    def _like(self, config: PretrainConfig, layer: LayerSpec) -> PretrainConfig | None:
        """The run with the layer as it was measured, on as nearly as many ranks as there are rows for; None where
        more differs than a layout."""
        shape, parallel = self.measured.shape, config.parallel
        shared = {(row.tensor, row.context) for row in self.measured.layers if row.kind == layer.kind}
        if not shared or not shape.keys() >= LAYOUT:
            return None
        tensor, context = min(
            shared,
            key=lambda each: (abs(log(each[0] / parallel.tensor)) + abs(log(each[1] / parallel.context)), each),
        )
        remade = shape["recomputed_parts"]
        parts = cast(list[RecomputedPart], remade.split() if remade != "none" else [])
        like = replace(
            config,
            parallel=replace(
                parallel,
                tensor=tensor,
                context=context,
                sequence=shape["sequence_parallel"] == "True",
                sequence_chunks=int(shape["sequence_chunks"]),
                context_attention=shape["context_attention"],  # type: ignore[arg-type]
            ),
            recompute=replace(
                config.recompute,
                method="selective" if parts else "none",
                parts=parts or config.recompute.parts,
                logits=shape["recompute_logits"] == "True",
            ),
        )
        return None if self._why_not(like, layer) else like

    def _elements(self, config: PretrainConfig, layer: LayerSpec) -> int:
        """Parameters that a rank updates, of a tied weight at the embedding alone where one rank has both uses."""
        specs = tuple(layer.parameters.values())
        if layer.kind == "head" and config.parallel.pipeline == 1:
            specs = tuple(spec for spec in specs if spec.name.startswith("head."))
        replicas = (config.parallel.data or 1) * config.parallel.context
        return UnitCosts(config, replicas, VOCABULARY_ALIGNMENT).own_elements(Unit(specs), 1)


Row = TypeVar("Row", MeasuredLayer, MeasuredWait)


def _of_layer(rows: Iterable[Row], config: PretrainConfig, layer: LayerSpec) -> list[Row]:
    """Those of a layer as the run shares it, by micro-batch size."""
    key = layer.kind, config.parallel.tensor, config.parallel.context
    found = [row for row in rows if (row.kind, row.tensor, row.context) == key]
    return sorted(found, key=lambda row: row.micro_size)


def between(points: list[tuple[int, float]], at: float) -> float:
    """The value at a place between or beyond points of ascending places: on the line through the nearest two.

    Below the first point no less than its proportional share, above the last no less than its value; with one point in
    proportion to it.
    """
    if len(points) == 1:
        return points[0][1] * at / points[0][0]
    pairs = list(pairwise(points))
    (low, one), (high, two) = next((pair for pair in pairs if at <= pair[1][0]), pairs[-1])
    on_line = one + (at - low) / (high - low) * (two - one)
    if at < low:
        return max(on_line, one * at / low)
    return max(on_line, two) if at > high else on_line


def is_measured(placement: Placement) -> bool:
    """Whether all ranks stand on nodes of the kind whose layers were measured."""
    hardware = placement.hardware
    return hardware.measured is not None and all(node.device is hardware.groups[0].device for node in placement.nodes)


def shares_a_machine(placement: Placement) -> bool:
    """Whether all of them stand on one such node, so that who computes when is known."""
    return is_measured(placement) and len(placement.nodes) == 1


def at_ease(hardware: Hardware) -> Hardware:
    """The same machine with each measured collective as it were if its ranks had a machine each, in which whoever
    shares it counts besides: that is what `contended` multiplies again."""
    measured = hardware.measured
    if measured is None:
        return hardware

    def eased(group: NodeGroup) -> NodeGroup:
        rows = tuple(
            replace(row, latency=row.latency / factor, bandwidth=row.bandwidth * factor)
            for row in group.inside.collectives
            for factor in (measured.slowdown(row.ranks) if row.operation != "send" else 1.0,)
        )
        return replace(group, inside=replace(group.inside, collectives=rows))

    return replace(hardware, groups=tuple(eased(group) for group in hardware.groups))
