"""UnitState: parameters, gradients and optimizer state of one unit in flat buffers, with weight versions.

A unit is a layer, or a tied weight, which has one gradient accumulator per use. Data-parallel reduction, weight
versions, the optimizer and the checkpoint are operations on this object (docs/design.md, idea 2).
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from megapipe.costs.parameters import ParameterSpec
from megapipe.parallel.segments import Segment, SegmentTable
from megapipe.random.weights import fill_box


class UnitState:
    """Flat buffers of one unit on one rank.

    weights[i]: compute-dtype copies; absolute weight version v lies in copy v modulo their number. Versions
    0 .. copies-1 start out equal; `newest` is the youngest one.
    master: fp32 buffer that the optimizer updates. When compute is fp32 (or fp64) there is no separate master: the
    newest version is it.
    gradients: fp32 (fp64) accumulators, one a use in each gradient buffer. The update of number k accumulates
    in buffer k modulo their number, `gradients_of(k)`, whose first one holds the total after `sum_uses`.
    moments: name -> flat buffer, filled in by the optimizer.
    in_host: what only updates work on, moments and a separate master, lies in host memory.
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
        num_versions: int = 1,
        num_uses: int = 1,
        gradient_buffers: int = 1,
        in_host: bool = False,
    ) -> None:
        """Allocate zeroed buffers. Raises ValueError on a count below one, or gradient buffers that do not go evenly
        into the versions: what computes with one version always accumulates in the same buffer."""
        if num_versions < 1 or num_uses < 1:
            raise ValueError(f"unit {name}: {num_versions} versions and {num_uses} uses; both must be at least 1")
        if gradient_buffers < 1 or num_versions % gradient_buffers:
            raise ValueError(
                f"unit {name}: {gradient_buffers} gradient buffers must divide its {num_versions} weight versions"
            )
        self.name = name
        self.table = SegmentTable(specs, tensor_rank=tensor_rank, tensor_size=tensor_size, alignment=alignment)
        self.accumulate_dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
        size = self.table.num_elements
        self.weights = [torch.zeros(size, dtype=compute_dtype, device=device) for _ in range(num_versions)]
        self.num_uses = num_uses
        self.gradients = [
            torch.zeros(size, dtype=self.accumulate_dtype, device=device) for _ in range(gradient_buffers * num_uses)
        ]
        self.moments: dict[str, Tensor] = {}
        self.newest = num_versions - 1
        self._master: Tensor | None = None
        self._published = False
        self.in_host = in_host
        if compute_dtype != self.accumulate_dtype:
            self._master = self._update_zeros()

    @property
    def master(self) -> Tensor:
        """The newest weights in the accumulation dtype."""
        return self.weights[self.newest % len(self.weights)] if self._master is None else self._master

    @property
    def working_copy(self) -> Tensor | None:
        """The newest weights in the compute dtype; None where the master itself is in it."""
        return None if self._master is None else self.weights[self.newest % len(self.weights)]

    def update_buffers(self) -> dict[str, Tensor]:
        """What only updates work on: the moments, and the master where it is no weight version."""
        return self.moments | ({} if self._master is None else {"master": self._master})

    def place_update_buffers(self, buffers: dict[str, Tensor], *, in_host: bool) -> None:
        """Let other tensors take the place of `update_buffers`, by name."""
        self.in_host = in_host
        self.moments = {name: buffer for name, buffer in buffers.items() if name != "master"}
        self._master = buffers.get("master")

    def zero_moments(self, names: Iterable[str]) -> None:
        """Moments of zeros, where this state's lie."""
        self.moments = {name: self._update_zeros() for name in names}

    def _update_zeros(self) -> Tensor:
        device = self.weights[0].device
        pinned = self.in_host and device.type == "cuda"
        where = torch.device("cpu") if self.in_host else device
        return torch.zeros(self.table.num_elements, dtype=self.accumulate_dtype, device=where, pin_memory=pinned)

    def initialize(self, seed: int) -> None:
        """Draw every owned element from (seed, global name, global index) and copy it to all versions."""
        for segment in self.table:
            values = fill_box(segment.spec.name, segment.spec.shape, segment.box, segment.spec.init, seed)
            flat = torch.from_numpy(values).reshape(-1)
            self.master[segment.start : segment.start + segment.owned].copy_(flat)
        self.restore(self.newest)

    def restore(self, newest: int) -> None:
        """Give every version the weights that stand in the master, and number the youngest one `newest`."""
        for copy in self.weights:
            copy.copy_(self.master)
        self.newest = newest

    def publish(self) -> None:
        """Cast the master into the working copy; nothing to do where they are one buffer, or it has been written."""
        if self.working_copy is not None and not self._published:
            self.working_copy.copy_(self.master)

    def mark_published(self) -> None:
        """Say that the optimizer has written the working copy of this update along with the master."""
        self._published = True

    def begin_update(self, version: int) -> Tensor:
        """The buffer that the optimizer changes in place to make absolute weight version `version`.

        It holds the newest weights on return. Raises ValueError when `version` does not follow the newest one.
        """
        if version != self.newest + 1:
            raise ValueError(
                f"unit {self.name}: version {version} does not follow version {self.newest}; updates go one by one"
            )
        previous = self.master
        self.newest = version
        self._published = False
        if self._master is None and len(self.weights) > 1:
            self.master.copy_(previous)
        return self.master

    def bind(self, module: nn.Module, parameters: Mapping[str, ParameterSpec], *, copy: int = 0, use: int = 0) -> None:
        """Replace parameters of `module` by views: data in `weights[copy]`, `.grad` where that version accumulates.

        parameters: attribute path in the module -> spec; only specs of this unit are bound.
        """
        names = {segment.spec.name for segment in self.table}
        for path, spec in parameters.items():
            if spec.name not in names:
                continue
            segment = self.table[spec.name]
            parameter = nn.Parameter(self.view(self.weights[copy], segment))
            # Lets autograd add into the wider accumulator in place where compute is bf16.
            parameter.grad_dtype = self.accumulate_dtype
            parameter.grad = self.view(self.gradients_of(copy)[use], segment)
            owner, _, leaf = path.rpartition(".")
            setattr(module.get_submodule(owner), leaf, parameter)

    @staticmethod
    def view(flat: Tensor, segment: Segment) -> Tensor:
        """One parameter's stored shard as a tensor of its local shape."""
        return flat[segment.start : segment.stop].view(segment.local_shape)

    @staticmethod
    def owned_view(flat: Tensor, segment: Segment) -> Tensor:
        """One parameter's owned elements, shaped as its box: no padding."""
        return flat[segment.start : segment.start + segment.owned].view(segment.box.shape)

    def gradients_of(self, update: int) -> list[Tensor]:
        """The accumulators of an update, by use. update: absolute number, that of the version it is computed with."""
        buffer = update * self.num_uses % len(self.gradients)
        return self.gradients[buffer : buffer + self.num_uses]

    def sum_uses(self, update: int = 0) -> None:
        """Add every use's gradient into the first accumulator of an update, in order of use."""
        total, *others = self.gradients_of(update)
        for other in others:
            total.add_(other)

    def zero_gradients(self, update: int = 0) -> None:
        """Clear the accumulators of an update for the next one that takes their buffer."""
        for gradient in self.gradients_of(update):
            gradient.zero_()
