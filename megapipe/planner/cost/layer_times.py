"""Where times of layers come from: a device's roofline, or measurements of such layers."""

from typing import NamedTuple, Protocol

from megapipe.config.run import PretrainConfig
from megapipe.costs.parameters import LayerSpec


class LayerSeconds(NamedTuple):
    """Of one micro-batch through one layer on one rank, communication left out.

    recompute: the forward again, where it is; 0 elsewhere. update: the optimizer's step of what the rank updates.
    source: where the numbers come from, in words.
    """

    forward: float
    backward_input: float
    backward_weight: float
    recompute: float
    update: float
    source: str


class LayerTimes(Protocol):
    """Answers for the layers of a run."""

    def of(self, config: PretrainConfig, layer: LayerSpec) -> LayerSeconds:
        """config: with parallel.data filled in."""
        ...
