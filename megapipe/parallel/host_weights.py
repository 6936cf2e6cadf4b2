"""Weights that lie in host memory between their uses."""

from collections.abc import Iterable

import torch
from torch import Tensor

from megapipe.parallel.unit_state import UnitState
from megapipe.spec.parameters import ParameterSpec


class HostWeights(UnitState):
    """State of one unit that keeps nothing but gradients on its device.

    `weight_shards[0]` is the weights' home in host memory, which initialization, checkpoints and updates see;
    `weights[0]`, the copy that modules compute with, has memory from `gather_weights` to `release_weights` alone. An
    update works on the home's copy on the device, brought there and back with the moments.
    """

    def __init__(
        self,
        name: str,
        specs: Iterable[ParameterSpec],
        *,
        compute_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        tensor_rank: int = 0,
        tensor_size: int = 1,
        alignment: int = 1,
        master_weights: bool = True,
    ) -> None:
        """As of `UnitState`, of which it has one version, one use, and all of the state."""
        super().__init__(
            name,
            specs,
            compute_dtype=compute_dtype,
            device=device,
            tensor_rank=tensor_rank,
            tensor_size=tensor_size,
            alignment=alignment,
            master_weights=master_weights,
            in_host=True,
        )
        self.weight_shards = [self._update_zeros(self.table.num_elements, compute_dtype)]

    @property
    def weights_come_and_go(self) -> bool:
        return True

    def update_buffers(self) -> dict[str, Tensor]:
        return super().update_buffers() | {"weights": self.weight_shards[0]}

    def place_update_buffers(self, buffers: dict[str, Tensor], *, in_host: bool) -> None:
        others = {name: buffer for name, buffer in buffers.items() if name != "weights"}
        super().place_update_buffers(others, in_host=in_host)
        self.weight_shards = [buffers["weights"]]
