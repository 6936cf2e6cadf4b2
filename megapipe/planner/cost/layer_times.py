"""Where times of layers come from: a device's roofline, or measurements of such layers."""

from typing import NamedTuple, Protocol

from megapipe.config.run import PretrainConfig
from megapipe.spec.parameters import LayerSpec


class PhaseSeconds(NamedTuple):
    """Of one micro-batch: forward, both halves of the backward, and the forward again where it is run whole."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0

    def plus(self, other: "PhaseSeconds") -> "PhaseSeconds":
        """Of both, one behind the other."""
        return PhaseSeconds(*(one + two for one, two in zip(self, other, strict=True)))

    def scaled(self, factor: float) -> "PhaseSeconds":
        """Of as many."""
        return PhaseSeconds(*(each * factor for each in self))


class LayerSeconds(NamedTuple):
    """Of one micro-batch through one layer on one rank, communication left out.

    recompute: the forward again, where it is; 0 elsewhere. update: the optimizer's step of what the rank updates.
    source: where the numbers come from, in words. waits: what ranks that share the layer wait for one another besides,
    where that was measured.
    """

    forward: float
    backward_input: float
    backward_weight: float
    recompute: float
    update: float
    source: str
    waits: PhaseSeconds | None = None


class LayerTimes(Protocol):
    """Answers for the layers of a run."""

    def of(self, config: PretrainConfig, layer: LayerSpec) -> LayerSeconds:
        """config: with parallel.data filled in."""
        ...
