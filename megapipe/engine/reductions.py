"""Sums over ranks: gradients over replicas, tied weights over their uses, scalars over everyone; then the update."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megapipe.engine.background import Turns, run_now
from megapipe.engine.shared_state import GradientBuffers, GradientReduction
from megapipe.engine.step import Counted, Scalars, StepState
from megapipe.parallel.groups import Group
from megapipe.parallel.norms import SquaredNorm, name_positions, squared_norm, squared_norms, uncounted_flaw
from megapipe.parallel.partial_gradients import sum_partial_gradients
from megapipe.parallel.transfer import tensor_on
from megapipe.parallel.unit_state import UnitState


class Optimizer(Protocol):
    """Makes a weight version out of the newest one and the reduced gradients."""

    def update(self, states: Sequence[UnitState], version: int, learning_rate: float, coefficient: Tensor) -> None:
        """Advance `states` to absolute `version`, every gradient multiplied by `coefficient` (float32 scalar)."""

    def prepare(self, states: Sequence[UnitState]) -> None:
        """Allocate what the first update of `states` would allocate."""

    def rehearse(self, states: Sequence[UnitState]) -> None:
        """Run the kernels of an update of `states`, and leave them as they are."""


@dataclass(frozen=True)
class Communicators:
    """The groups of one rank that the engine needs.

    tied[g]: all replicas of the stages that hold a use of tied group g, the first replica's first.
    scalars: all ranks; other than the world where sums are hidden. By default the world.
    data: all replicas of this rank's weights, over data and context.
    counts_loss: this rank's loss sums and token counts enter the global sums (tensor rank 0 of its stage).
    counts_norm: this rank's squared gradient norms do (one replica of its weights; the others hold the same sums).
    counted_elsewhere: tied groups whose weight's norm another pipeline rank counts.
    shards: the replicas that share one copy of the units' state; None where each keeps it whole. copies: the replicas
    with the same shard as this one.
    tensor: ranks that share matrices, for gradients of which each has a part; needed where states have such.
    """

    world: Group
    data: Group
    tied: Mapping[int, Group]
    scalars: Group | None = None
    counts_loss: bool = True
    counts_norm: bool = True
    counted_elsewhere: frozenset[int] = frozenset()
    shards: Group | None = None
    copies: Group | None = None
    tensor: Group | None = None

    def through(self, change: Callable[[Group], Group]) -> "Communicators":
        """The same, each group replaced by what `change` makes of it."""
        return replace(
            self,
            world=change(self.world),
            data=change(self.data),
            tied={group: change(members) for group, members in self.tied.items()},
            scalars=None if self.scalars is None else change(self.scalars),
            shards=None if self.shards is None else change(self.shards),
            copies=None if self.copies is None else change(self.copies),
            tensor=None if self.tensor is None else change(self.tensor),
        )


class Reductions:
    """The collective actions of one rank and what they act on."""

    def __init__(
        self,
        counted_states: Sequence[UnitState],
        parameter_names: Sequence[str],
        communicators: Communicators,
        clip: Callable[[Tensor], Tensor],
        optimizer: Optimizer | None,
        device: torch.device,
        *,
        hidden: bool = False,
        squared_norm: SquaredNorm = squared_norm,
        balanced_names: Sequence[str] = (),
        loss_terms: int = 1,
        whole_gradients: int = 0,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        """Nothing is communicated yet.

        counted_states: those whose norm this rank contributes; a tied weight counts on one of its ranks.
        parameter_names: the whole model's. clip: gradient norm -> coefficient.
        hidden: a step's sums are awaited on a thread beside its actions, for schedules that go on with the next step
        meanwhile; other collectives of this rank may then start before or after, so they need a group of their own.
        squared_norm: of one parameter's gradient. balanced_names: of those parameters whose gradient is the load of
        experts and none of the loss's: it is told, and is no part of the norm.
        loss_terms: numbers that the last stage's loss consists of, each a sum with a count of its own.
        whole_gradients: how many units' whole gradients may have memory at once, where they are kept in shards.
        reduce_dtype: in which gradients travel where units' state is shared out; None: that of their accumulators.

        Raises ValueError where sums are to be hidden and share the world's group.
        """
        if hidden and communicators.scalars in (None, communicators.world) and communicators.world.size > 1:
            raise ValueError(
                "hidden sums need a group of their own in Communicators.scalars, such as mesh.second_world()"
            )
        self._counted_states = counted_states
        self._positions = name_positions(parameter_names)
        balanced = np.array([self._positions[name] for name in balanced_names], np.int64)
        self._balanced = tensor_on(balanced, device)
        self._places: dict[tuple[int, ...], Tensor] = {}
        self._communicators = communicators
        self._clip = clip
        self._optimizer = optimizer
        self.device = device
        self._hidden = hidden
        self._turns = Turns()
        self._squared_norm = squared_norm
        self._loss_terms = loss_terms
        self._all_ranks = communicators.world if communicators.scalars is None else communicators.scalars
        self._one = torch.ones((), device=device)
        self.gradient_buffers = GradientBuffers(whole_gradients)
        self._reduce_dtype = reduce_dtype

    def through(self, change: Callable[[Group], Group]) -> "Reductions":
        """The same reductions, each group replaced by what `change` makes of it."""
        other = copy(self)
        other._communicators = self._communicators.through(change)
        other._all_ranks = change(self._all_ranks)
        return other

    def start_counts(self, step: StepState) -> None:
        """Start to sum the loss tokens of each update, and the flags, over all ranks."""
        flags = [float(step.input.stop), float(step.input.save), float(step.input.save_failed)]
        counts = [0.0] * step.updates * self._loss_terms + flags
        if self._communicators.counts_loss:
            for microbatch, found in enumerate(step.input.token_counts):
                first = step.update_of(microbatch) * self._loss_terms
                for term, count in enumerate([found] if isinstance(found, float | int) else found):
                    counts[first + term] += count
        step.counts = tensor_on(np.array(counts), self.device)
        step.counts_work = self._communicators.world.all_reduce(step.counts, async_op=True)

    def reduce_gradients(self, step: StepState, state: UnitState, update: int, *, last: bool = True) -> None:
        """Start the sum of a unit's gradient over the replicas of its weights. update: absolute number.

        last: nothing is added to this update's gradient after it. What tensor ranks have parts of is a few vectors,
        and summed first: over replicas it then is as any other.
        """
        groups = self._communicators
        if state.table.num_elements == 0:
            return
        if groups.tensor is not None:
            sum_partial_gradients(state, state.gradients_of(update)[0], groups.tensor)
        if groups.shards is None:
            step.reductions.append(groups.data.all_reduce(state.gradients_of(update)[0], async_op=True))
            return
        if step.reductions and isinstance(step.reductions[-1], GradientReduction) and groups.copies is not None:
            step.reductions[-1].go_on()
        copies = groups.copies if last else None
        reduction = GradientReduction(state, update, groups.shards, copies, self._reduce_dtype)
        step.reductions.append(reduction)
        if state.sharding.gradients:
            self.gradient_buffers.reduce(reduction)

    def gather_weights(self, state: UnitState, copy: int) -> None:
        """Start to bring a copy of a unit's weights together from the ranks that share it out."""
        assert self._communicators.shards is not None
        state.gather_weights(copy, self._communicators.shards)

    def reduce_tied(self, step: StepState, state: UnitState, group: int, update: int) -> None:
        """Start the sum of a tied weight's gradients over its uses and replicas, here and on other ranks.

        Only started: with several stages a rank, others may have to finish work that waits for this rank first.
        """
        state.sum_uses(update)
        total = state.gradients_of(update)[0]
        step.reductions.append(self._communicators.tied[group].all_reduce(total, async_op=True))

    def reduce_scalars(self, step: StepState, update: int) -> None:
        """Start to find the global loss, the canonical norm and the clip coefficient. update: the step's last one."""
        self.gradient_buffers.finish()
        if not self._hidden:
            step.scalars = run_now(lambda: self._shared(step, self._local_scalars(step, update)))
            return
        for work in step.reductions:
            if isinstance(work, GradientReduction):
                work.go_on()  # what it starts, all ranks start in the order of their actions
        # Of several updates the last one comes right behind, and clears the gradients.
        at_once = self._local_scalars(step, update) if step.updates > 1 else None

        def find() -> Tensor:
            return self._local_scalars(step, update) if at_once is None else at_once

        step.scalars = self._turns.run_beside(find, lambda scalars: self._shared(step, scalars), self.device)

    def update(self, step: StepState, states: Sequence[UnitState], version: int, update: int) -> None:
        """Optimizer step of `states`, or a mere copy of their weights when the gradients were not finite.

        A step of several updates makes each on its own, unclipped and unchecked: its scalars come after them.
        """
        if self._optimizer is None:
            raise ValueError("this engine was built without an optimizer; give it one to run UPDATE actions")
        coefficient, finite = self._awaited(step)
        if finite:
            self._optimizer.update(states, version, step.input.learning_rate, coefficient)
        else:
            for state in states:
                state.begin_update(version)
        for state in states:
            state.publish()
            state.zero_gradients(update)
            if state.sharding.count > 1 and not state.sharding.weights:
                self.gather_weights(state, version % len(state.weights))

    def rehearse(self, states: Sequence[UnitState]) -> None:
        """Allocate what the first update of `states` would, and run the kernels of one where later updates may run
        beside messages."""
        if self._optimizer is not None:
            self._optimizer.prepare(states)
            if self._hidden:
                self._optimizer.rehearse(states)

    def clear(self, step: StepState, states: Sequence[UnitState], update: int) -> None:
        """Await the sums that an update of `states` needs, and clear their gradients, as the update does."""
        self._awaited(step)
        for state in states:
            state.zero_gradients(update)

    def _awaited(self, step: StepState) -> tuple[Tensor, bool]:
        """Return the coefficient of the gradients in the step's next update, and whether it may change weights."""
        if step.updates > 1:
            self.gradient_buffers.finish()
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
        """This rank's squared norms by parameter, and its sum of losses by term; float64."""
        self._await_gradients(step)
        found: list[Tensor] = []
        places: list[int] = []
        if self._communicators.counts_norm:
            for name, square in squared_norms(self._counted_states, update, self._squared_norm).items():
                found.append(square)
                places.append(self._positions[name])
            for name, flaw in uncounted_flaw(self._counted_states, update).items():
                found.append(flaw)
                places.append(self._positions[name])
        if self._communicators.counts_loss and step.loss_sums:
            found += torch.stack(step.loss_sums).double().sum(0).view(-1).unbind()
            places += range(len(self._positions), len(self._positions) + self._loss_terms)
        scalars = torch.zeros(len(self._positions) + self._loss_terms, dtype=torch.float64, device=self.device)
        if found:  # put in place together: each operation costs more than what it does to a number
            scalars.index_copy_(0, self._on_device(tuple(places)), torch.stack(found))
        return scalars

    def _on_device(self, places: tuple[int, ...]) -> Tensor:
        """Positions in the vector of scalars, int64 on the device; the same in every step, and copied there once."""
        if places not in self._places:
            self._places[places] = tensor_on(np.array(places), self.device)
        return self._places[places]

    def _shared(self, step: StepState, scalars: Tensor) -> Scalars:
        """Sum `scalars` over all ranks and read what the host needs of them, and of the counts, at once: each read
        waits for the device."""
        self._all_ranks.all_reduce(scalars)
        squares, losses = scalars[: -self._loss_terms], scalars[-self._loss_terms :]
        loads = squares.index_select(0, self._balanced)
        if len(self._balanced):
            squares.index_fill_(0, self._balanced, 0.0)
        scale = step.input.loss_scale
        norm = squares.sum().sqrt() / scale
        coefficient = (self._clip(norm) / scale).to(torch.float32)
        read = torch.cat([losses, norm.view(1), loads, step.global_counts()]).tolist()
        sums, found, rest = read[: self._loss_terms], read[self._loss_terms], read[self._loss_terms + 1 :]
        counts = Counted.of(rest[len(loads) :], step.updates)
        means = tuple(loss / (count or 1.0) for loss, count in zip(sums, counts.by_term, strict=True))
        return Scalars(means, found, coefficient, counts, tuple(rest[: len(loads)]))
