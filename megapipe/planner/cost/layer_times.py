"""Seconds of a layer: by the roofline of a device, as the sum of the kernels that ops declare, or measured."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, Protocol

from megapipe.config import ConfigError
from megapipe.config.parallel import recompute_method
from megapipe.config.run import PretrainConfig
from megapipe.layout.costs import own_parts
from megapipe.layout.hardware.description import Device, device_type
from megapipe.layout.hardware.roofline import KernelTime, matrix_product_time, memory_bound_time
from megapipe.layout.prediction import layout_costs
from megapipe.layout.stages import VOCABULARY_ALIGNMENT
from megapipe.layout.units import Unit, UnitCosts
from megapipe.spec.ops import ELEMENT_BYTES, FULL_BYTES, Kernel, MicrobatchShape, Precision
from megapipe.spec.parameters import LayerSpec, ParameterSpec


class PhaseSeconds(NamedTuple):
    """Seconds of one micro-batch: the forward and both halves of the backward."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0

    def scaled(self, factor: float) -> "PhaseSeconds":
        """Return all phases, multiplied by a factor."""
        return PhaseSeconds(*(each * factor for each in self))


class LayerSeconds(NamedTuple):
    """Seconds of one micro-batch in one layer on one rank, without communication.

    recompute: the recomputed forward; 0 without recomputation. source: where the numbers come from, in words. waits:
    how long ranks of the same layer wait for each other; None if this was not measured.
    """

    forward: float
    backward_input: float
    backward_weight: float
    recompute: float
    source: str
    waits: PhaseSeconds | None = None


class LayerTimes(Protocol):
    """Source of the times of a run's layers."""

    def of(self, config: PretrainConfig, layer: LayerSpec) -> LayerSeconds:
        """Return the times of a layer. config: with parallel.data filled in."""

    def update(self, config: PretrainConfig, layer: LayerSpec, unit: Unit) -> float:
        """Return the seconds that a rank takes to update its part of one state unit of a layer."""


UNFUSED_LOSS_BYTES = 52
"""Bytes per logit that the kernels of an unfused loss in fp32 read and write: a copy in fp32 (6), maximum (4),
difference (8), exponential (8), sum (4), quotient (8), product with the output gradient (8), a copy in 16 bits (6).
Source: Megatron-LM's megatron/core/tensor_parallel/cross_entropy.py."""


def update_seconds(config: PretrainConfig, device: Device, elements: int, precision: Precision) -> float:
    """Return the seconds to update `elements` parameters of a rank, limited by memory bandwidth.

    The gradient of each is accessed three times (for the norm, for the update, and to clear it); master weight and
    moments are read and written. With a master weight, the new weight is written too.
    """
    optimizer = config.optimizer
    moment_bytes = 2 if optimizer.moment_dtype == "bf16" else FULL_BYTES
    has_master = precision != "fp32" and config.training.master_weights
    weight = ELEMENT_BYTES[precision]
    bytes_each = 3 * FULL_BYTES + 2 * optimizer.num_moments() * moment_bytes
    bytes_each += 2 * FULL_BYTES + weight if has_master else 2 * weight
    return memory_bound_time(device, elements * bytes_each).seconds


def muon_seconds(config: PretrainConfig, device: Device, specs: tuple[ParameterSpec, ...], shards: int) -> float:
    """Return the seconds of Newton-Schulz iterations on matrices that are distributed over `shards` replicas.

    An iteration on r x c, r <= c, is X X' (2 r r c FLOP), its square (2 r r r) and their product with X (2 r r c).
    """
    total = 0.0
    for spec in specs:
        if spec.matrix:
            rows, columns = sorted((prod(spec.shape[:-1]), spec.shape[-1]))
            dtype = "bf16" if "bf16" in device.peak_flops else "fp32"
            sizes = ((rows, columns, rows), (rows, rows, rows), (rows, rows, columns))
            once = sum(matrix_product_time(device, *each, dtype).seconds for each in sizes)
            total += once * config.optimizer.muon.newton_schulz_steps
    return total / shards


SOURCE = "roofline of the device (Williams et al. 2009), products by its efficiency"


@dataclass(frozen=True)
class RooflineTimes:
    """`LayerTimes` by the roofline of a device: the sum of a layer's kernels.

    megatron_kernels: as in `Assumptions`.
    """

    device: Device
    megatron_kernels: bool = False

    def of(self, config: PretrainConfig, layer: LayerSpec) -> LayerSeconds:
        """Return the seconds of one micro-batch. Raises ConfigError if the device has no peak for the precision."""
        seconds, again = self.kernels(config, layer)
        whole = recompute_method(config, layer.name) == "full"
        return LayerSeconds(*seconds, seconds.forward if whole else again, SOURCE)

    def kernels(self, config: PretrainConfig, layer: LayerSpec) -> tuple[PhaseSeconds, float]:
        """Return the seconds of all kernels of a micro-batch, and of the kernels that its backward repeats. They
        depend neither on the replicas nor on the pipeline."""
        by_phase = dict.fromkeys((*PhaseSeconds._fields, "recompute"), 0.0)
        for kernel, time in self.timed_kernels(config, layer):
            by_phase[kernel.phase] += time.seconds
        again = by_phase.pop("recompute")
        return PhaseSeconds(**by_phase), again

    def timed_kernels(self, config: PretrainConfig, layer: LayerSpec) -> Iterator[tuple[Kernel, KernelTime]]:
        """Yield all kernels of one layer for one micro-batch and their times, in no particular order.

        The phase `recompute` means: a forward kernel that recompute.method selective or recompute.logits repeats in
        the backward.

        config: with parallel.data filled in. Memory traffic is that of fused kernels: a norm reads and writes its rows
        once, bias and activation are one kernel, and so are dropout and the residual sum.
        """
        costs = layout_costs(config, device=device_type(self.device), layers=(layer,))
        shape = costs.shape(layer)
        for op in costs.ops(layer):
            for kernel in op.kernels():
                chosen = self._unfused_loss(kernel, shape) if self.megatron_kernels else kernel
                if chosen is not None:
                    yield chosen, self._time(chosen, shape)

    def _unfused_loss(self, kernel: Kernel, shape: MicrobatchShape) -> Kernel | None:
        """Return a kernel as Megatron-LM runs it: its loss is a sequence of kernels and never recomputes logits."""
        if kernel.name != "loss" or not kernel.moved:
            return kernel
        logits = kernel.moved / (3 * shape.width)
        return None if kernel.phase == "recompute" else kernel._replace(moved=logits * UNFUSED_LOSS_BYTES)

    def _time(self, kernel: Kernel, shape: MicrobatchShape) -> KernelTime:
        # This project's kernels store no dropout mask: the backward recomputes it from indices.
        moved = None if kernel.moved is None else kernel.moved + kernel.mask * self.megatron_kernels
        if kernel.product is None:
            return memory_bound_time(self.device, moved or 0.0)
        dtype = kernel.dtype if kernel.dtype in self.device.peak_flops else shape.precision
        rows, inner, columns, batch = kernel.product
        time = matrix_product_time(self.device, rows, inner, columns, dtype, batch, kernel.out_bytes)
        if moved is not None:
            return KernelTime(kernel.compute * time.compute, moved / self.device.reached_bandwidth, time.launch)
        return KernelTime(*(kernel.times * each for each in (time.compute, time.memory, time.launch)))

    def update(self, config: PretrainConfig, layer: LayerSpec, unit: Unit) -> float:
        """Return the seconds to update a state unit, which do not depend on the micro-batches."""
        replicas = (config.parallel.data or 1) * config.parallel.context
        units = UnitCosts(config, replicas, VOCABULARY_ALIGNMENT)
        precision: Precision = config.training.precision  # type: ignore[assignment]
        seconds = update_seconds(config, self.device, units.own_elements(unit, 1), precision)
        if config.optimizer.name != "muon":
            return seconds
        return seconds + muon_seconds(config, self.device, unit.specs, units.shards_of(unit))


def slowest_roofline(devices: Iterable[Device], precision: str, megatron_kernels: bool = False) -> RooflineTimes:
    """Return the roofline of the device with the lowest peak: every step waits for it.

    Raises ConfigError if the precision is auto, or a device has no peak for it.
    """
    if precision == "auto":
        raise ConfigError(
            "training.precision auto is decided by measurements at the start of a run; "
            "set fp32, bf16 or fp16 for planning"
        )
    return RooflineTimes(min(devices, key=lambda device: device.peak(precision)), megatron_kernels)


def shared(times: LayerTimes) -> LayerTimes:
    """Return the same times, cached for all layouts of one run. Measured times may depend on every field of a layout,
    so they are returned unchanged."""
    return SharedRoofline(times.device, times.megatron_kernels) if isinstance(times, RooflineTimes) else times


@dataclass(frozen=True)
class SharedRoofline(RooflineTimes):
    """`RooflineTimes` of one run, cached by the fields of a layout that each part depends on. All other fields must
    be those of the run."""

    known: dict[tuple[object, ...], Any] = field(default_factory=dict, repr=False, compare=False)

    def kernels(self, config: PretrainConfig, layer: LayerSpec) -> tuple[PhaseSeconds, float]:
        """Return the result of `RooflineTimes.kernels`. config: the run's configuration in any layout."""
        parallel, again = config.parallel, own_parts(config, layer)
        sizes = parallel.tensor, parallel.context, config.batch.micro_size
        key = layer.name, sizes, parallel.sequence, again
        if key not in self.known:
            self.known[key] = super().kernels(config, layer)
        return self.known[key]

    def update(self, config: PretrainConfig, layer: LayerSpec, unit: Unit) -> float:
        """Return the result of `RooflineTimes.update`. See `kernels` for the arguments."""
        replicas = (config.parallel.data or 1) * config.parallel.context
        key = layer.name, unit.state_unit, unit.tied, config.parallel.tensor, replicas, config.zero.stage
        if key not in self.known:
            self.known[key] = super().update(config, layer, unit)
        return self.known[key]
