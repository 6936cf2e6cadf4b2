"""One walk through the actions of a step: which tensors each action puts in place of which others.

What an action does to memory depends on the order alone, so `Walk` finds it once, as numbers of tensors; `Sizes` says
how many bytes each of them has. Predictions walk the lowered actions of a rank layer by layer. A search gives each
order to many layouts: it walks whole stages, each as one unit, whose sizes come from the walk of one micro-batch
through the layers of the stage (`layout.order_walk`).
"""

from collections import Counter, deque
from collections.abc import Sequence
from enum import IntEnum
from functools import cached_property
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megapipe.layout.costs import MESSAGES_IN_FLIGHT
from megapipe.schedules.actions import (
    ADDING,
    BACKWARDS,
    COMPUTE_STREAM,
    KIND,
    MICROBATCH,
    STAGE,
    UNIT,
    VERSION,
    Ints,
    Kind,
    Mask,
    Rows,
    kind_mask,
    repeats,
)
from megapipe.schedules.schedule import Header

Bytes = npt.NDArray[np.float64]
"""Whole numbers of bytes, far below 2^53: sums are exact in any order."""
Size = TypeVar("Size")


class Tensor(IntEnum):
    """Tensors of the layers of a place that have sizes.

    KEPT: activations of a micro-batch from forward to backward. PENDING: the part of them that remains between the
    halves of a split backward. INPUT: the input of layers that are recomputed together, the only tensor kept of them.
    BACKWARD, INPUT_HALF, WEIGHT_HALF: peak bytes within such an action beyond those before it. WEIGHTS, GRADIENTS:
    whole ones, where they are sharded or in host memory. SUMMANDS: memory of a sum of gradients until it ends. STATE:
    optimizer state that an update reads from host memory. HANDED: tensors that later slices of a sample read, which a
    recomputed layer keeps from its forward to its recomputation. HANDED_GRADIENTS: gradients of these tensors, from
    the last slice's backward to the slice's own. ALONE: activations of a layer that may return its input unchanged,
    after nothing else holds that input.
    """

    KEPT = 0
    PENDING = 1
    INPUT = 2
    BACKWARD = 3
    INPUT_HALF = 4
    WEIGHT_HALF = 5
    WEIGHTS = 6
    GRADIENTS = 7
    SUMMANDS = 8
    STATE = 9
    HANDED = 10
    HANDED_GRADIENTS = 11
    ALONE = 12


NOTHING, SENT, STREAM = 0, 1, 2
"""Places in the flat list of sizes that belong to no layer; streams of further variants of a micro-batch follow."""
_DIRECTIONS = 3
"""A rank passes on a micro-batch's stream forward, backward, and forward through units that are recomputed."""
NEEDED: Final = {
    Kind.BACKWARD: Tensor.BACKWARD,
    Kind.BACKWARD_INPUT: Tensor.INPUT_HALF,
    Kind.BACKWARD_WEIGHT: Tensor.WEIGHT_HALF,
}
_IDLE = (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT, Kind.REDUCE_TIED, Kind.REDUCE_COUNTS, Kind.SNAPSHOT)
ACTING: Final = tuple(kind for kind in Kind if kind not in _IDLE)
"""Kinds that change what is held."""


class Sizes:
    """Bytes of all tensors of a walk.

    of: by tensor, place (`Walk.place`) and variant of a micro-batch, shape [len(Tensor), places, variants]. flat: all
    sizes in one list.

    Args:
        num_places, num_variants: of the walk.
        stream: bytes of the residual stream of a micro-batch, which one stage leaves to the next one; by variant.
        sent: bytes of a message that is kept until it has left; 0 where messages are copied.
    """

    def __init__(self, num_places: int, num_variants: int, stream: int | Sequence[int], sent: int) -> None:
        layers = STREAM + num_variants
        self.flat: Bytes = np.zeros(layers + len(Tensor) * num_places * num_variants)
        self.flat[SENT], self.flat[STREAM:layers] = sent, stream
        self.of: Bytes = self.flat[layers:].reshape(len(Tensor), num_places, num_variants)


class Held(NamedTuple, Generic[Size]):
    """Bytes on the device after each action without the persistent state, or the peak of each part.

    weights: whole weights of units that replicas shard or whose home is host memory. gradients: whole gradients of
    units whose state is sharded. summands: further memory of sums of such gradients, over gloo the parts of other
    ranks. reloaded: optimizer state that has come from host memory for an update. activations: of all micro-batches.
    sent: messages that may not have left. temporaries: peak bytes within the action beyond those after it
    (`spec.peaks`).
    """

    weights: Size
    gradients: Size
    summands: Size
    reloaded: Size
    activations: Size
    sent: Size
    temporaries: Size


class GradientBuffers(NamedTuple):
    """How gradients are summed if replicas shard the state.

    sharded: places whose gradients are whole only in the pool of the schedule, shape [places]. filled: places that
    have parameters of their own. over_copies: further copies of the shards are summed after each sum.
    """

    sharded: Mask
    filled: Mask
    over_copies: bool


class _Changes(NamedTuple):
    """Changes of what is held, sorted by tensor, not by step. at: steps. new, old: the size that comes, and the size
    that goes."""

    at: Ints
    new: Ints
    old: Ints


class Walk:
    """The actions of one or several ranks.

    Args:
        header: of the schedule.
        rows: actions of each rank. Whole chunks are cut into their units here.
        recomputed: per stage, the spans of units that are recomputed together.
        variant_of: the variant of each micro-batch in turn.
        gradients: how gradients are summed; None where that holds no memory.
    """

    def __init__(
        self,
        header: Header,
        rows: Sequence[Rows],
        recomputed: Sequence[Sequence[range]] = (),
        variant_of: Sequence[int] = (0,),
        gradients: GradientBuffers | None = None,
    ) -> None:
        self.header, self._width = header, header.most_states + len(header.tied_groups)
        self.num_places, self.num_variants = len(header.stages) * self._width, max(variant_of) + 1
        self._variant_of = np.array(variant_of)
        rows = [each[kind_mask(each[:, KIND], *ACTING)] for each in rows]
        self._cut(np.concatenate(rows), np.array([len(each) for each in rows]))
        self._symbols = STREAM + self.num_variants + np.arange(len(Tensor)) * self.num_places * self.num_variants
        self._recomputed, self._buffers = recomputed, gradients

    def _cut(self, rows: Rows, lengths: Ints) -> None:
        """Cut rows into steps: one for each unit that a row computes with, and one for any other row."""
        kind, stage, unit = rows[:, KIND], rows[:, STAGE], rows[:, UNIT]
        whole = kind_mask(kind, *COMPUTE_STREAM) & (unit < 0)
        copies = np.where(whole, np.array(self.header.units_per_stage)[stage], 1)
        first, (source, index) = np.cumsum(copies) - copies, repeats(copies)
        ascending = kind_mask(kind, Kind.FORWARD, Kind.RECOMPUTE)[source]
        unit = np.where(whole[source], np.where(ascending, index, copies[source] - 1 - index), unit[source])
        self._first, self._last = first, first + copies - 1
        self._first_rows = np.cumsum(lengths) - lengths
        self._rank = np.repeat(np.arange(len(lengths)), lengths)[source]
        self._kind, self._stage, self._unit = kind[source], stage[source].astype(np.int64), unit.astype(np.int64)
        self._microbatch, self._version = rows[source, MICROBATCH].astype(np.int64), rows[source, VERSION]
        self._place = self._stage * self._width + self._unit
        self._variant = self._variant_of[self._microbatch % len(self._variant_of)]

    def place(self, stage: int, unit: int) -> int:
        """Return the place of a unit of a stage in `Sizes`."""
        return stage * self._width + unit

    @cached_property
    def calls(self) -> Counter[tuple[Kind, int, int]]:
        """Number of times that each kind of action comes for each unit of a stage."""
        own = (self._stage >= 0) & (self._unit >= 0)
        number = self._kind[own].astype(np.int64) * self.num_places + self._place[own]
        counts = zip(*(each.tolist() for each in np.unique(number, return_counts=True)), strict=True)
        return Counter(
            {(Kind(each // self.num_places), *divmod(each % self.num_places, self._width)): n for each, n in counts}
        )

    def held(self, sizes: Sizes) -> Held[Bytes]:
        """Return what ranks hold after each action, rank by rank."""
        parts = self._weights, *self._sums, self._reloaded, self._activations, self._sent
        totals = [self._total(each, sizes.flat) for each in parts]
        temporaries = self._temporaries(totals[4], sizes.flat)
        return Held(*[*(each[self._last] for each in totals), temporaries])

    def held_of_units(self, sizes: Sizes) -> tuple[Bytes, Bytes, Bytes]:
        """Return `Held.weights`, `Held.gradients` and `Held.summands`."""
        weights, gradients, summands = (
            self._total(each, sizes.flat)[self._last] for each in (self._weights, *self._sums)
        )
        return weights, gradients, summands

    def temporaries(self, sizes: Sizes) -> Bytes:
        """Return `Held.temporaries`."""
        return self._temporaries(self._total(self._activations, sizes.flat), sizes.flat)

    def by_rank(self, values: Bytes) -> Bytes:
        """Return the largest of one value for each action, for each rank."""
        largest: Bytes = np.maximum.reduceat(values, self._first_rows)
        return largest

    def _total(self, changes: _Changes, sizes: Bytes) -> Bytes:
        """Return the bytes after each step."""
        if not len(changes.at):
            return np.zeros(len(self._kind))
        gained = sizes[changes.new] - sizes[changes.old]
        total: Bytes = np.cumsum(np.bincount(changes.at, gained, len(self._kind)))
        starts = self._first[self._first_rows]
        carried = np.where(starts > 0, total[starts - 1], 0.0)
        return total - carried[self._rank] if carried.any() else total

    def _temporaries(self, activations: Bytes, sizes: Bytes) -> Bytes:
        """Return `Held.temporaries`. The backward of a unit starts with the activations left before it."""
        before = np.append(0.0, activations[:-1])
        before[self._first[self._first_rows]] = 0.0
        within = np.where(self._needed != NOTHING, before + sizes[self._needed], 0.0)
        peak = np.maximum.reduceat(within, self._first)
        temporaries: Bytes = np.maximum(0.0, peak - activations[self._last])
        return temporaries

    @cached_property
    def _needed(self) -> Ints:
        """By step, the size by which the peak within it exceeds what is held before it."""
        needed = np.full(len(self._kind), NOTHING)
        for kind, tensor in NEEDED.items():
            rows = self._rows(kind)
            needed[rows] = self._symbol(tensor, rows)
        return needed

    def _rows(self, *kinds: Kind) -> Ints:
        return np.flatnonzero(kind_mask(self._kind, *kinds))

    def _symbol(self, tensor: Tensor, rows: Ints) -> Ints:
        """Return where the flat list has the sizes of one tensor of the places of some steps."""
        symbols: Ints = self._symbols[tensor] + self._place[rows] * self.num_variants
        of_microbatch = tensor < Tensor.WEIGHTS or tensor > Tensor.STATE
        return symbols + self._variant[rows] if of_microbatch else symbols

    def _changes(self, puts: Sequence[tuple[Ints, Ints, Ints]]) -> _Changes:
        """Return what changes where tensors by number (second) take a new size (third) at steps (first)."""
        at, number, new = (np.concatenate(each) for each in zip(*puts, strict=True))
        order = np.lexsort((at, number))
        at, number, new = at[order], number[order], new[order]
        old = np.zeros_like(new)
        again = np.flatnonzero(number[1:] == number[:-1]) + 1
        old[again] = new[again - 1]
        changed = new != old
        return _Changes(at[changed], new[changed], old[changed])

    def _listed(self, puts: Sequence[tuple[int, int, int]]) -> tuple[Ints, Ints, Ints]:
        at, number, new = np.array(puts, dtype=np.int64).reshape(-1, 3).T
        return at, number, new

    @cached_property
    def _weights(self) -> _Changes:
        """Return the weights that are gathered or copied from host memory, from the start of that to their release."""
        rows = self._rows(Kind.GATHER_WEIGHTS, Kind.RELEASE_WEIGHTS)
        gathers = self._kind[rows] == Kind.GATHER_WEIGHTS
        new = np.where(gathers, self._symbol(Tensor.WEIGHTS, rows), NOTHING)
        return self._changes([(rows, self._place[rows], new)])

    @cached_property
    def _sent(self) -> _Changes:
        """Return messages to other ranks over NCCL: the last few of each boundary are kept. gloo copies messages."""
        rows = self._rows(Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
        boundary = self._kind[rows].astype(np.int64) * len(self.header.stages) + self._stage[rows]
        order = np.argsort(boundary, kind="stable")
        rows, boundary = rows[order], boundary[order]
        number = np.arange(len(rows)) - np.searchsorted(boundary, boundary)
        message = boundary * MESSAGES_IN_FLIGHT + number % MESSAGES_IN_FLIGHT
        return self._changes([(rows, message, np.full(len(rows), SENT))])

    @cached_property
    def _reloaded(self) -> _Changes:
        """Return the optimizer state that has come from host memory for an update."""
        return self._changes([self._moved[0]])

    @cached_property
    def _sums(self) -> tuple[_Changes, _Changes]:
        """Return whole gradients of units whose state is sharded, and the memory of their sums."""
        puts = ([], []) if self._buffers is None else self._of_gradients(self._buffers)
        gradients, summands = (self._changes([self._listed(each)]) for each in puts)
        return gradients, summands

    @cached_property
    def _activations(self) -> _Changes:
        """Return the tensors that forwards leave for backwards, input halves for weight halves, and each unit for the
        next one."""
        rows = self._rows(*COMPUTE_STREAM)
        kind, count = self._kind[rows], self._num_microbatches
        kept, pending = (self._symbol(each, rows) for each in (Tensor.KEPT, Tensor.PENDING))
        new = np.where(kind == Kind.BACKWARD_INPUT, pending, NOTHING)
        new = np.where(kind_mask(kind, Kind.FORWARD, Kind.RECOMPUTE), kept, new)
        inside, opens, _ = self._spans
        again = (kind == Kind.FORWARD) & inside[self._place[rows]]
        new[again] = np.where(opens[self._place[rows[again]]], self._symbol(Tensor.INPUT, rows[again]), NOTHING)
        own, moved = (rows, self._place[rows] * count + self._microbatch[rows], new), self._moved[1]
        return self._changes([own, moved, self._outlived(moved), *self._passed_on(), *self._handed_on(inside)])

    def _outlived(self, moved: tuple[Ints, Ints, Ints]) -> tuple[Ints, Ints, Ints]:
        """Return where the first stage's first unit becomes the only one that holds its input, the sum of words: the
        message to the next stage has left, or the next unit's activations have gone, by its backward or to host
        memory. The weight half of a split backward still has its input."""
        if not self.header.vocabulary:
            return self._listed([])
        count, first = self._num_microbatches, self.header.routes[0][0]
        one = self.header.units_per_stage[first] == 1
        rows = self._rows(Kind.SEND_ACTIVATION if one else Kind.BACKWARD)
        rows = rows[(self._stage[rows] == first) & (one | (self._unit[rows] == 1))]
        left = (moved[1] // count == self.place(first, 1)) & (moved[2] == NOTHING)
        at = np.concatenate([rows, moved[0][left]])
        microbatch = np.concatenate([self._microbatch[rows], moved[1][left] % count])
        variant = self._variant_of[microbatch % len(self._variant_of)]
        alone = self._symbols[Tensor.ALONE] + self.place(first, 0) * self.num_variants + variant
        return at, self.place(first, 0) * count + microbatch, alone

    def _passed_on(self) -> list[tuple[Ints, Ints, Ints]]:
        """Return the input of the next action of a micro-batch, until a message takes it away, numbered after all
        places. No action takes the output that the last unit of a span recomputes."""
        last, puts = self.header.num_routed - 1, self._sent_to_all()
        units = self.header.units_per_stage[last]
        to_outputs, to_inputs = (np.isin(self._stage, each) for each in (self.header.outputs, self.header.inputs))
        shared = bool(self.header.vocabulary)
        at_first = self.header.stage_ranks[self._stage] == self.header.stage_ranks[0]
        away = (self._is_sent & ~(to_inputs & at_first)) | (to_inputs & ~at_first)
        for direction, kinds, send, end in (
            (0, (Kind.FORWARD,), Kind.SEND_ACTIVATION, (last, units - 1)),
            (1, BACKWARDS, Kind.SEND_GRADIENT, (0, 0)),
        ):
            rows = self._rows(*kinds, send)
            rows = rows[~away[rows]]
            ends = (self._stage[rows] == end[0]) & (self._unit[rows] == end[1])
            # The rank's shards take what the last stage returns, and the gradient of the first stage.
            if shared:
                ends = (to_inputs if direction else to_outputs)[rows]
            gone = (self._kind[rows] == send) | ends
            puts.append(self._passed(rows, direction, gone))
        rows = self._rows(Kind.RECOMPUTE)
        _, _, closes = self._spans
        return [*puts, self._passed(rows, 2, closes[self._place[rows]])]

    def _passed(self, rows: Ints, direction: int, gone: Mask) -> tuple[Ints, Ints, Ints]:
        """Return where a micro-batch's stream in one of the `_DIRECTIONS` comes and goes."""
        owner = self.num_places + _DIRECTIONS * self._rank[rows] + direction
        number = owner * self._num_microbatches + self._microbatch[rows]
        return rows, number, np.where(gone, NOTHING, STREAM + self._variant[rows])

    @cached_property
    def _is_sent(self) -> Mask:
        """Steps that make a tensor for a stage of another rank, by a sum or a broadcast over all ranks: backwards of
        shards of the output layer, or their input halves, and forwards of shards of the embedding. On the rank of the
        first stage, these are backwards instead of forwards: they pass on the gradient that the stage makes."""
        header = self.header
        if not header.vocabulary:
            return np.zeros(len(self._kind), dtype=np.bool_)
        ranks = header.stage_ranks[self._stage]
        first, last = (header.stage_ranks[header.routes[0][end]] for end in (0, -1))
        backward = kind_mask(self._kind, *BACKWARDS)
        is_sent: Mask = np.isin(self._stage, header.outputs) & backward & (ranks != last)
        is_sent |= np.isin(self._stage, header.inputs) & np.where(ranks == first, backward, self._kind == Kind.FORWARD)
        return is_sent

    def _sent_to_all(self) -> list[tuple[Ints, Ints, Ints]]:
        """Return the tensors that `_is_sent` steps make. Each is held until the shard's next pass, or for the output
        layer until the next such tensor; at most until the end of the step."""
        header, puts, first = self.header, [], -1
        for shards in (header.outputs, header.inputs) if header.vocabulary else ():
            passes = kind_mask(self._kind, Kind.FORWARD, Kind.BACKWARD) if shards == header.inputs else self._is_sent
            own = np.isin(self._stage, shards) & passes
            rows = np.union1d(np.flatnonzero(own), self._rows(Kind.REDUCE_SCALARS))
            held = own & self._is_sent
            puts.append((rows, first - self._rank[rows], np.where(held[rows], STREAM + self._variant[rows], NOTHING)))
            first -= header.num_ranks
        return puts

    def _handed_on(self, recomputed: Mask) -> list[tuple[Ints, Ints, Ints]]:
        """Return the tensors of recomputed layers that later slices of a sample read, and the gradients of such
        tensors of all layers, numbered after all that is passed on. The last slice's backward makes the gradients of
        all earlier slices."""
        slices, count = self.header.slices, self._num_microbatches
        if slices == 1:
            return []
        passed = _DIRECTIONS * (1 + int(self._rank.max()))
        number = (self.num_places + passed + self._place) * count + self._microbatch
        last = self._microbatch % slices == slices - 1
        rows = self._rows(Kind.FORWARD, Kind.RECOMPUTE)
        rows = rows[recomputed[self._place[rows]] & ~last[rows]]
        forward = self._kind[rows] == Kind.FORWARD
        puts = [(rows, number[rows], np.where(forward, self._symbol(Tensor.HANDED, rows), NOTHING))]
        shift = self.num_places * count
        rows = self._rows(Kind.BACKWARD)
        own, ends = rows[~last[rows]], rows[last[rows]]
        puts.append((own, number[own] + shift, np.full(len(own), NOTHING)))
        for earlier in range(1, slices):
            variant = self._variant_of[(self._microbatch[ends] - earlier) % len(self._variant_of)]
            size = self._symbols[Tensor.HANDED_GRADIENTS] + self._place[ends] * self.num_variants + variant
            puts.append((ends, number[ends] - earlier + shift, size))
        return puts

    @cached_property
    def _num_microbatches(self) -> int:
        return int(self._microbatch.max(initial=0)) + 1

    @cached_property
    def _spans(self) -> tuple[Mask, Mask, Mask]:
        """Which places are recomputed, and which of them are the first and the last of their span."""
        inside, opens, closes = np.zeros((3, self.num_places), dtype=np.bool_)
        for stage, spans in enumerate(self._recomputed):
            for span in spans:
                inside[self.place(stage, span.start) : self.place(stage, span.stop)] = True
                opens[self.place(stage, span.start)] = True
                closes[self.place(stage, span.stop - 1)] = True
        return inside, opens, closes

    @cached_property
    def _moved(self) -> tuple[tuple[Ints, Ints, Ints], tuple[Ints, Ints, Ints]]:
        """Return optimizer state and activations that move to host memory. One tensor at a time is on its way there,
        and is freed when the next one leaves, or when it comes back itself."""
        states: list[tuple[int, int, int]] = []
        activations: list[tuple[int, int, int]] = []
        leaving: tuple[bool, int] | None = None
        rows = self._rows(Kind.OFFLOAD, Kind.RELOAD)
        kept, state = (self._symbol(tensor, rows).tolist() for tensor in (Tensor.KEPT, Tensor.STATE))
        for row, kept_size, state_size in zip(rows.tolist(), kept, state, strict=True):
            of_state, place = bool(self._version[row] >= 0), int(self._place[row])
            number = place if of_state else place * self._num_microbatches + int(self._microbatch[row])
            comes = self._kind[row] == Kind.RELOAD
            if leaving is not None and (not comes or of_state or leaving == (False, number)):
                (states if leaving[0] else activations).append((row, leaving[1], NOTHING))
                leaving = None
            if comes:
                (states if of_state else activations).append((row, number, state_size if of_state else kept_size))
            else:
                leaving = of_state, number
        return self._listed(states), self._listed(activations)

    def _of_gradients(
        self, gradients: GradientBuffers
    ) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """Return gradients of units whose state is sharded, and the memory of their sums.

        A sharded accumulator is open from the first backward that adds to it. It is closed when another one needs its
        buffer, the oldest whose sum has started first, or when the step's norms are computed; its sum is over then.
        Other sums are over when the norms are computed, or at the update if that comes first.
        """
        rows = self._rows(Kind.REDUCE_GRADIENTS, Kind.REDUCE_SCALARS, Kind.UPDATE)
        if gradients.sharded.any():
            rows = np.union1d(rows, self._rows(*ADDING))
        columns = (self._kind.astype(np.int64), self._stage, self._unit)
        buffers = _Buffers(self.header, gradients)
        first, width, header = self._symbols, self._width, self.header
        whole = gradients.sharded & gradients.filled
        added = [
            [
                [place for state in header.states_of(stage, unit) if whole[place := stage * width + state]]
                for unit in range(units)
            ]
            for stage, units in enumerate(header.units_per_stage)
        ]
        for row, kind, stage, unit in zip(rows.tolist(), *(column[rows].tolist() for column in columns), strict=True):
            if kind == Kind.REDUCE_GRADIENTS:
                place = stage * width + unit
                buffers.start_sum(row, place, int(first[Tensor.SUMMANDS]) + place * self.num_variants)
            elif kind in (Kind.REDUCE_SCALARS, Kind.UPDATE):
                buffers.close_all(row)
            else:
                for place in added[stage][unit]:
                    buffers.add_to(row, place, int(first[Tensor.GRADIENTS]) + place * self.num_variants)
        return buffers.opened, buffers.summed


class _Buffers:
    """Whole gradients of one rank after another; each ends with an update, after which it holds none.

    opened, summed: sizes of gradients and of summands, as `Walk._changes` takes them.
    """

    def __init__(self, header: Header, gradients: GradientBuffers) -> None:
        self._gradients = gradients
        sizes = np.pad(header.state_sizes, ((0, 0), (0, len(header.tied_groups))))
        self._sizes: list[int] = sizes.ravel().tolist()
        self._pool = self._free = header.states.gradient_pool
        self.opened: list[tuple[int, int, int]] = []
        self.summed: list[tuple[int, int, int]] = []
        self._open: set[int] = set()
        self._summing: deque[int] = deque()  # places, the oldest sum first
        self._number = 0  # of the newest sum

    def add_to(self, row: int, place: int, size: int) -> None:
        """Add to a sharded gradient, which takes a buffer."""
        while place in self._summing:
            self._close_oldest(row)
        if place in self._open:
            return
        while self._summing and self._free < self._sizes[place]:
            self._close_oldest(row)
        self._free -= self._sizes[place]
        self._open.add(place)
        self.opened.append((row, place, size))

    def start_sum(self, row: int, place: int, size: int) -> None:
        """Start the sum of a gradient. If shards are also summed over copies, the sum before it has ended by then."""
        if self._gradients.over_copies and self._summing:
            newest = self._summing[-1]
            self.summed.append((row, self._number, NOTHING))
            if newest in self._open:
                self.opened.append((row, newest, NOTHING))
        if self._gradients.filled[place]:  # not where all weights are tied
            self._number += 1
            self._summing.append(place)
            self.summed.append((row, self._number, size))

    def close_all(self, row: int) -> None:
        """End all sums."""
        while self._summing:
            self._close_oldest(row)

    def _close_oldest(self, row: int) -> None:
        self.summed.append((row, self._number - len(self._summing) + 1, NOTHING))
        place = self._summing.popleft()
        if place in self._open:
            self._open.remove(place)
            self._free += self._sizes[place]
            self.opened.append((row, place, NOTHING))
