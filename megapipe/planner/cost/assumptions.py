"""What the cost model takes for granted beside the configuration and the machine."""

from dataclasses import dataclass, replace

from megapipe.layout.hardware.description import Hardware
from megapipe.layout.hardware.device_type import hardware_device_type

SLOW_DOWNS = {"cpu": 2.0, "cuda": 1.1}
"""By device type. A CPU's cores do the communication too, so that both take turns; a GPU's copies and network adapters
do most of it: 1.1 is the lower end of the range that Galvatron's authors profile, 1.1 to 1.3."""


@dataclass(frozen=True)
class Assumptions:
    """Choices of an implementation that no configuration names; the defaults are this project's own engine.

    slow_down: of compute and of communication while they run side by side, at least 1 (Galvatron, arXiv 2211.13878,
    cost estimator); 0 takes that of the device type. scattered_sends: each of t tensor ranks sends 1/t of a message
    between stages, and its node gathers it again (Narayanan et al. 2021, arXiv 2104.04473, section 4.1).
    waits_for_sends: no message between stages travels beside compute. gathers_beside_forward: weights that an update
    has written in shards (ZeRO 1 and 2) are gathered beside the next step's first forwards, not before them.
    megatron_kernels: the loss takes a kernel for each of its steps, in fp32, and dropout stores its mask, a byte an
    element, as in Megatron-LM. tensor_by_tensor: replicas that share weights out (ZeRO 3) gather each by itself and
    sum each gradient by itself, see `replicas.tensor_by_tensor_seconds`.
    """

    slow_down: float = 0.0
    scattered_sends: bool = False
    waits_for_sends: bool = False
    gathers_beside_forward: bool = False
    megatron_kernels: bool = False
    tensor_by_tensor: bool = False

    def on(self, hardware: Hardware) -> "Assumptions":
        """With the machine's slow-down filled in."""
        return self if self.slow_down else replace(self, slow_down=SLOW_DOWNS[hardware_device_type(hardware)])


ENGINE = Assumptions()
"""Of this project's engine."""
