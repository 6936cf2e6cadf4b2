"""Adding sends and receives: every hand-over between ranks, receives posted early enough that nothing can hang."""

from dataclasses import dataclass

import numpy as np

from megapipe.schedules.actions import Ints, Kind, rows_of
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.lowering.insertion import Insertion, Place, insert
from megapipe.schedules.progress import Progress
from megapipe.schedules.table import Table


@dataclass(frozen=True)
class Messages:
    """One entry a message, ordered by link (pair of ranks), then as sent.

    ``producer`` and ``consumer`` are the compute rows at both ends, ``link`` numbers the pair of ranks.
    """

    gradient: Ints
    microbatch: Ints
    producer: Ints
    consumer: Ints
    link: Ints

    @classmethod
    def of(cls, table: Table) -> "Messages":
        """The messages that a program of compute rows needs: forwards to the next stage, gradients to the previous."""
        following = _neighbours(table, table.header.following_stages)
        preceding = _neighbours(table, table.header.preceding_stages)
        opens, closes = table.opens_chunk(), table.closes_chunk()
        forward = table.is_kind(Kind.FORWARD)
        backward = table.is_kind(Kind.BACKWARD, Kind.BACKWARD_INPUT)
        parts = [
            _match(table, np.flatnonzero(forward & closes & (following >= 0)),
                   np.flatnonzero(forward & opens & (preceding >= 0)), following),
            _match(table, np.flatnonzero(backward & closes & (preceding >= 0)),
                   np.flatnonzero(backward & opens & (following >= 0)), preceding),
        ]  # fmt: skip
        producer = np.concatenate([producers for producers, _ in parts])
        consumer = np.concatenate([consumers for _, consumers in parts])
        gradient = np.repeat(np.arange(2), [len(producers) for producers, _ in parts])
        link = table.rank[producer] * table.header.num_ranks + table.rank[consumer]
        order = np.lexsort((producer, link))
        microbatch = table.microbatch[producer].astype(np.int64)
        return cls(gradient[order], microbatch[order], producer[order], consumer[order], link[order])

    def receives(self, table: Table, post: Ints) -> Insertion:
        """Receives, each ahead of the compute row ``post`` on the consumer's rank."""
        kind = np.where(self.gradient == 1, int(Kind.RECV_GRADIENT), int(Kind.RECV_ACTIVATION))
        rows = rows_of(kind, table.stage[self.consumer], self.microbatch)
        return Insertion(rows, post, Place.RECEIVE, table.section[self.consumer])

    def sends(self, table: Table) -> Insertion:
        """Sends, each right behind the compute row that makes the message."""
        kind = np.where(self.gradient == 1, int(Kind.SEND_GRADIENT), int(Kind.SEND_ACTIVATION))
        rows = rows_of(kind, table.stage[self.producer], self.microbatch)
        return Insertion(rows, self.producer, Place.SEND, table.section[self.producer])


def _neighbours(table: Table, neighbours: Ints) -> Ints:
    """The stage next to each row's stage on the micro-batch's route, -1 where there is none or it is on this rank."""
    neighbour: Ints = neighbours[table.microbatch % len(neighbours), table.stage]
    local = table.header.stage_ranks[neighbour] == table.rank
    return np.where(local, -1, neighbour)


def _match(table: Table, producers: Ints, consumers: Ints, target: Ints) -> tuple[Ints, Ints]:
    """Pair the rows that give a message with the rows that take it, by receiving stage and micro-batch."""
    num_microbatches = table.num_microbatches
    given = target[producers] * num_microbatches + table.microbatch[producers]
    taken = table.key[consumers]
    given_order, taken_order = np.argsort(given, kind="stable"), np.argsort(taken, kind="stable")
    for rows, keys in ((producers, given), (consumers, taken)):
        _, first = np.unique(keys, return_index=True)
        repeated = np.delete(rows, first)
        if len(repeated):
            raise _misfit(table, int(repeated.min()), "it appears a second time")
    for rows, keys, others, problem in (
        (producers, given, taken, "no stage takes its output"),
        (consumers, taken, given, "no stage gives its input"),
    ):
        alone = rows[~np.isin(keys, others)]
        if len(alone):
            raise _misfit(table, int(alone.min()), problem)
    return producers[given_order], consumers[taken_order]


def _misfit(table: Table, row: int, problem: str) -> ScheduleError:
    kind, stage, microbatch = Kind(int(table.kind[row])), table.stage[row], table.microbatch[row]
    return ScheduleError(
        f"{table.header.name} cannot be lowered: {table.place_of(row)}, {kind.name} stage {stage}, micro-batch "
        f"{microbatch}: {problem}; every micro-batch must pass every stage of its route exactly once, forward and "
        "backward"
    )


def place_receives(table: Table, messages: Messages, receive_ahead: int) -> Ints:
    """The compute row ahead of which each message's receive is posted.

    ``receive_ahead`` compute rows before its use, within its section, and on each link in the order of the sends.
    Where sends that wait for their receive would hang, all are posted one row earlier (that is enough where ranks send
    in a ring, as interleaved chunks do), and then those that still hang where the receiving rank stands.
    """
    section_key = table.rank * table.num_sections + table.section
    section_start = np.searchsorted(section_key, section_key[messages.consumer])
    first = np.maximum(section_start, _slot_free(table, messages))
    for ahead in (receive_ahead, receive_ahead + 1):
        post = _in_send_order(messages, np.maximum(messages.consumer - ahead, first), len(table.rows))
        progress = _progress(table, messages, post)
        stuck = progress.stuck()
        if len(stuck) == 0:
            break
    post = _early_enough(table, messages, post, progress, stuck)
    if np.any(post < section_start):
        index = int(np.argmax(post < section_start))
        raise ScheduleError(
            f"{table.header.name} cannot be lowered: stage {table.stage[messages.consumer[index]]} would have to post "
            f"the receive of micro-batch {messages.microbatch[index]} before its section starts"
        )
    return post


def _slot_free(table: Table, messages: Messages) -> Ints:
    """The compute row from which a message may have its slot: behind the backward of the same micro-batch of the step
    before, since slots are the same every step."""
    period = table.header.num_microbatches
    done = table.last_by_key(Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    free: Ints = np.where(messages.microbatch < period, 0, done[table.key[messages.consumer] - period] + 1)
    return free


def _in_send_order(messages: Messages, post: Ints, num_rows: int) -> Ints:
    """Post no receive after one that the same link delivers later: a running minimum from each link's end."""
    lift = messages.link * (num_rows + 1)  # keeps the minimum of one link below every earlier seen link's
    ordered: Ints = np.minimum.accumulate((post + lift)[::-1])[::-1] - lift
    return ordered


def _progress(table: Table, messages: Messages, post: Ints) -> Progress:
    """The ranks' progress with receives posted there: waits are those of all sends, then those of all uses."""
    lowered, index = insert(table, [messages.sends(table), messages.receives(table, post)])
    num_compute, num_messages = len(table.rows), len(messages.producer)
    send = index[num_compute : num_compute + num_messages]
    receive = index[num_compute + num_messages :]
    use = index[messages.consumer]
    return Progress(np.concatenate([send, use]), np.concatenate([receive, send]), lowered.offsets)


def _early_enough(table: Table, messages: Messages, post: Ints, progress: Progress, stuck: Ints) -> Ints:
    """Move receives to where their rank stands when all ranks hang, one hang after another, until none hangs.

    What a link delivered before is posted by then, so its receives stay in the order of the sends.
    """
    compute_row = np.concatenate([messages.producer, messages.consumer])
    post = post.copy()
    while len(stuck) > 0:
        at = compute_row[stuck]
        frontier = np.full(table.header.num_ranks, -1, dtype=np.int64)
        frontier[table.rank[at]] = at
        blocked = stuck[stuck < len(post)]
        if len(blocked) == 0:
            raise ScheduleError(
                f"{table.header.name} deadlocks: its compute actions wait for one another in a circle: "
                + "; ".join(
                    f"{table.place_of(row)} at {Kind(int(table.kind[row])).name} stage {table.stage[row]}, "
                    f"micro-batch {table.microbatch[row]}"
                    for row in at.tolist()
                )
            )
        post[blocked] = frontier[table.rank[messages.consumer[blocked]]]
        progress.release(blocked)
        stuck = progress.stuck()
    return post
