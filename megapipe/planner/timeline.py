"""What a rank holds beside its lasting state, behind every action of a step: buffers that come and go, activations."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from megapipe.costs.memory import ELEMENT_BYTES, FULL_BYTES
from megapipe.schedules.actions import COMPUTE_STREAM, Action, Kind

if TYPE_CHECKING:
    from megapipe.planner.rank import RankPrediction

Place = tuple[int, int]
"""Stage and unit."""


class Held(NamedTuple):
    """Bytes on the device beside what lives between steps.

    weights: whole ones of units that replicas share out or whose home is host memory. gradients: whole ones of units
    whose state is shared out. summands: what sums of such gradients need
    besides, over gloo other ranks' parts. reloaded: optimizer state that has come from host memory for an update.
    activations: of all micro-batches; messages on their way are not counted.
    """

    weights: int = 0
    gradients: int = 0
    summands: int = 0
    reloaded: int = 0
    activations: int = 0

    @classmethod
    def largest(cls, samples: Iterable["Held"]) -> "Held":
        """Of each part the most in any of the samples."""
        return cls(*map(max, zip(cls(), *samples, strict=True)))


def timeline(rank: "RankPrediction") -> Iterator[Held]:
    """What the rank holds behind each action of a step, in order."""
    weights, gradients, moved = _WholeWeights(rank), _WholeGradients(rank), _Moved()
    states, activations = _ReloadedStates(rank, moved), _Activations(rank, moved)
    for action in rank.actions:
        for part in (weights, gradients, states, activations):
            part.run(action)
        yield Held(weights.bytes, gradients.bytes, gradients.summands, states.bytes, activations.bytes)


class _WholeWeights:
    """Weights that were gathered, or brought in from host memory, from the start of that to their release."""

    def __init__(self, rank: "RankPrediction") -> None:
        self._rank = rank
        self._held: dict[Place, int] = {}

    def run(self, action: Action) -> None:
        place = action.stage, action.unit
        if action.kind == Kind.GATHER_WEIGHTS:
            costs = self._rank.costs
            self._held[place] = costs.of_units.elements(self._rank.units[place]) * ELEMENT_BYTES[costs.precision]
        elif action.kind == Kind.RELEASE_WEIGHTS:
            self._held.pop(place, None)

    @property
    def bytes(self) -> int:
        return sum(self._held.values())


class _WholeGradients:
    """Gradients of units whose state is shared out: accumulators that are open, and sums of them under way.

    Sharded accumulators are open from the first backward that adds to them until a buffer is wanted by the next one,
    the oldest whose sum has begun going first, or until the step's norms are. Then their sum is over; others' sums are
    when the norms are wanted, or the update where that comes first.
    """

    def __init__(self, rank: "RankPrediction") -> None:
        self._rank = rank
        self._open: dict[Place, int] = {}
        self._summing: deque[tuple[Place, int]] = deque()

    def run(self, action: Action) -> None:
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            for unit in self._rank.units_of(action):
                self._add_to((action.stage, unit))
        elif action.kind == Kind.REDUCE_GRADIENTS:
            costs, place = self._rank.costs, (action.stage, action.unit)
            if costs.of_units.shards not in (1, costs.replicas) and self._summing:
                self._end_newest()
            state = self._rank.units[place]
            if costs.of_units.elements(state):  # not where all weights are tied
                self._summing.append((place, costs.of_units.summand_bytes(state, self._rank.over_gloo)))
        elif action.kind in (Kind.REDUCE_SCALARS, Kind.UPDATE):
            while self._summing:
                self._close_oldest()

    def _add_to(self, place: Place) -> None:
        costs, unit = self._rank.costs, self._rank.units[place]
        if not costs.of_units.sharded(unit, 2) or not costs.of_units.elements(unit):
            return
        while any(each == place for each, _ in self._summing):
            self._close_oldest()
        if place in self._open:
            return
        while self._summing and len(self._open) >= costs.config.zero.gradient_buffers:
            self._close_oldest()
        self._open[place] = costs.of_units.elements(unit) * FULL_BYTES

    def _end_newest(self) -> None:
        """Further copies of the shards are summed next: the sum is over, its buffer's memory free, its turn not."""
        place, _ = self._summing[-1]
        self._summing[-1] = place, 0
        if place in self._open:
            self._open[place] = 0

    def _close_oldest(self) -> None:
        place, _ = self._summing.popleft()
        self._open.pop(place, None)

    @property
    def bytes(self) -> int:
        return sum(self._open.values())

    @property
    def summands(self) -> int:
        return sum(size for _, size in self._summing)


class _Moved:
    """What is on its way to host memory: one thing at a time, freed when the next one leaves or it comes back."""

    def __init__(self) -> None:
        self._leaving: tuple[dict[tuple[int, ...], int], tuple[int, ...]] | None = None

    def leave(self, held: dict[tuple[int, ...], int], key: tuple[int, ...]) -> None:
        self.settle()
        self._leaving = held, key

    def settle(self) -> None:
        if self._leaving is not None:
            held, key = self._leaving
            held[key] = 0
        self._leaving = None

    def is_leaving(self, key: tuple[int, ...]) -> bool:
        return self._leaving is not None and self._leaving[1] == key


class _ReloadedStates:
    """State with a home in host memory that an update works on, from its reload until it has left again."""

    def __init__(self, rank: "RankPrediction", moved: _Moved) -> None:
        self._rank = rank
        self._moved = moved
        self._held: dict[tuple[int, ...], int] = {}

    def run(self, action: Action) -> None:
        if action.version < 0 or action.kind not in (Kind.OFFLOAD, Kind.RELOAD):
            return
        place = action.stage, action.unit
        if action.kind == Kind.OFFLOAD:
            self._moved.leave(self._held, place)
            return
        self._moved.settle()
        self._held[place] = self._rank.in_host_of(place)

    @property
    def bytes(self) -> int:
        return sum(self._held.values())


class _Activations:
    """What forwards leave for backwards, halves of backwards for the other halves, and each unit for the next one."""

    def __init__(self, rank: "RankPrediction", moved: _Moved) -> None:
        self._rank = rank
        self._moved = moved
        self._held: dict[tuple[int, ...], int] = {}
        self._in_hand: dict[tuple[bool, int], int] = {}
        self._first_of_run = {
            (stage, unit): unit == span.start
            for stage, spans in enumerate(rank.recomputed)
            for span in spans
            for unit in span
        }

    def run(self, action: Action) -> None:
        self._pass_on(action)
        if action.kind in COMPUTE_STREAM:
            for unit in self._rank.units_of(action):
                self._held[action.stage, unit, action.microbatch] = self._behind(action, (action.stage, unit))
        elif action.kind in (Kind.OFFLOAD, Kind.RELOAD) and action.version < 0:
            key = action.stage, action.unit, action.microbatch
            if action.kind == Kind.OFFLOAD:
                self._moved.leave(self._held, key)
                return
            if self._moved.is_leaving(key):
                self._moved.settle()
            self._held[key] = self._kept((action.stage, action.unit), action.microbatch)

    def _pass_on(self, action: Action) -> None:
        """Note what the next action of a micro-batch takes up, or the message that takes it away."""
        header, stream = self._rank.schedule.header, self._rank.costs.stream
        units, stage = self._rank.units_of(action), action.stage
        if action.kind in (Kind.FORWARD, Kind.SEND_ACTIVATION):
            ends = units.stop == header.units_per_stage[stage] and stage == len(header.stages) - 1
            self._in_hand[True, action.microbatch] = 0 if ends or action.kind == Kind.SEND_ACTIVATION else stream
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.SEND_GRADIENT):
            ends = units.start == 0 and stage == 0
            self._in_hand[False, action.microbatch] = 0 if ends or action.kind == Kind.SEND_GRADIENT else stream

    def _behind(self, action: Action, place: Place) -> int:
        if action.kind == Kind.FORWARD and place in self._first_of_run:
            return self._without_slot(place, self._rank.costs.stream if self._first_of_run[place] else 0)
        if action.kind in (Kind.FORWARD, Kind.RECOMPUTE):
            return self._kept(place, action.microbatch)
        if action.kind == Kind.BACKWARD_INPUT:
            rank = self._rank
            found = rank.costs.pending(rank.layers[place], self._predictions(action.microbatch))
            return self._without_slot(place, found)
        return 0

    def _kept(self, place: Place, microbatch: int) -> int:
        rank = self._rank
        return self._without_slot(place, rank.costs.kept(rank.layers[place], self._predictions(microbatch)))

    def _predictions(self, microbatch: int) -> int | None:
        given = self._rank.predictions
        return None if given is None else given[microbatch % len(given)]

    def _without_slot(self, place: Place, held: int) -> int:
        """A message that has come from another rank stays where it was received, which is no activation."""
        stage, unit = place
        arrives = unit == 0 and stage - 1 not in (-1, *self._rank.own_stages)
        return held - min(self._rank.costs.stream, held) if arrives else held

    @property
    def bytes(self) -> int:
        return sum(self._held.values()) + sum(self._in_hand.values())
