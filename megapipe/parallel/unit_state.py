"""UnitState: parameters, gradients and optimizer state of one unit in flat buffers, with weight versions.

A unit is a layer, or a tied weight, which has one gradient accumulator per use. Data-parallel reduction, weight
versions, the optimizer and the checkpoint are operations on this object (docs/design.md, idea 2).
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy as shallow_copy
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megapipe.parallel.groups import Group, Work
from megapipe.parallel.segments import WHOLE, SegmentTable, Sharding, TableShard
from megapipe.random.bits import fill_box
from megapipe.spec.parameters import ParameterSpec


class WeightSource(Protocol):
    """Source of a whole copy of weights: a group whose ranks each have a part of it, or host memory."""

    def gather_into(self, whole: Tensor, part: Tensor) -> Work:
        """Start to fill `whole`, flat. part: this rank's shard of it, or all of it in host memory."""


class GradientAccumulators(TableShard):
    """The gradient buffers of a unit's state, as described in `UnitState`."""

    sharding: Sharding
    accumulate_dtype: torch.dtype

    def _make_accumulators(self, size: int, device: torch.device | str, num_uses: int, gradient_buffers: int) -> None:
        """Allocate buffers of `size` elements. They are cleared, except those whose memory is allocated only while it
        is needed."""
        self.num_uses = num_uses
        buffer = transient if self.sharding.gradients else torch.zeros
        count, dtype = gradient_buffers * num_uses, self.accumulate_dtype
        self.gradients = [buffer(size, dtype=dtype, device=device) for _ in range(count)]
        self.gradient_shards: list[Tensor] = []
        if self.sharding.gradients:
            shard_size = self.shard.stop - self.shard.start
            self.gradient_shards = [each.new_zeros(shard_size) for each in self.gradients]
        self._has_reduced = [False] * gradient_buffers

    def gradients_of(self, update: int) -> list[Tensor]:
        """Return the accumulators of an update, by use. update: absolute number of the weight version that its
        backwards use."""
        buffer = update * self.num_uses % len(self.gradients)
        return self.gradients[buffer : buffer + self.num_uses]

    def sum_uses(self, update: int = 0) -> None:
        """Add every use's gradient into the first accumulator of an update, in order of use."""
        total, *further_uses = self.gradients_of(update)
        for gradient in further_uses:
            total.add_(gradient)

    def zero_gradients(self, update: int = 0) -> None:
        """Clear the accumulators of an update for the next one that takes their buffer."""
        self._has_reduced[update % len(self._has_reduced)] = False
        if self.sharding.gradients:
            return
        for gradient in self.gradients_of(update):
            gradient.zero_()

    def reduced_gradient(self, update: int = 0) -> Tensor:
        """Return this rank's part of the reduced gradient of an update."""
        if self.sharding.gradients:
            return self.gradient_shards[update % len(self.gradient_shards)]
        return self.gradients_of(update)[0][self.shard]

    def has_open_gradients(self, update: int = 0) -> bool:
        """Return whether the accumulators of an update have memory."""
        return is_allocated(self.gradients_of(update)[0])

    def open_gradients(self, update: int = 0) -> None:
        """Allocate and clear the accumulator of an update, if gradients are sharded."""
        (gradient,) = self.gradients_of(update)
        allocate(gradient)
        gradient.zero_()

    def close_gradients(self, update: int = 0) -> None:
        """Add this rank's part of the reduced accumulator to its gradient shard, and free the accumulator."""
        (gradient,) = self.gradients_of(update)
        buffer = update % len(self.gradient_shards)
        shard, part = self.gradient_shards[buffer], gradient[self.shard]
        if self._has_reduced[buffer]:
            shard.add_(part)
        else:
            shard.copy_(part)
        self._has_reduced[buffer] = True
        free(gradient)


class UnitState(GradientAccumulators):
    """Flat buffers of one unit on one rank.

    weights[i]: compute-dtype copies; absolute weight version v is in copy v modulo their number. Versions 0 ..
    copies-1 are equal at first; `newest` is the newest one. master: fp32 buffer that the optimizer updates. When
    compute is fp32 (or fp64), and without master_weights, there is no separate master: the newest version is the
    master. gradients: fp32 (fp64) accumulators, one per use in each gradient buffer. Update number k accumulates
    in buffer k modulo their number, `gradients_of(k)`, whose first one holds the total after `sum_uses`. moments: name
    -> flat buffer, filled in by the optimizer. A moment that not all parameters have starts at `moment_starts[name]`
    of the other buffers. partial: names of parameters whose gradient covers only this tensor rank's tokens, and must
    be summed over the ranks. in_host: the buffers that only updates use, moments and a separate master, are in host
    memory.

    If replicas shard the state, `shard` is the range of the table's elements that this rank keeps. The master, the
    moments, `gradient_shards[i]` and `weight_shards[i]` only have these elements. A whole accumulator of sharded
    gradients has memory from `open_gradients` to `close_gradients`, a whole copy of sharded weights from
    `gather_weights` to `release_weights`. It is always the same tensor, whose memory is released and allocated, so
    that parameters, `.grad` and the tensors that autograd saved stay valid.
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
        sharding: Sharding = WHOLE,
        master_weights: bool = True,
        in_host: bool = False,
    ) -> None:
        """Allocate zeroed buffers. Raises ValueError if a count is below one, or if the number of gradient buffers
        does not divide that of versions: backwards with one version must always accumulate in the same buffer."""
        if num_versions < 1 or num_uses < 1:
            raise ValueError(f"unit {name}: {num_versions} versions and {num_uses} uses; both must be at least 1")
        if gradient_buffers < 1 or num_versions % gradient_buffers:
            raise ValueError(
                f"unit {name}: {gradient_buffers} gradient buffers must divide its {num_versions} weight versions"
            )
        if sharding.gradients and num_uses > 1:
            raise ValueError(
                f"unit {name}: gradients and weights of {num_uses} uses cannot be sharded, "
                "only those of one; shard its optimizer state alone (stage 1)"
            )
        self.name = name
        self.sharding = sharding
        self.table = SegmentTable(
            specs,
            tensor_rank=tensor_rank,
            tensor_size=tensor_size,
            alignment=alignment,
            num_shards=sharding.count,
            whole_matrices=sharding.whole_matrices,
        )
        self.accumulate_dtype = torch.promote_types(compute_dtype, torch.float32)
        size = self.table.num_elements
        self.shard = sharding.part_of(size)
        shard_size = self.shard.stop - self.shard.start
        buffer = transient if self.transient_weights else torch.zeros
        self.weights = [buffer(size, dtype=compute_dtype, device=device) for _ in range(num_versions)]
        self.weight_shards = self.weights
        if sharding.weights:
            self.weight_shards = [torch.zeros(shard_size, dtype=compute_dtype, device=device) for _ in self.weights]
        elif sharding.count > 1:
            self.weight_shards = [whole[self.shard] for whole in self.weights]
        self._make_accumulators(size, device, num_uses, gradient_buffers)
        self._gathers: dict[int, Work] = {}
        self.moments: dict[str, Tensor] = {}
        self.moment_starts: dict[str, int] = {}
        self.partial: frozenset[str] = frozenset()
        self.newest = num_versions - 1
        self._master: Tensor | None = None
        self._published = False
        self.in_host = in_host
        if master_weights and compute_dtype != self.accumulate_dtype:
            self._master = self._update_zeros(shard_size)

    @property
    def transient_weights(self) -> bool:
        """Whether a whole copy of the weights only has memory from a gather to its release."""
        return self.sharding.weights

    @property
    def master(self) -> Tensor:
        """This rank's part of the newest weights, in the accumulation dtype unless they are only kept in the compute
        dtype."""
        return self.weight_shards[self.newest % len(self.weights)] if self._master is None else self._master

    @property
    def working_copy(self) -> Tensor | None:
        """This rank's part of the newest weights in the compute dtype; None if that is the master."""
        return None if self._master is None else self.weight_shards[self.newest % len(self.weights)]

    def add_moment(self, name: str, part: slice, dtype: torch.dtype | None = None) -> None:
        """Allocate a zeroed moment for the parameters in `part`, by default in the accumulation dtype."""
        self.moments[name] = self._update_zeros(part.stop - part.start, dtype)
        self.moment_starts[name] = part.start

    def moment(self, name: str, part: slice) -> Tensor:
        """Return the elements of a moment that belong to `part` of the other buffers."""
        start = self.moment_starts.get(name, 0)
        return self.moments[name][part.start - start : part.stop - start]

    def update_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that only updates use: the moments, and the master if it is not a weight version."""
        return self.moments | ({} if self._master is None else {"master": self._master})

    def place_update_buffers(self, buffers: dict[str, Tensor], *, in_host: bool) -> None:
        """Replace `update_buffers` by other tensors, by name."""
        self.in_host = in_host
        self.moments = {name: buffer for name, buffer in buffers.items() if name != "master"}
        self._master = buffers.get("master")

    def _update_zeros(self, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a buffer for updates, in host memory if this state is there; by default in the accumulation dtype."""
        device = self.weights[0].device
        pinned = self.in_host and device.type == "cuda"
        buffer_device = torch.device("cpu") if self.in_host else device
        buffer_dtype = self.accumulate_dtype if dtype is None else dtype
        return torch.zeros(size, dtype=buffer_dtype, device=buffer_device, pin_memory=pinned)

    def initialize(self, seed: int) -> None:
        """Draw every owned element from (seed, global name, global index) and copy it to all versions."""
        for segment in self.table:
            values = fill_box(segment.spec.name, segment.spec.shape, segment.box, segment.spec.init, seed)
            flat = torch.from_numpy(values).reshape(-1)
            held = self.held(segment)
            self.in_shard(self.master, segment).copy_(flat[held.start : held.stop])
            if not self.transient_weights:
                for copy in self.weights:
                    copy[segment.start : segment.start + segment.owned].copy_(flat)
        self.restore(self.newest)

    def restore(self, newest: int) -> None:
        """Copy the master's weights to every version, and number the youngest one `newest`.

        If replicas shard the state, each does so for its shard; `gather_versions` gathers the shards.
        """
        for copy in self.weight_shards:
            copy.copy_(self.master)
        self.newest = newest

    def gather_versions(self, group: Group) -> None:
        """Fill every whole copy of the weights from all shards, if replicas shard the state but not its weights.

        A collective call of the group of the ranks that share the state.
        """
        if self.sharding.count == 1 or self.sharding.weights:
            return
        for copy in range(len(self.weights)):
            self.gather_weights(copy, group)
            self.await_weights(copy)

    def gather_weights(self, copy: int, source: WeightSource) -> None:
        """Start filling a whole copy of the weights: from all ranks' shards through their group, or from host memory.
        The next use of the copy waits for it."""
        whole = self.weights[copy]
        if self.transient_weights:
            allocate(whole)
        if whole.numel() == 0:
            return
        # Hide this change from autograd: the tensors that it saved of the copy have exactly these values.
        self._gathers[copy] = source.gather_into(whole.data, self.weight_shards[copy])

    def await_weights(self, copy: int) -> None:
        """Wait until a copy of the weights may be used."""
        work = self._gathers.pop(copy, None)
        if work is not None:
            work.wait()

    def await_all_weights(self) -> None:
        """Wait until no copy of the weights is being gathered."""
        for copy in range(len(self.weights)):
            self.await_weights(copy)

    def release_weights(self, copy: int) -> None:
        """Free a gathered copy, if it only has memory from a gather to its release."""
        self.await_weights(copy)
        free(self.weights[copy])

    def publish(self) -> None:
        """Cast the master into the working copy, unless they are the same buffer or the optimizer has already written
        the copy."""
        if self.working_copy is not None and not self._published:
            self.working_copy.copy_(self.master)

    def mark_published(self) -> None:
        """Record that the optimizer has written the working copy of this update together with the master."""
        self._published = True

    def twin(self) -> "UnitState":
        """Return a copy whose update does not change this state: weights and the buffers of updates are in separate
        memory, on the device. Gradients are shared, and no gather is awaited."""
        twin = shallow_copy(self)
        same_list = self.weight_shards is self.weights
        if not self.transient_weights:
            twin.weights = [each.clone() for each in self.weights]
        twin.weight_shards = twin.weights if same_list else [each.clone() for each in self.weight_shards]
        device = self.weights[0].device
        buffers = {name: each.to(device, copy=True) for name, each in self.update_buffers().items()}
        twin.place_update_buffers(buffers, in_host=False)
        twin._gathers = {}
        return twin

    def begin_update(self, version: int) -> Tensor:
        """Return the buffer that the optimizer changes in place to compute absolute weight version `version`.

        It holds the newest weights on return. Raises ValueError if `version` does not follow the newest one.
        """
        if version != self.newest + 1:
            raise ValueError(f"unit {self.name}: version {version} does not follow version {self.newest}")
        previous = self.master
        self.await_weights(version % len(self.weights))
        self.newest = version
        self._published = False
        if self._master is None and len(self.weights) > 1:
            self.master.copy_(previous)
        return self.master

    def bind(self, module: nn.Module, parameters: Mapping[str, ParameterSpec], *, copy: int = 0, use: int = 0) -> None:
        """Replace parameters of `module` by views: data in `weights[copy]`, `.grad` in the accumulator of that
        version.

        parameters: attribute path in the module -> spec; only specs of this unit are bound.
        """
        names = {segment.spec.name for segment in self.table}
        weights, gradients = self.weights[copy], self.gradients_of(copy)[use]
        with allocated(weights), allocated(gradients):
            for path, spec in parameters.items():
                if spec.name not in names:
                    continue
                segment = self.table[spec.name]
                parameter = nn.Parameter(self.view(weights, segment))
                # Lets autograd add into the wider accumulator in place if compute is in bf16.
                parameter.grad_dtype = self.accumulate_dtype
                parameter.grad = self.view(gradients, segment)
                owner, _, leaf = path.rpartition(".")
                setattr(module.get_submodule(owner), leaf, parameter)


class HostWeights(UnitState):
    """State of one unit that only keeps gradients on its device.

    `weight_shards[0]` has the weights in host memory, for initialization, checkpoints and updates. `weights[0]`, the
    copy that modules compute with, only has memory from `gather_weights` to `release_weights`. An update works on a
    copy of the weights on the device, which is moved there and back with the moments.
    """

    def __init__(self, name: str, specs: Iterable[ParameterSpec], **options: Any) -> None:
        """Take the arguments of `UnitState`, except numbers of versions and uses, and shards: there is one of each."""
        super().__init__(name, specs, **options, in_host=True)
        self.weight_shards = [self._update_zeros(self.table.num_elements, self.weights[0].dtype)]

    @property
    def transient_weights(self) -> bool:
        return True

    def update_buffers(self) -> dict[str, Tensor]:
        return super().update_buffers() | {"weights": self.weight_shards[0]}

    def place_update_buffers(self, buffers: dict[str, Tensor], *, in_host: bool) -> None:
        state_buffers = {name: buffer for name, buffer in buffers.items() if name != "weights"}
        super().place_update_buffers(state_buffers, in_host=in_host)
        self.weight_shards = [buffers["weights"]]


def sum_partial_gradients(state: UnitState, gradient: Tensor, group: Group) -> None:
    """Replace the gradients of partial parameters by their sums over the ranks of `group`, in one exchange for all of
    them.

    gradient: a flat accumulator of `state`. Ranks hold the same bits afterwards.
    """
    partial = [gradient[segment.start : segment.stop] for segment in state.table if segment.spec.name in state.partial]
    if not partial:
        return
    total = torch.cat(partial)
    group.all_reduce(total)
    for part, summed in zip(partial, total.split([part.numel() for part in partial]), strict=True):
        part.copy_(summed)


def allocate(flat: Tensor) -> None:
    """Allocate memory for a flat tensor that was freed; its values are undefined. Its views use the new memory."""
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def free(flat: Tensor) -> None:
    """Free a flat tensor's memory. The tensor keeps its size, and so do its views and tensors that autograd saved of
    it."""
    flat.untyped_storage().resize_(0)


def is_allocated(flat: Tensor) -> bool:
    """Return whether a flat tensor has memory."""
    return flat.numel() == 0 or flat.untyped_storage().nbytes() > 0


def transient(size: int, *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return a flat tensor that has no memory yet."""
    flat = torch.empty(size, dtype=dtype, device=device)
    free(flat)
    return flat


@contextmanager
def allocated(flat: Tensor) -> Iterator[None]:
    """Allocate a flat tensor for the duration of the block, if it has no memory: only then can views be taken of
    it."""
    had_memory = is_allocated(flat)
    if not had_memory:
        allocate(flat)
    try:
        yield
    finally:
        if not had_memory:
            free(flat)
