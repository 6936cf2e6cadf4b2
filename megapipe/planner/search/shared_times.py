"""Times of layers for the many layouts of one search: what layouts have in common is found once."""

from megapipe.config.run import PretrainConfig
from megapipe.planner.cost.layer_times import LayerSeconds, LayerTimes, PhaseSeconds
from megapipe.planner.cost.roofline_times import RooflineTimes, layer_seconds
from megapipe.spec.parameters import LayerSpec


def shared(times: LayerTimes) -> LayerTimes:
    """The same times, faster, for one run whose layouts alone differ (`search.layouts.Layout`). Measured ones, which
    may depend on all of a layout, come back as they are."""
    return SharedRoofline(times) if isinstance(times, RooflineTimes) else times


class SharedRoofline:
    """`RooflineTimes` of one run. Its caches go by those fields of a layout that each part depends on; all others are
    the run's, and what this object knows is gone with the search that made it."""

    def __init__(self, times: RooflineTimes) -> None:
        self._times = times
        self._kernels: dict[tuple[object, ...], tuple[PhaseSeconds, float]] = {}
        self._updates: dict[tuple[object, ...], float] = {}

    def of(self, config: PretrainConfig, layer: LayerSpec) -> LayerSeconds:
        """As of `RooflineTimes`. config: of the search's run, in any layout."""
        parallel, name = config.parallel, layer.name
        # Of all methods of recomputation only selective changes kernels, a block's: full runs the same ones twice.
        selective = config.recompute.method == "selective" and layer.kind == "block"
        kernels = name, parallel.tensor, parallel.context, parallel.sequence, config.batch.micro_size, selective
        if kernels not in self._kernels:
            self._kernels[kernels] = self._times.kernels(config, layer)
        replicas = (parallel.data or 1) * parallel.context
        update = name, parallel.tensor, replicas, config.zero.stage, parallel.pipeline == 1
        if update not in self._updates:
            self._updates[update] = self._times.update(config, layer)
        return layer_seconds(config, layer, self._kernels[kernels], self._updates[update])
