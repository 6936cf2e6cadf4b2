"""What a rank holds beside its lasting state, behind every action of a step: buffers that come and go, activations."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from megapipe.layout.traffic import MESSAGES_IN_FLIGHT
from megapipe.schedules.actions import COMPUTE_STREAM, Action, Kind
from megapipe.spec.dtypes import ELEMENT_BYTES, FULL_BYTES
from megapipe.spec.temporaries import Phase

if TYPE_CHECKING:
    from megapipe.layout.rank import RankPrediction

Place = tuple[int, int]
"""Stage and unit."""
PHASES: dict[Kind, Phase] = {
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input half",
    Kind.BACKWARD_WEIGHT: "weight half",
}


class Held(NamedTuple):
    """Bytes on the device beside what lives between steps.

    weights: whole ones of units that replicas share out or whose home is host memory. gradients: whole ones of units
    whose state is shared out. summands: what sums of such gradients need
    besides, over gloo other ranks' parts. reloaded: optimizer state that has come from host memory for an update.
    activations: of all micro-batches. sent: messages that may not have left. temporaries: peak bytes within the
    action beyond those after it (`spec.temporaries`).
    """

    weights: int = 0
    gradients: int = 0
    summands: int = 0
    reloaded: int = 0
    activations: int = 0
    sent: int = 0
    temporaries: int = 0

    @classmethod
    def largest(cls, samples: Iterable["Held"]) -> "Held":
        """Of each part the most in any of the samples."""
        return cls(*map(max, zip(cls(), *samples, strict=True)))


def timeline(rank: "RankPrediction") -> Iterator[Held]:
    """What the rank holds behind each action of a step, in order."""
    sizes = _Sizes(rank)
    weights, gradients, moved = _WholeWeights(sizes), _WholeGradients(rank, sizes), _Moved()
    states, activations = _ReloadedStates(rank, moved), _Activations(rank, sizes, moved)
    sent = _Sent(rank, sizes)
    concerned: defaultdict[Kind, list[Callable[[Action], None]]] = defaultdict(list)
    for part in (weights, gradients, states, activations, sent):
        for kind in part.KINDS:
            concerned[kind].append(part.run)
    held = Held()
    for action in rank.actions:
        parts = concerned[action.kind]
        for run in parts:
            run(action)
        if parts:
            held = Held(
                weights.held.total,
                gradients.open.total,
                gradients.summands,
                states.held.total,
                activations.held.total,
                sent.held.total,
                max(0, activations.within - activations.held.total) if action.kind in COMPUTE_STREAM else 0,
            )
        yield held


class _Sizes:
    """Bytes of a rank's units, each found once."""

    def __init__(self, rank: "RankPrediction") -> None:
        self._rank, self._units = rank, rank.costs.of_units
        self.stream = rank.costs.stream
        self.elements = cache(lambda place: self._units.elements(rank.units[place]))
        self.summands = cache(lambda place: self._units.summand_bytes(rank.units[place], rank.over_gloo))
        self.sharded = cache(lambda place: self._units.sharded(rank.units[place], 2))
        self.kept = cache(lambda place, predictions: self._without_slot(place, self._kept(place, predictions)))
        self.pending = cache(lambda place, predictions: self._without_slot(place, self._pending(place, predictions)))
        self.input = cache(lambda place: self._without_slot(place, self.stream))
        self.temporaries = cache(self._temporaries)

    def _kept(self, place: Place, predictions: int | None) -> int:
        return self._rank.costs.kept(self._rank.layers[place], predictions)

    def _pending(self, place: Place, predictions: int | None) -> int:
        return self._rank.costs.pending(self._rank.layers[place], predictions)

    def _temporaries(self, place: Place, kind: Kind, predictions: int | None) -> int:
        return self._rank.costs.temporaries(self._rank.layers[place], PHASES[kind], predictions)

    def _without_slot(self, place: Place, held: int) -> int:
        """A message that has come from another rank stays where it was received, which is no activation."""
        stage, unit = place
        arrives = unit == 0 and stage - 1 not in (-1, *self._rank.own_stages)
        return held - min(self.stream, held) if arrives else held

    def weights(self, place: Place) -> int:
        """Of a unit's whole weights."""
        return self.elements(place) * ELEMENT_BYTES[self._rank.costs.precision]

    def gradients(self, place: Place) -> int:
        """Of a unit's whole gradients."""
        return self.elements(place) * FULL_BYTES


class _Tally:
    """Bytes by what they are of, and all of them together."""

    def __init__(self) -> None:
        self.total = 0
        self._held: dict[tuple[object, ...], int] = {}

    def put(self, key: tuple[object, ...], size: int) -> None:
        """Hold so many, whatever was held of it."""
        self.total += size - self._held.get(key, 0)
        self._held[key] = size

    def drop(self, key: tuple[object, ...]) -> None:
        """Hold nothing of it any more."""
        self.total -= self._held.pop(key, 0)

    def __contains__(self, key: tuple[object, ...]) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)


class _WholeWeights:
    """Weights that were gathered, or brought in from host memory, from the start of that to their release."""

    KINDS = (Kind.GATHER_WEIGHTS, Kind.RELEASE_WEIGHTS)

    def __init__(self, sizes: _Sizes) -> None:
        self._sizes = sizes
        self.held = _Tally()

    def run(self, action: Action) -> None:
        place = action.stage, action.unit
        if action.kind == Kind.GATHER_WEIGHTS:
            self.held.put(place, self._sizes.weights(place))
        else:
            self.held.drop(place)


class _WholeGradients:
    """Gradients of units whose state is shared out: accumulators that are open, and sums of them under way.

    Sharded accumulators are open from the first backward that adds to them until a buffer is wanted by the next one,
    the oldest whose sum has begun going first, or until the step's norms are. Then their sum is over; others' sums are
    when the norms are wanted, or the update where that comes first.
    """

    KINDS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT, Kind.REDUCE_GRADIENTS, Kind.REDUCE_SCALARS, Kind.UPDATE)

    def __init__(self, rank: "RankPrediction", sizes: _Sizes) -> None:
        self._rank, self._sizes = rank, sizes
        units = rank.costs.of_units
        self._over_copies = units.shards not in (1, rank.costs.replicas)
        self.open = _Tally()
        self._summing: deque[tuple[Place, int]] = deque()
        self.summands = 0

    def run(self, action: Action) -> None:
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            for unit in self._rank.units_of(action):
                self._add_to((action.stage, unit))
        elif action.kind == Kind.REDUCE_GRADIENTS:
            place = action.stage, action.unit
            if self._over_copies and self._summing:
                self._end_newest()
            if self._sizes.elements(place):  # not where all weights are tied
                self._summing.append((place, self._sizes.summands(place)))
                self.summands += self._sizes.summands(place)
        else:
            while self._summing:
                self._close_oldest()

    def _add_to(self, place: Place) -> None:
        if not self._sizes.sharded(place) or not self._sizes.elements(place):
            return
        while any(each == place for each, _ in self._summing):
            self._close_oldest()
        if place in self.open:
            return
        while self._summing and len(self.open) >= self._rank.costs.config.zero.gradient_buffers:
            self._close_oldest()
        self.open.put(place, self._sizes.gradients(place))

    def _end_newest(self) -> None:
        """Further copies of the shards are summed next: the sum is over, its buffer's memory free, its turn not."""
        place, size = self._summing[-1]
        self._summing[-1] = place, 0
        self.summands -= size
        if place in self.open:
            self.open.put(place, 0)

    def _close_oldest(self) -> None:
        place, size = self._summing.popleft()
        self.summands -= size
        self.open.drop(place)


class _Moved:
    """What is on its way to host memory: one thing at a time, freed when the next one leaves or it comes back."""

    def __init__(self) -> None:
        self._leaving: tuple[_Tally, tuple[int, ...]] | None = None

    def leave(self, held: _Tally, key: tuple[int, ...]) -> None:
        self.settle()
        self._leaving = held, key

    def settle(self) -> None:
        if self._leaving is not None:
            held, key = self._leaving
            held.put(key, 0)
        self._leaving = None

    def is_leaving(self, key: tuple[int, ...]) -> bool:
        return self._leaving is not None and self._leaving[1] == key


class _ReloadedStates:
    """State with a home in host memory that an update works on, from its reload until it has left again."""

    KINDS = (Kind.OFFLOAD, Kind.RELOAD)

    def __init__(self, rank: "RankPrediction", moved: _Moved) -> None:
        self._rank = rank
        self._moved = moved
        self.held = _Tally()

    def run(self, action: Action) -> None:
        if action.version < 0:
            return
        place = action.stage, action.unit
        if action.kind == Kind.OFFLOAD:
            self._moved.leave(self.held, place)
            return
        self._moved.settle()
        self.held.put(place, self._rank.in_host_of(place))


class _Sent:
    """Messages to other ranks over NCCL: the last few of each boundary are kept. gloo copies messages."""

    KINDS = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)

    def __init__(self, rank: "RankPrediction", sizes: _Sizes) -> None:
        self.held = _Tally()
        self._stream = 0 if rank.over_gloo else sizes.stream
        self._numbers: Counter[tuple[Kind, int]] = Counter()

    def run(self, action: Action) -> None:
        boundary = action.kind, action.stage
        self.held.put((*boundary, self._numbers[boundary] % MESSAGES_IN_FLIGHT), self._stream)
        self._numbers[boundary] += 1


class _Activations:
    """What forwards leave for backwards, halves of backwards for the other halves, and each unit for the next one."""

    KINDS = (*COMPUTE_STREAM, Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT, Kind.OFFLOAD, Kind.RELOAD)

    def __init__(self, rank: "RankPrediction", sizes: _Sizes, moved: _Moved) -> None:
        self._rank, self._sizes = rank, sizes
        self._moved = moved
        self.held = _Tally()
        self.within = 0
        self._last = len(rank.schedule.header.stages) - 1
        self._first_of_run = {
            (stage, unit): unit == span.start
            for stage, spans in enumerate(rank.recomputed)
            for span in spans
            for unit in span
        }

    def run(self, action: Action) -> None:
        """Run one action; for a backward, `within` becomes its peak bytes, including temporaries."""
        if action.kind in PHASES:
            self._run_backward(action)
        self._pass_on(action)
        if action.kind in COMPUTE_STREAM and action.kind not in PHASES:
            self.within = 0
            for unit in self._rank.units_of(action):
                self.held.put((action.stage, unit, action.microbatch), self._behind(action, (action.stage, unit)))
        elif action.kind in (Kind.OFFLOAD, Kind.RELOAD) and action.version < 0:
            key = action.stage, action.unit, action.microbatch
            if action.kind == Kind.OFFLOAD:
                self._moved.leave(self.held, key)
                return
            if self._moved.is_leaving(key):
                self._moved.settle()
            self.held.put(key, self._sizes.kept((action.stage, action.unit), self._predictions(action.microbatch)))

    def _run_backward(self, action: Action) -> None:
        """Run a backward from the last unit to the first; each leaves its input's gradient to the previous one."""
        self.within = 0
        for unit in reversed(self._rank.units_of(action)):
            place = action.stage, unit
            needed = self._sizes.temporaries(place, action.kind, self._predictions(action.microbatch))
            self.within = max(self.within, self.held.total + needed)
            self.held.put((*place, action.microbatch), self._behind(action, place))
            if action.kind != Kind.BACKWARD_WEIGHT:
                self.held.put(("backward", action.microbatch), self._sizes.stream)

    def _pass_on(self, action: Action) -> None:
        """Note what the next action of a micro-batch takes up, or the message that takes it away."""
        kind, stage, stream = action.kind, action.stage, self._sizes.stream
        if kind == Kind.FORWARD:
            ends = stage == self._last and self._rank.units_of(action).stop == self._units_of_last
            self.held.put(("forward", action.microbatch), 0 if ends else stream)
        elif kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            ends = stage == 0 and self._rank.units_of(action).start == 0
            self.held.put(("backward", action.microbatch), 0 if ends else stream)
        elif kind == Kind.SEND_ACTIVATION:
            self.held.put(("forward", action.microbatch), 0)
        elif kind == Kind.SEND_GRADIENT:
            self.held.put(("backward", action.microbatch), 0)

    @property
    def _units_of_last(self) -> int:
        return self._rank.schedule.header.units_per_stage[-1]

    def _behind(self, action: Action, place: Place) -> int:
        kind, sizes = action.kind, self._sizes
        if kind == Kind.FORWARD and place in self._first_of_run:
            return sizes.input(place) if self._first_of_run[place] else 0
        if kind in (Kind.FORWARD, Kind.RECOMPUTE):
            return sizes.kept(place, self._predictions(action.microbatch))
        if kind == Kind.BACKWARD_INPUT:
            return sizes.pending(place, self._predictions(action.microbatch))
        return 0

    def _predictions(self, microbatch: int) -> int | None:
        given = self._rank.predictions
        return None if given is None else given[microbatch % len(given)]
