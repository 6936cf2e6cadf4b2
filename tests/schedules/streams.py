"""An oracle for operations on GPU streams: simulates streams, hardware queues and NCCL's matching, one by one.

It reads the actions of a schedule and knows none of the validator's rules. Every operation is launched by its rank's
host in program order, into the queue of its stream. A queue starts its operations in that order; a stream runs one
after another. A message, or a collective, ends when all of its ends have started.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from megapipe.schedules import Action, Kind, Schedule

SENDS = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
RECEIVES = (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT)
COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE, Kind.UPDATE)
QueueOf = Callable[[int, Hashable], Hashable]


class Mismatch(Exception):
    """Two ends of a message or collective disagree on what it is."""


class Hang(Exception):
    """No operation can start any more."""


@dataclass(eq=False)
class Operation:
    """waits: operations that end before this one starts. meeting: all ends that start before this one ends."""

    waits: list["Operation"] = field(default_factory=list)
    meeting: "Meeting | None" = None
    started: bool = False

    @property
    def ended(self) -> bool:
        return self.started and (self.meeting is None or self.meeting.ended)


@dataclass(eq=False)
class Meeting:
    """A message or collective: what each end says that it is."""

    size: int
    ends: list[tuple[Hashable, Operation]] = field(default_factory=list)

    def join(self, identity: Hashable, operation: Operation) -> None:
        self.ends.append((identity, operation))
        operation.meeting = self
        if len({identity for identity, _ in self.ends}) > 1:
            raise Mismatch(f"{self.ends[0][0]} meets {identity}")

    @property
    def ended(self) -> bool:
        return len(self.ends) == self.size and all(operation.started for _, operation in self.ends)


class Device:
    """One rank: its host, streams and queues."""

    def __init__(self, world: "World", rank: int, program: deque[Action]) -> None:
        self.world, self.rank, self.program = world, rank, program
        self.last: dict[Hashable, Operation] = {}
        self.queues: dict[Hashable, deque[Operation]] = defaultdict(deque)
        self.arrivals: dict[tuple[bool, int, int], Operation] = {}
        self.reductions: list[Operation] = []
        self.counts: dict[int, Operation] = {}
        self.scalars: dict[int, Operation] = {}
        self.met: dict[Hashable, int] = defaultdict(int)
        self.host_waits: Operation | None = None

    def step(self) -> bool:
        """Let every queue start what it can, then launch one more operation; whether anything happened."""
        moved = False
        for queue in self.queues.values():
            while queue and all(operation.ended for operation in queue[0].waits):
                queue.popleft().started = True
                moved = True
        if self.host_waits is not None and not self.host_waits.ended:
            return moved
        self.host_waits = None
        if any(len(queue) >= self.world.depth for queue in self.queues.values()):
            return moved
        if self.program:
            self.launch(self.program.popleft())
            moved = True
        return moved

    def put(self, stream: Hashable, waits: list[Operation]) -> Operation:
        operation = Operation([*waits, *([self.last[stream]] if stream in self.last else [])])
        self.last[stream] = operation
        self.queues[self.world.queue_of(self.rank, stream)].append(operation)
        return operation

    def launch(self, action: Action) -> None:
        schedule, kind = self.world.schedule, action.kind
        step = action.microbatch // schedule.header.num_microbatches
        if kind in COMPUTES:
            waits = []
            if action.slot >= 0:
                waits.append(self.arrivals[kind == Kind.FORWARD, action.stage, action.microbatch])
            starts = kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
            if starts and schedule.next_stage(action.stage, action.microbatch) is None:
                waits.append(self.counts[step])
            if kind == Kind.UPDATE and schedule.header.updates_per_step == 1 and not schedule.flushes:
                self.host_waits = self.scalars[step]
            self.put("compute", waits)
        elif kind in SENDS + RECEIVES:
            self.message(action)
        elif kind == Kind.REDUCE_COUNTS:
            self.counts[step] = self.collective("world", (kind, step), self.after_compute())
        elif kind == Kind.REDUCE_TIED:
            group = schedule.header.tied_group(action.stage, action.unit)
            ranks = frozenset(schedule.rank_of(stage) for stage in schedule.header.tied_groups[group])
            self.reductions.append(self.collective(ranks, (group, action.microbatch), self.after_compute()))
        elif kind == Kind.REDUCE_GRADIENTS:
            stages = schedule.header.stages
            part = stages[action.stage].part
            ranks = frozenset(place.rank for place in stages if place.part == part)
            if len(ranks) > 1:
                identity = ("part", part, action.unit, action.microbatch)
                self.reductions.append(self.collective(ranks, identity, self.after_compute()))
        elif kind == Kind.REDUCE_SCALARS:
            waits = [*self.reductions, *self.after_compute()]
            group = "world" if schedule.flushes else "second world"
            self.scalars[step] = self.collective(group, (kind, step), waits)
            if schedule.flushes:
                self.host_waits = self.scalars[step]

    def after_compute(self) -> list[Operation]:
        return [self.last["compute"]] if "compute" in self.last else []

    def message(self, action: Action) -> None:
        schedule, kind = self.world.schedule, action.kind
        forward, sends = kind in (Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION), kind in SENDS
        neighbour = schedule.next_stage if forward == sends else schedule.previous_stage
        other = neighbour(action.stage, action.microbatch)
        assert other is not None
        peer = schedule.rank_of(other)
        pair = (self.rank, peer) if sends else (peer, self.rank)
        operation = self.put(self.world.stream(("link", pair)), self.after_compute())
        receiving = other if sends else action.stage
        meeting = self.world.meeting((sends, pair), self.met, ("link", pair), 2)
        meeting.join((forward, receiving, action.microbatch), operation)
        if not sends:
            self.arrivals[forward, action.stage, action.microbatch] = operation

    def collective(self, group: Hashable, identity: Hashable, waits: list[Operation]) -> Operation:
        size = len(group) if isinstance(group, frozenset) else self.world.schedule.header.num_ranks
        operation = self.put(self.world.stream(("group", group)), waits)
        self.world.meeting(("group", group), self.met, ("group", group), size).join(identity, operation)
        return operation


class World:
    """All devices, and the messages and collectives between them."""

    def __init__(self, schedule: Schedule, steps: int, queue_of: QueueOf, serial: bool, depth: float) -> None:
        self.schedule, self.queue_of, self.serial, self.depth = schedule, queue_of, serial, depth
        self.meetings: dict[tuple[Hashable, int], Meeting] = {}
        self.devices = [
            Device(self, rank, deque(Action(Kind(row[0]), *row[1:]) for row in rows.tolist()))
            for rank, rows in enumerate(schedule.expand(steps))
        ]

    def stream(self, communicator: Hashable) -> Hashable:
        return "communication" if self.serial else communicator

    def meeting(self, end: Hashable, met: dict[Hashable, int], name: Hashable, size: int) -> Meeting:
        """The meeting that this end's next operation on a communicator belongs to: matched by number alone."""
        number = met[end]
        met[end] += 1
        return self.meetings.setdefault((name, number), Meeting(size))


def run(
    schedule: Schedule,
    steps: int,
    queue_of: QueueOf = lambda rank, stream: stream,
    *,
    serial: bool = False,
    depth: float = math.inf,
) -> None:
    """Simulate some steps. Raises Mismatch or Hang.

    queue_of: the hardware queue of a rank's stream; by default each has its own. serial: the communication operations
    of a device run one after another. depth: operations that wait in a queue while the host goes on.
    """
    world = World(schedule, steps, queue_of, serial, depth)
    moved = True
    while moved:
        moved = sum(device.step() for device in world.devices) > 0
    if any(device.program or any(device.queues.values()) for device in world.devices):
        raise Hang
    if not all(meeting.ended for meeting in world.meetings.values()):
        raise Hang
