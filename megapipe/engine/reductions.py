"""Sums over ranks (gradients over replicas, tied weights over their uses, scalars over all ranks), and the update.

Sharded state follows ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, sections 5 and 7): whole weights are gathered
and whole gradients are summed into shards, a few units at a time. The schedule determines when; the action that needs
the result waits for it. Sums that the schedule hides run on a separate thread.

The gradient norm is canonical: the same bits on every rank and for every pipeline layout. Squares are summed over
blocks of 65,536 elements of a parameter's shard. The sums of blocks are added in float64, and so are those of
parameters, in the order of their global names. (A single fp32 norm of 30 million elements is off by 1.7e-3.)
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from copy import copy
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from megapipe.engine.stage import Stage
from megapipe.engine.step import Counted, Scalars, StepState, tensor_on
from megapipe.kernels.reference.optimizer import gradient_norm
from megapipe.optim.optimizer import FlatOptimizer
from megapipe.parallel.groups import Group, Work
from megapipe.parallel.unit_state import UnitState, sum_partial_gradients
from megapipe.schedules.schedule import Header

Value = TypeVar("Value")
Result = TypeVar("Result")


class Turns:
    """Runs functions on threads, and their collectives in the order in which they were started.

    Otherwise, two sums in progress at the same time could run in different orders on two ranks.
    """

    def __init__(self) -> None:
        self._last: Future[object] | None = None
        self._stream: torch.cuda.Stream | None = None

    def run_beside(
        self, find: Callable[[], Value], share: Callable[[Value], Result], device: torch.device
    ) -> Future[Result]:
        """Start `share(find())` like the function `run_beside`; `share` runs after that of every earlier call.

        On a GPU all calls use one stream: torch has few, and the communicators use the same ones.
        """
        before = self._last
        if device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device)

        def run() -> Result:
            result = find()
            if before is not None:
                wait([before])
            return share(result)

        future = run_beside(run, self._stream)
        self._last = future  # type: ignore[assignment]
        return future


def run_beside(function: Callable[[], Result], stream: torch.cuda.Stream | None) -> Future[Result]:
    """Run a function on a new thread. The future's `result()` raises its exceptions.

    On a GPU it runs on `stream`, after everything that the caller has launched, and is done when its result is there;
    only a caller that reads the result waits. The thread is a daemon: a rank that fails can end while a thread still
    waits for a dead peer.
    """
    future: Future[Result] = Future()
    launched = torch.cuda.current_stream(stream.device).record_event() if stream is not None else None

    def run() -> None:
        try:
            if stream is None or launched is None:
                result = function()
            else:
                with torch.cuda.stream(stream):
                    stream.wait_event(launched)
                    result = function()
                    # Do not synchronize the whole stream: a later call may have queued work that waits for this
                    # result.
                    stream.record_event().synchronize()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="megapipe reductions", daemon=True).start()
    return future


def shared_states(header: Header, stages: Mapping[int, Stage], stage: int) -> list[tuple[UnitState, ...]]:
    """Return, for each layer of a stage, the states whose weights its compute may have to wait for.

    Any unit may use a tied weight; there is at most one wait for it.
    """
    tied = [
        state
        for number, each in stages.items()
        for index, state in each.states.items()
        if header.tied_group(number, index) >= 0 and _awaits(state)
    ]
    awaited = {unit: state for unit, state in stages[stage].states.items() if _awaits(state)}
    return [
        (*(awaited[unit] for unit in header.states_of(stage, layer) if unit in awaited), *tied)
        for layer in range(len(stages[stage].units))
    ]


def _awaits(state: UnitState) -> bool:
    return state.sharding.count > 1 or state.transient_weights


class GradientReduction(Work):
    """The sum of a unit's gradient over the ranks that shard its state; each rank gets its shard of the sum.

    copies: ranks with the same shard, over which the shard is summed too; None if this is not the unit's last sum.
    dtype: of gradients in messages.
    """

    def __init__(
        self, state: UnitState, update: int, shards: Group, copies: Group | None, dtype: torch.dtype | None
    ) -> None:
        self.state = state
        self.update = update
        self._shards = shards
        self._copies = copies
        self._whole = state.gradients_of(update)[0]
        self._sent = self._whole if dtype is None else self._whole.to(dtype)
        self._summing: Work | None = shards.reduce_into_part(self._sent)
        self._copying: Work | None = None

    def go_on(self) -> None:
        """Wait for the sum over shards, and start the sum over copies."""
        if self._summing is None:
            return
        self._summing.wait()
        self._summing = None
        if self._sent is not self._whole:
            self._shards.own_part(self._whole).copy_(self._shards.own_part(self._sent))
            self._sent = self._whole
        if self.state.sharding.gradients:
            self.state.close_gradients(self.update)
        if self._copies is not None:
            self._copying = self._copies.all_reduce(self.state.reduced_gradient(self.update), async_op=True)

    def wait(self) -> None:
        self.go_on()
        if self._copying is not None:
            self._copying.wait()
            self._copying = None


class GradientPool:
    """Limits the whole gradients that have memory at the same time, if gradients are sharded: those that backwards add
    to, and those being reduced.

    limit: maximum total size of their units.
    """

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._sizes: dict[tuple[UnitState, int], int] = {}
        self._in_flight: deque[GradientReduction] = deque()

    def open(self, state: UnitState, update: int, size: int) -> None:
        """Allocate a unit's accumulator for an update if it has no memory.

        This waits until the pool has room for it, and until a reduction of its previous content has ended.
        """
        while any(each.state is state and each.update == update for each in self._in_flight):
            self._finish_oldest()
        if state.has_open_gradients(update):
            return
        while self._in_flight and self._free < size:
            self._finish_oldest()
        state.open_gradients(update)
        self._sizes[state, update] = size
        self._free -= size

    def reduce(self, reduction: GradientReduction) -> None:
        """Add a reduction that was started; its part of the pool is freed when it ends."""
        self._in_flight.append(reduction)

    def finish(self) -> None:
        """Wait for the sums over shards of all reductions."""
        while self._in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        reduction = self._in_flight.popleft()
        reduction.go_on()
        self._free += self._sizes.pop((reduction.state, reduction.update))


SquaredNorm = Callable[[Tensor], Tensor]
"""Return the sum of squares of a flat tensor with at least one element, in the blocks of `gradient_norm`: a float64
scalar on its device, finite only if every element is."""


def squared_norms(
    states: Iterable[UnitState], update: int = 0, squared_norm: SquaredNorm = gradient_norm
) -> dict[str, Tensor]:
    """Return the squared gradient norm of each counted parameter that has elements on this rank: name -> float64
    scalar.

    If replicas shard the state, only the elements in this rank's shard count.

    update: number of the update whose gradients are used. squared_norm: of one parameter's owned elements.
    """
    squares = {}
    for state in states:
        gradient = state.reduced_gradient(update)
        for segment in state.table.counted():
            if state.held(segment):
                squares[segment.spec.name] = squared_norm(state.in_shard(gradient, segment))
    return squares


def uncounted_flaw(states: Iterable[UnitState], update: int = 0) -> dict[str, Tensor]:
    """Return zero if all gradients that another tensor rank counts are finite here too, otherwise NaN: a float64
    scalar, under the name of one of them. Empty if there are none.

    Each tensor rank computes the gradients of replicated parameters itself, so a fault on one rank would otherwise
    change only its copy.
    """
    gradients = {}
    for state in states:
        gradient = state.reduced_gradient(update)
        counted = {segment.spec.name for segment in state.table.counted()}
        for segment in state.table:
            if segment.spec.name not in counted and state.held(segment) and not segment.spec.balance_rate:
                gradients[segment.spec.name] = state.in_shard(gradient, segment)
    if not gradients:
        return {}
    norms = torch.stack(torch._foreach_norm(list(gradients.values())))
    return {next(iter(gradients)): norms.sum().double() * 0.0}


@dataclass(frozen=True)
class Communicators:
    """The groups that the engine uses on one rank.

    tied[g]: all replicas of the stages that use the weight of tied group g, the first replica's first.
    scalars: all ranks; another group than the world if sums are hidden.
    data: all replicas of this rank's weights, over data and context. If n replicas shard a state, the first n count in
    the gradient norm; the others hold the same sums.
    counts_loss: this rank's loss sums and token counts enter the global sums (tensor rank 0 of its stage).
    shards: by their number, the replicas that share one copy of a unit's state. copies: by the same number, the
    replicas with the same shard as this one, if there are several.
    tensor: tensor ranks, for gradients that are partial sums on each of them.
    """

    world: Group
    data: Group
    tied: Mapping[int, Group]
    scalars: Group
    tensor: Group
    counts_loss: bool = True
    shards: Mapping[int, Group] = field(default_factory=dict)
    copies: Mapping[int, Group] = field(default_factory=dict)

    def through(self, change: Callable[[Group], Group]) -> "Communicators":
        """Return the communicators with `change` applied to every group."""
        return replace(
            self,
            world=change(self.world),
            data=change(self.data),
            tied={group: change(members) for group, members in self.tied.items()},
            scalars=change(self.scalars),
            shards={size: change(members) for size, members in self.shards.items()},
            copies={size: change(members) for size, members in self.copies.items()},
            tensor=change(self.tensor),
        )


@dataclass(eq=False)
class Reductions:
    """Runs the collective actions of one rank, on the states and groups that they use.

    Args:
        counted_states: those whose norm this rank contributes; a tied weight counts on one of its ranks.
        parameter_names: of the whole model.
        clip: gradient norm -> coefficient.
        hidden: a thread waits for a step's sums while its actions continue, for schedules that go on with the next
            step; other collectives of this rank may then start before or after these, so they need a separate group.
        squared_norm: of one parameter's gradient.
        balanced_names: parameters whose gradient is the load of experts, not a gradient of the loss: it is reported,
            and does not enter the norm.
        loss_terms: number of terms of the last stage's loss, each a sum with its own count.
        pool_limit: maximum total size of the units whose whole gradients have memory at once if gradients are sharded;
            the schedule's header has the sizes.
        reduce_dtype: of gradients while they are reduced into shards; None: that of their accumulators.

    Raises:
        ValueError: sums are hidden and use the group of the world.
    """

    counted_states: Sequence[UnitState]
    parameter_names: InitVar[Sequence[str]]
    communicators: Communicators
    clip: Callable[[Tensor], Tensor]
    optimizer: FlatOptimizer
    device: torch.device
    _: KW_ONLY
    hidden: bool = False
    squared_norm: SquaredNorm = gradient_norm
    balanced_names: InitVar[Sequence[str]] = ()
    loss_terms: int = 1
    pool_limit: InitVar[int] = 0
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self, parameter_names: Sequence[str], balanced_names: Sequence[str], pool_limit: int) -> None:
        scalars = self.communicators.scalars
        if self.hidden and scalars is self.communicators.world and scalars.size > 1:
            raise ValueError("hidden sums need a separate group, such as mesh.second_world()")
        # The position of every parameter of the model in the vector of squared norms. Ranks sum such vectors over the
        # pipeline and tensor groups: entries of other ranks' parameters are zero, so adding them changes no bit.
        self._positions = {name: position for position, name in enumerate(sorted(set(parameter_names)))}
        balanced = np.array([self._positions[name] for name in balanced_names], np.int64)
        self._balanced = tensor_on(balanced, self.device)
        self._places: dict[tuple[int, ...], Tensor] = {}
        self._turns = Turns()
        self._one = torch.ones((), device=self.device)
        self.gradient_pool = GradientPool(pool_limit)

    def through(self, change: Callable[[Group], Group]) -> "Reductions":
        """Return the reductions with `change` applied to every group."""
        other = copy(self)
        other.communicators = self.communicators.through(change)
        return other

    def start_counts(self, step: StepState) -> None:
        """Start to sum the loss tokens of each update, and the flags, over all ranks."""
        flags = [float(step.input.stop), float(step.input.save), float(step.input.save_failed)]
        counts = [0.0] * step.updates * self.loss_terms + flags
        if self.communicators.counts_loss:
            for microbatch, numbers in enumerate(step.input.token_counts):
                first = step.update_of(microbatch) * self.loss_terms
                for term, count in enumerate([numbers] if isinstance(numbers, float | int) else numbers):
                    counts[first + term] += count
        step.counts = tensor_on(np.array(counts), self.device)
        step.counts_work = self.communicators.world.all_reduce(step.counts, async_op=True)

    def reduce_gradients(self, step: StepState, state: UnitState, update: int, *, last: bool = True) -> None:
        """Start the sum of a unit's gradient over the replicas of its weights. update: absolute number.

        last: no later action adds to this update's gradient. Partial gradients of tensor ranks are a few vectors; they
        are summed first, so that replicas reduce them like all others.
        """
        groups = self.communicators
        if state.table.num_elements == 0:
            return
        sum_partial_gradients(state, state.gradients_of(update)[0], groups.tensor)
        if state.sharding.count == 1:
            step.reductions.append(groups.data.all_reduce(state.gradients_of(update)[0], async_op=True))
            return
        if step.reductions and isinstance(step.reductions[-1], GradientReduction) and groups.copies:
            step.reductions[-1].go_on()
        shards, copies = groups.shards[state.sharding.count], groups.copies.get(state.sharding.count)
        reduction = GradientReduction(state, update, shards, copies if last else None, self.reduce_dtype)
        step.reductions.append(reduction)
        if state.sharding.gradients:
            self.gradient_pool.reduce(reduction)

    def gather_weights(self, state: UnitState, copy: int) -> None:
        """Start to gather a copy of a unit's weights from the ranks that shard it."""
        state.gather_weights(copy, self.communicators.shards[state.sharding.count])

    def reduce_tied(self, step: StepState, state: UnitState, group: int, update: int) -> None:
        """Start the sum of a tied weight's gradients over its uses and replicas, here and on other ranks.

        Do not wait for it: if ranks have several stages, another rank may first need work of this rank.
        """
        state.sum_uses(update)
        total = state.gradients_of(update)[0]
        sum_partial_gradients(state, total, self.communicators.tensor)
        step.reductions.append(self.communicators.tied[group].all_reduce(total, async_op=True))

    def reduce_scalars(self, step: StepState, update: int) -> None:
        """Start to compute the global loss, the canonical norm and the clip coefficient. update: the last of the
        step."""
        self.gradient_pool.finish()
        if not self.hidden:
            step.scalars = Future()
            step.scalars.set_result(self._shared(step, self._local_scalars(step, update)))
            return
        for work in step.reductions:
            if isinstance(work, GradientReduction):
                work.go_on()  # all ranks start its second sum in the order of their actions
        # The last of several updates follows immediately, and clears the gradients.
        at_once = self._local_scalars(step, update) if step.updates > 1 else None

        def find() -> Tensor:
            return self._local_scalars(step, update) if at_once is None else at_once

        step.scalars = self._turns.run_beside(find, lambda scalars: self._shared(step, scalars), self.device)

    def update(self, step: StepState, states: Sequence[UnitState], version: int, update: int) -> None:
        """Update `states` by the optimizer, or copy their weights if the gradients were not finite.

        Several updates of one step are neither clipped nor checked, because the step's scalars come after them.
        """
        coefficient, finite = self._awaited(step)
        if finite:
            self.optimizer.update(states, version, step.input.learning_rate, coefficient)
        else:
            for state in states:
                state.begin_update(version)
        for state in states:
            state.publish()
            state.zero_gradients(update)
            if state.sharding.count > 1 and not state.sharding.weights:
                self.gather_weights(state, version % len(state.weights))

    def rehearse(self, states: Sequence[UnitState]) -> None:
        """Allocate the buffers of the first update of `states`, and run its kernels if updates may run during
        messages."""
        self.optimizer.prepare(states)
        if self.hidden:
            self.optimizer.rehearse(states)

    def clear(self, step: StepState, states: Sequence[UnitState], update: int) -> None:
        """Wait for the sums that an update of `states` needs, and clear the gradients as an update does."""
        self._awaited(step)
        for state in states:
            state.zero_gradients(update)

    def _awaited(self, step: StepState) -> tuple[Tensor, bool]:
        """Return the factor of the gradients in the step's next update, and whether the update may change weights."""
        if step.updates > 1:
            self.gradient_pool.finish()
            self._await_gradients(step)
            return self._one, True
        if step.scalars is None:
            raise RuntimeError("the schedule updates before it reduces the step's scalars")
        scalars = step.scalars.result()
        return scalars.coefficient, scalars.finite

    def _await_gradients(self, step: StepState) -> None:
        for work in step.reductions:
            work.wait()
        step.reductions.clear()

    def _local_scalars(self, step: StepState, update: int) -> Tensor:
        """Return this rank's squared norms by parameter, and its sum of losses by term; float64."""
        self._await_gradients(step)
        values: list[Tensor] = []
        places: list[int] = []
        counted = [state for state in self.counted_states if self.communicators.data.rank < state.sharding.count]
        if counted:
            squares = squared_norms(counted, update, self.squared_norm) | uncounted_flaw(counted, update)
            values += squares.values()
            places += [self._positions[name] for name in squares]
        if self.communicators.counts_loss and step.loss_sums:
            values += torch.stack(step.loss_sums).double().sum(0).view(-1).unbind()
            places += range(len(self._positions), len(self._positions) + self.loss_terms)
        scalars = torch.zeros(len(self._positions) + self.loss_terms, dtype=torch.float64, device=self.device)
        # One operation for all, because its overhead exceeds the cost of adding numbers.
        if values:
            scalars.index_copy_(0, self._on_device(tuple(places)), torch.stack(values))
        return scalars

    def _on_device(self, places: tuple[int, ...]) -> Tensor:
        """Return positions in the vector of scalars as int64 on the device. They are copied once, for all steps."""
        if places not in self._places:
            self._places[places] = tensor_on(np.array(places), self.device)
        return self._places[places]

    def _shared(self, step: StepState, scalars: Tensor) -> Scalars:
        """Sum `scalars` over all ranks, and read them together with the counts, because each read waits for the
        device."""
        self.communicators.scalars.all_reduce(scalars)
        squares, losses = scalars[: -self.loss_terms], scalars[-self.loss_terms :]
        loads = squares.index_select(0, self._balanced)
        if len(self._balanced):
            squares.index_fill_(0, self._balanced, 0.0)
        scale = step.input.loss_scale
        norm = squares.sum().sqrt() / scale
        coefficient = (self.clip(norm) / scale).to(torch.float32)
        read = torch.cat([losses, norm.view(1), loads, step.global_counts()]).tolist()
        sums, gradient_norm, rest = read[: self.loss_terms], read[self.loss_terms], read[self.loss_terms + 1 :]
        counts = Counted.of(rest[len(loads) :], step.updates)
        means = tuple(loss / (count or 1.0) for loss, count in zip(sums, counts.by_term, strict=True))
        return Scalars(means, gradient_norm, coefficient, counts, tuple(rest[: len(loads)]))
