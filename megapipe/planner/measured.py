"""Times of layers from the measurements in a machine's hardware file."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from math import log
from typing import cast

from megapipe.config.memory import RecomputedPart
from megapipe.config.model import BASE_KIND, ModelConfig
from megapipe.config.parallel import recompute_method
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware, IntraNodeLink, LayerRow, Measurements
from megapipe.layout.hardware.placement import Placement
from megapipe.layout.scheduling import splits_backwards
from megapipe.layout.stages import VOCABULARY_ALIGNMENT
from megapipe.layout.units import Unit, UnitCosts
from megapipe.planner.cost.layer_times import LayerSeconds, PhaseSeconds, RooflineTimes
from megapipe.schedules import Costs, Schedule, Simulation
from megapipe.schedules.actions import COMPUTE_STREAM
from megapipe.schedules.simulation.contended import simulate_contended
from megapipe.spec.parameters import LayerSpec

WITHOUT_EFFECT = (
    "num_layers", "max_positions", "norm_epsilon", "rope_theta", "rope_scaling",
    "tie_embeddings", "init_std", "scale_residual_init", "expert_bias", "attention_scale",
    "layer_kinds", "layer_pattern", "family", "first_position", "shared_blocks",
    "mtp_loss_weight", "swiglu_alpha", "swiglu_limit",
)  # fmt: skip
"""Fields of a model that do not change the time of a layer."""
NEWER = (
    "rotary_fraction", "attention_softcap", "qk_norm_over", "norm_position", "parallel_residual", "embedding_scale",
    "residual_scale", "logit_scale", "logit_softcap", "attention_sinks", "token_types", "embedding_norm",
    "transform_bias", "attention_norm", "query_latent_size", "kv_latent_size", "rotary_head_size", "value_head_size",
    "embedding_size", "attention_chunk_size", "mtp_layers", "transform_activation",
)  # fmt: skip
"""Fields that older hardware files lack: they are part of a shape only if they differ from a GPT's default,
or from a BERT's if a GPT lacks them."""
OF_EXPERTS = (
    "num_experts", "experts_per_token", "normalize_expert_shares", "expert_balance_rate", "router_scores",
    "router_scale", "router_bias", "router_groups", "router_groups_chosen", "shared_expert_size", "shared_expert_gate",
)  # fmt: skip
"""Fields that matter only for a model with experts."""
RESOLVED = {"num_kv_heads": "kv_heads", "head_size": "own_head_size", "ffn_hidden_size": "ffn_size"}
ONLY_SHARED = {"context_attention": "context", "sequence_parallel": "tensor", "sequence_chunks": "tensor"}
"""Parts of a shape that have no effect if this dimension has only one rank."""
LAYOUT = {"sequence_parallel", "sequence_chunks", "context_attention", "recomputed_parts", "recompute_logits"}
"""Parts of a shape that may differ between layouts of one run."""


@dataclass(frozen=True)
class MeasuredTimes:
    """`LayerTimes` of a machine with measurements.

    contended: if true, times while all ranks of the run on a node compute at once, for estimates; if false, times
    while all other ranks are idle, for simulations that know when each rank computes.

    Rows are selected by the number of ranks that share a layer, and interpolated between micro-batch sizes. If that
    number of ranks or the recomputation was not measured, the roofline's times are scaled by rows of the same layer;
    for another shape, they are used unscaled. `source` reports which case applies.
    """

    hardware: Hardware
    contended: bool = True

    @cached_property
    def measured(self) -> Measurements:
        """Return the measurements. The hardware must have some."""
        return cast(Measurements, self.hardware.measured)

    def of(self, config: PretrainConfig, layer: LayerSpec) -> LayerSeconds:
        """Return the seconds of one micro-batch on one rank. Raises ConfigError like `RooflineTimes`."""
        why = self._why_not(config, layer)
        if why:
            return self._roofline(config, layer, why)
        rows, slower = _of_layer(self.measured.layers, config, layer), self._slower(config)
        names = ("forward", "backward_input", "backward_weight", "backward", "recompute")
        forward, backward_input, backward_weight, backward, again = _seconds(rows, config, names, slower)
        if not splits_backwards(config):
            # Separate halves repeat some work, so scale them to the time of a whole backward.
            share = backward / (backward_input + backward_weight)
            backward_input, backward_weight = share * backward_input, share * backward_weight
        if recompute_method(config, layer.name) != "full":
            again = 0.0
        ranks = f"tensor {config.parallel.tensor}, context {config.parallel.context}"
        contention = f", with {self._busy(config)} ranks of a node computing" if slower > 1 else ""
        source = f"measured {self.measured.date} on {self.hardware.name}: {ranks}{contention}"
        waits = self._waits(config, layer, slower)
        return LayerSeconds(forward, backward_input, backward_weight, again, source, waits)

    def update(self, config: PretrainConfig, layer: LayerSpec, unit: Unit) -> float:
        """Return the seconds that a rank takes to update its part of a state unit: the measured time per element, or
        the roofline's time if no similar layer was measured."""
        slower = self._slower(config)
        if self._why_not(config, layer) and self._like(config, layer) is None:
            seconds = RooflineTimes(self.hardware.groups[0].device).update(config, layer, unit)
            return seconds * slower / self.measured.contention[-1].factor
        replicas = (config.parallel.data or 1) * config.parallel.context
        elements = UnitCosts(config, replicas, VOCABULARY_ALIGNMENT).own_elements(unit, 1)
        return slower * elements * self.measured.update_seconds

    def _busy(self, config: PretrainConfig) -> int:
        """Return the number of the run's ranks on one node."""
        parallel = config.parallel
        ranks = (parallel.data or 1) * parallel.pipeline * parallel.context * parallel.tensor
        return min(ranks, self.hardware.groups[0].devices_per_node)

    def _slower(self, config: PretrainConfig) -> float:
        """Return how many times longer work takes than while all other ranks are idle."""
        return self.measured.slowdown(self._busy(config)) if self.contended else 1.0

    def _why_not(self, config: PretrainConfig, layer: LayerSpec) -> str:
        """Return why no row applies to a layer; empty if one does."""
        parallel, shape = config.parallel, shape_of(config, layer.variant)
        for name, dimension in ONLY_SHARED.items():
            if getattr(parallel, dimension) == 1:
                shape.pop(name)
        if layer.kind != "head":  # the only layer that computes logits
            shape.pop("recompute_logits")
        measured = self.measured.shape
        different = [name for name, value in shape.items() if measured.get(name) != value]
        if different:
            phrases = (f"{name} {shape[name]} instead of {measured.get(name, 'nothing')}" for name in different)
            return f"measured for another shape ({', '.join(phrases)})"
        if not _of_layer(self.measured.layers, config, layer):
            return f"tensor {parallel.tensor} with context {parallel.context} was not measured"
        return ""

    def _waits(self, config: PretrainConfig, layer: LayerSpec, slower: float) -> PhaseSeconds | None:
        """Return the waits between ranks of the same layer; None if they were not measured."""
        rows = _of_layer(self.measured.waits, config, layer)
        backward = ("backward_input", "backward_weight") if splits_backwards(config) else ("backward",)
        return PhaseSeconds(*_seconds(rows, config, ("forward", *backward), slower)) if rows else None

    def _roofline(self, config: PretrainConfig, layer: LayerSpec, why: str) -> LayerSeconds:
        """Return the times of a layer to which no row applies.

        If the same layer was measured on another number of ranks or with other recomputation, the roofline is scaled
        by the ratio of that measurement to its roofline, so that measured layouts are comparable with others. Without
        such rows, the roofline is scaled by the slow-down of the busy ranks relative to a fully busy machine, because
        the device figures in the hardware file are those of a fully busy machine.
        """
        times = RooflineTimes(self.hardware.groups[0].device)
        roofline, slower, like = times.of(config, layer), self._slower(config), self._like(config, layer)
        if like is None:
            forward = backward = slower / self.measured.contention[-1].factor
            source, waits = f"{roofline.source}; {why}", None
        else:
            measured, expected = replace(self, contended=False).of(like, layer), times.of(like, layer)
            forward = slower * measured.forward / expected.forward
            backward = slower * (measured.backward_input + measured.backward_weight)
            # The measured backward includes the recomputation within it.
            backward /= expected.backward_input + expected.backward_weight + expected.recompute
            source = f"{roofline.source}, scaled by times {measured.source}; {why}"
            parallel = replace(like.parallel, tensor=config.parallel.tensor, context=config.parallel.context)
            waits = self._waits(config, layer, slower) if parallel == config.parallel else None
        halves = backward * roofline.backward_input, backward * roofline.backward_weight
        return LayerSeconds(forward * roofline.forward, *halves, forward * roofline.recompute, source, waits)

    def _like(self, config: PretrainConfig, layer: LayerSpec) -> PretrainConfig | None:
        """Return the run in the layout in which the layer was measured, with the most similar number of ranks; None if
        more than the layout differs."""
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
        similar = replace(
            parallel,
            tensor=tensor,
            context=context,
            sequence=shape["sequence_parallel"] == "True",
            sequence_chunks=int(shape["sequence_chunks"]),
            context_attention=shape["context_attention"],  # type: ignore[arg-type]
        )
        recompute = replace(
            config.recompute,
            method="selective" if parts else "none",
            parts=parts or config.recompute.parts,
            logits=shape["recompute_logits"] == "True",
        )
        like = replace(config, parallel=similar, recompute=recompute)
        return None if self._why_not(like, layer) else like


def _of_layer(rows: Iterable[LayerRow], config: PretrainConfig, layer: LayerSpec) -> list[LayerRow]:
    """Return the rows of a layer on the run's tensor and context ranks, by micro-batch size."""
    key = layer.kind, config.parallel.tensor, config.parallel.context
    matching = [row for row in rows if (row.kind, row.tensor, row.context) == key]
    return sorted(matching, key=lambda row: row.micro_size)


def _seconds(rows: Sequence[LayerRow], config: PretrainConfig, names: Iterable[str], slower: float) -> list[float]:
    """Return the columns `names` of a layer's rows at the run's micro-batch size, times `slower`."""
    size = float(config.batch.micro_size)
    return [slower * between([(row.micro_size, getattr(row, name)) for row in rows], size) for name in names]


def between(points: list[tuple[int, float]], at: float) -> float:
    """Return the value at `at` on the line through the two nearest points; with one point, in proportion to it.

    points: in ascending order. Below the first point, the value is at least in proportion to that point; above the
    last one, it is at least the last value.
    """
    if len(points) == 1:
        return points[0][1] * at / points[0][0]
    pairs = list(pairwise(points))
    (low, one), (high, two) = next((pair for pair in pairs if at <= pair[1][0]), pairs[-1])
    on_line = one + (at - low) / (high - low) * (two - one)
    if at < low:
        return max(on_line, one * at / low)
    return max(on_line, two) if at > high else on_line


def is_measured(hardware: Hardware, devices: int) -> bool:
    """Return whether the nodes of this number of devices are all of the kind that was measured."""
    device = hardware.groups[0].device
    return hardware.measured is not None and all(node.device is device for node in hardware.nodes(devices))


def shares_a_machine(placement: Placement) -> bool:
    """Return whether all ranks are on one measured node, so that a simulation knows when each of them computes."""
    return is_measured(placement.hardware, placement.num_ranks) and len(placement.nodes) == 1


def at_ease(hardware: Hardware) -> Hardware:
    """Return the machine with measured collectives scaled as if each rank had a machine of its own, because the
    contended simulation multiplies them by the slow-down of ranks that share a machine."""
    measured = hardware.measured
    if measured is None:
        return hardware
    groups = []
    for group in hardware.groups:
        rows = tuple(
            replace(row, latency=row.latency / factor, bandwidth=row.bandwidth * factor)
            for row in group.inside.collectives
            for factor in (measured.slowdown(row.ranks) if row.operation != "send" else 1.0,)
        )
        groups.append(replace(group, inside=replace(group.inside, collectives=rows)))
    return replace(hardware, groups=tuple(groups))


def shape_of(config: PretrainConfig, variant: str = BASE_KIND) -> dict[str, str]:
    """Return every setting that the time of a layer depends on, except numbers of ranks and samples: name -> value.

    Times that were measured with one shape do not apply to another. variant: the layer's kind in model.layer_kinds;
    its shape is that of a model whose blocks all are of this kind.
    """
    model, recompute = config.model.of_kind(variant), config.recompute
    settings = {
        each.name: getattr(model, RESOLVED.get(each.name, each.name))
        for each in fields(model)
        if each.name not in WITHOUT_EFFECT
        and (model.num_experts is not None or each.name not in OF_EXPERTS)
        and (each.name not in NEWER or getattr(model, each.name) != getattr(ModelConfig, each.name, each.default))
    }
    settings["kind"] = config.kind
    settings |= {name: getattr(config.data, name) for name in ("sequence_length", "isolate_documents")}
    settings |= {name: getattr(config.training, name) for name in ("precision", "fp8", "compile")}
    settings |= {
        "sequence_parallel": config.parallel.sequence,
        "sequence_chunks": config.parallel.sequence_chunks,
        "context_attention": config.parallel.context_attention,
        "recomputed_parts": " ".join(recompute.parts) if recompute.method == "selective" else "none",
        "recompute_logits": recompute.logits,
        "optimizer": config.optimizer.name,
        "kernels": " ".join(f"{op}={name}" for op, name in sorted(config.kernels.backends.items())) or "default",
    }
    if config.parallel.layers:
        settings["layers"] = config.parallel.layers
    return {name: str(value) for name, value in settings.items()}


def simulate_measured(
    schedule: Schedule, costs: Costs, measured: Measurements, *, processes: int, traffic_share: float, steps: int = 1
) -> Simulation:
    """Run `simulate_contended` with a machine's measured figures. Every action includes the engine's overhead."""
    computing = {place: time for place, time in costs.times.items() if place.kind in COMPUTE_STREAM and time > 0}
    costs = costs.with_times({place: time + measured.action_seconds for place, time in computing.items()})
    return simulate_contended(
        schedule, costs, measured.slowdown, processes=processes, traffic_share=traffic_share, steps=steps
    )


def traffic_share(link: IntraNodeLink, replicas: int) -> float:
    """Return the fraction of a busy rank that a gradient sum over `replicas` replicas uses; 1 if not measured."""
    row = link.measured("all_reduce", replicas)
    return 1.0 if row is None else row.busy
