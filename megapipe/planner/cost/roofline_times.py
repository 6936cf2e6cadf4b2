"""Times of layers by the device's roofline, where nothing has been measured."""

from dataclasses import dataclass

from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Device
from megapipe.layout.stages import VOCABULARY_ALIGNMENT
from megapipe.layout.units import Unit, UnitCosts
from megapipe.planner.cost.kernels import LayerKernels
from megapipe.planner.cost.layer_times import LayerSeconds, PhaseSeconds
from megapipe.planner.cost.updates import muon_seconds, update_seconds
from megapipe.spec.dtypes import Precision
from megapipe.spec.parameters import LayerSpec

SOURCE = "roofline of the device (Williams et al. 2009), products by its efficiency"


@dataclass(frozen=True)
class RooflineTimes:
    """`LayerTimes` of a device: the sum of a layer's kernels (`LayerKernels`).

    megatron_kernels: as in `Assumptions`.
    """

    device: Device
    megatron_kernels: bool = False

    def of(self, config: PretrainConfig, layer: LayerSpec) -> LayerSeconds:
        """Seconds of one micro-batch. Raises ConfigError where the device has no peak for the precision."""
        return layer_seconds(config, layer, self.kernels(config, layer), self.update(config, layer))

    def kernels(self, config: PretrainConfig, layer: LayerSpec) -> tuple[PhaseSeconds, float]:
        """Of all kernels of a micro-batch, and of those that are made again inside its backward. Replicas and the
        pipeline change nothing about them."""
        by_phase = {"forward": 0.0, "backward_input": 0.0, "backward_weight": 0.0, "recompute": 0.0}
        for kernel in LayerKernels(config, layer, self.device, self.megatron_kernels):
            by_phase[kernel.phase] += kernel.time.seconds
        again = by_phase.pop("recompute")
        return PhaseSeconds(**by_phase), again

    def update(self, config: PretrainConfig, layer: LayerSpec) -> float:
        """Of a tied weight the embedding's use alone where one rank has both. Micro-batches change nothing about
        it."""
        specs = tuple(layer.parameters.values())
        if layer.kind == "head" and config.parallel.pipeline == 1:
            specs = tuple(spec for spec in specs if spec.name.startswith("head."))
        replicas = (config.parallel.data or 1) * config.parallel.context
        units = UnitCosts(config, replicas, VOCABULARY_ALIGNMENT)
        elements = units.own_elements(Unit(specs), 1)
        precision: Precision = config.training.precision  # type: ignore[assignment]
        seconds = update_seconds(config, self.device, elements, precision)
        return seconds + (
            muon_seconds(config, self.device, specs, units.shards) if config.optimizer.name == "muon" else 0.0
        )


def layer_seconds(
    config: PretrainConfig, layer: LayerSpec, kernels: tuple[PhaseSeconds, float], update: float
) -> LayerSeconds:
    """A layer's times from `RooflineTimes.kernels` and `RooflineTimes.update`."""
    seconds, again = kernels
    whole = config.recompute.method == "full" and layer.kind == "block"
    return LayerSeconds(*seconds, seconds.forward if whole else again, update, SOURCE)
