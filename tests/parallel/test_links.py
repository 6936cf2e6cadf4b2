"""Every kind of link carries what was sent, in order; a peer that fails is named, and no shared memory remains."""

import ctypes
import itertools
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch

from megapipe.config.parallel import MeshShape
from megapipe.parallel.groups import CommunicationError
from megapipe.parallel.launch import connected_mesh
from megapipe.parallel.links import Edge, LinkEnd, Loan
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.pipeline_links import DistributedLink, LinkKind, make_links
from megapipe.parallel.shared_ring import SEMAPHORE_BYTES, Semaphore
from tests.support.meshes import Backend, run_mesh, run_threads
from tests.support.patience import wait_until
from tests.support.ranks import run_ranks

KINDS: list[LinkKind] = ["gloo", "shared_memory", "in_process"]
DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool]


def backend_of(kind: LinkKind) -> Backend:
    return "threads" if kind == "in_process" else "processes"


SHAPES = [shape for axes in range(5) for shape in itertools.product(range(4), repeat=axes)]


def message(number: int, dtype: torch.dtype, shape: tuple[int, ...] = (3, 5)) -> torch.Tensor:
    """Random elements, which are not contiguous if there are two axes."""
    generator = torch.Generator().manual_seed(number)
    values = torch.randint(0, 2, shape, generator=generator).mul(number + 1).to(dtype)
    return values.mT.contiguous().mT if len(shape) > 1 else values


def exchange(mesh: Mesh, kind: LinkKind) -> None:
    """Both ranks send every shape to each other, ten messages at a time of one type; all arrive, in order."""
    edges = [Edge(source, 1 - source, 8 * 3**4, slots=4) for source in (0, 1)]
    links = make_links(mesh, edges, kind, timeout=30)
    me = mesh.coordinate("pipeline")
    outgoing, incoming = links[edges[me]], links[edges[1 - me]]
    for batch in range(0, len(SHAPES), 10):
        dtype, receive_first = DTYPES[batch // 10 % len(DTYPES)], batch % 20 == 0
        numbered = list(enumerate(SHAPES))[batch : batch + 10]
        sent, expected = ([message(2 * n + rank, dtype, shape) for n, shape in numbered] for rank in (me, 1 - me))
        received = [torch.zeros(shape, dtype=dtype) for _, shape in numbered]
        receives = [incoming.receive(each) for each in received] if receive_first else []
        # Without posted receives a sender may have sent one unread message per slot.
        for part in (slice(4), slice(4, 8), slice(8, 10)):
            sends = [outgoing.send(each) for each in sent[part]]
            if not receive_first:
                receives = [incoming.receive(each) for each in received[part]]
                for transfer in reversed(receives):
                    transfer.wait()
            for transfer in sends:
                transfer.wait()
        for transfer in receives:
            transfer.wait()
        assert all(map(torch.equal, received, expected))
    # A rank that closes first must not take away what its peer has yet to read.
    for link in links.values():
        link.close()


@pytest.mark.parametrize("kind", KINDS)
def test_messages_of_every_shape_arrive_in_order(kind: LinkKind) -> None:
    run_mesh({"pipeline": 2}, exchange, kind, backend=backend_of(kind))


def pass_along(mesh: Mesh, kind: LinkKind, count: int, slots: int) -> list[float]:
    """A ring: each rank adds its number to what it gets and passes it on; everything is in flight at once."""
    size, me = mesh.size("pipeline"), mesh.coordinate("pipeline")
    edges = [Edge(rank, (rank + 1) % size, 4, slots) for rank in range(size)]
    links = make_links(mesh, edges, kind, timeout=30)
    following, previous = links[edges[me]], links[edges[me - 1]]
    sends = []
    buffers = torch.zeros(count, 1)
    receives = [previous.receive(buffer) for buffer in buffers]
    for number in range(count):
        if me > 0:
            receives[number].wait()
        payload = buffers[number] + 10.0**me if me > 0 else torch.full((1,), 1.0 + number * 10.0**size)
        sends.append(following.send(payload))
    if me == 0:
        sends += receives
    for transfer in sends:
        transfer.wait()
    return buffers.flatten().tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_ring_with_more_messages_than_slots_does_not_block(kind: LinkKind) -> None:
    results = run_mesh({"pipeline": 3, "data": 2}, pass_along, kind, 50, 1, backend=backend_of(kind))
    assert results[0] == results[3] == [111.0 + number * 1000.0 for number in range(50)]


def cross_wait(mesh: Mesh, kind: LinkKind, num_loans: int) -> list[float]:
    """Rank 1 has posted receives on one link but waits for another, which rank 2 feeds once the first is full.

    Loans take the first link's other slots meanwhile.
    """
    many, one, notice = Edge(0, 1, 4, slots=1, loans=num_loans), Edge(2, 1, 4, slots=1), Edge(0, 2, 4)
    links = make_links(mesh, [many, one, notice], kind, timeout=20)
    if mesh.rank == 2:
        links[notice].receive(torch.zeros(1)).wait()
        links[one].send(torch.full((1,), 9.0)).wait()
        return []
    if mesh.rank == 0:
        sends = [links[many].send(torch.full((1,), float(number))) for number in range(5)]
        sends.append(links[notice].send(torch.ones(1)))
        for transfer in sends:
            transfer.wait()
        return []
    loans = [links[many].borrow(torch.zeros(1)) for _ in range(num_loans)]
    values = [loan.take().item() for loan in loans]
    *buffers, last = torch.zeros(6 - num_loans, 1)
    receives = [links[many].receive(buffer) for buffer in buffers]
    links[one].receive(last).wait()
    assert last.item() == 9.0
    for transfer in receives:
        transfer.wait()
    for loan in loans:
        loan.give_back()
    return [*values, *(buffer.item() for buffer in buffers)]


@pytest.mark.parametrize(("kind", "num_loans"), [*((kind, 0) for kind in KINDS), ("shared_memory", 2)])
def test_posted_receives_are_filled_while_another_link_is_awaited(kind: LinkKind, num_loans: int) -> None:
    results = run_mesh({"pipeline": 3}, cross_wait, kind, num_loans, backend=backend_of(kind))
    assert results[1] == [0.0, 1.0, 2.0, 3.0, 4.0]


def borrow(mesh: Mesh) -> None:
    """Rank 1 posts a receive, a loan and a receive at a time, awaits the last one first, and keeps up to three loans,
    which it gives back in another order."""
    edge = Edge(0, 1, 8 * 15, slots=1, loans=3)
    link = make_links(mesh, [edge], "shared_memory", timeout=20)[edge]
    if mesh.rank == 0:
        for number in range(30):
            link.send(message(number, torch.float64).requires_grad_())
        return
    kept: dict[int, tuple[Loan, torch.Tensor]] = {}
    for number in range(0, 30, 3):
        if len(kept) == 3:
            kept.pop(sorted(kept)[number % 2])[0].give_back()
        into = torch.zeros(2, 3, 5, dtype=torch.float64)
        first, loan, last = link.receive(into[0]), link.borrow(into[0]), link.receive(into[1])
        last.wait()
        first.wait()
        kept[number + 1] = loan, loan.take()
        copied = {number: into[0], number + 2: into[1]}
        for known, tensor in (copied | {each: tensor for each, (_, tensor) in kept.items()}).items():
            assert torch.equal(tensor, message(known, torch.float64))
            assert not tensor.requires_grad
    assert len(kept) == 3
    loan.give_back()
    with pytest.raises(ValueError, match="message 28 of link 0->1 was not taken, or given back already"):
        loan.give_back()


def test_lent_and_copied_messages_keep_their_order() -> None:
    run_mesh({"pipeline": 2}, borrow)


def chosen_kind(mesh: Mesh) -> str:
    edge = Edge(0, 1, 4)
    return type(make_links(mesh, [edge], timeout=20)[edge]).__name__


def test_auto_takes_memory_on_one_host() -> None:
    assert run_mesh({"pipeline": 2}, chosen_kind) == ["SharedMemorySender", "SharedMemoryReceiver"]
    assert run_mesh({"pipeline": 2}, chosen_kind, backend="threads") == ["InProcessLink", "InProcessLink"]


def chosen_kind_on_two_hosts(mesh: Mesh) -> str:
    from megapipe.parallel import shared_memory

    identity = (f"host {mesh.rank}", "net")
    shared_memory.host_identity = lambda: identity
    with pytest.raises(ValueError, match="not on one Linux host: use gloo links"):
        make_links(mesh, [Edge(0, 1, 4)], "shared_memory")
    return chosen_kind(mesh)


def test_auto_takes_gloo_between_hosts() -> None:
    assert run_mesh({"pipeline": 2}, chosen_kind_on_two_hosts) == ["DistributedLink", "DistributedLink"]


def ask_wrongly(mesh: Mesh, kind: LinkKind) -> None:
    for edge, rule in (
        (Edge(0, 2, 4), "coordinate 2 is outside 0..1"),
        (Edge(1, 1, 4), "without a link"),
        (Edge(0, 1, 4, slots=0), "at least 1 slot"),
        (Edge(0, 1, 4, loans=-1), "-1 to lend"),
        (Edge(0, 1, 0), "at least 1 byte"),
    ):
        with pytest.raises(ValueError, match=rule):
            make_links(mesh, [edge], kind)
    with pytest.raises(ValueError, match="requested twice"):
        make_links(mesh, [Edge(0, 1, 4), Edge(0, 1, 8)], kind)
    with pytest.raises(ValueError, match="nccl links do not work between"):
        make_links(mesh, [Edge(0, 1, 4)], "nccl")
    edge = Edge(0, 1, 16)
    link = make_links(mesh, [edge], kind, timeout=20)[edge]
    if mesh.rank == 0:
        with pytest.raises(ValueError, match="sending end"):
            link.receive(torch.zeros(1))
        with pytest.raises(ValueError, match="has 40 bytes, but link 0->1 was made for at most 16"):
            link.send(torch.zeros(10))
    else:
        with pytest.raises(ValueError, match="receiving end"):
            link.send(torch.zeros(1))
        with pytest.raises(ValueError, match="contiguous"):
            link.receive(torch.zeros(2, 2).mT)
        if not link.lends:
            with pytest.raises(ValueError, match="does not lend memory to rank 1"):
                link.borrow(torch.zeros(1))


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_use_is_refused(kind: LinkKind) -> None:
    run_mesh({"pipeline": 2}, ask_wrongly, kind, backend=backend_of(kind))


def test_one_process_needs_no_links() -> None:
    assert run_mesh({"pipeline": 1}, make_links, []) == [{}]


def two_links(mesh: Mesh, kind: LinkKind, timeout: float) -> tuple[LinkEnd, LinkEnd]:
    """From rank 0 to rank 1, and back."""
    there, back = Edge(0, 1, 1024, slots=2), Edge(1, 0, 1024, slots=2)
    links = make_links(mesh, [there, back], kind, timeout)
    return links[there], links[back]


def hurried(link: LinkEnd, seconds: float) -> LinkEnd:
    """With another time-out from now on: the ranks had all the time that they needed to meet."""
    link.timeout = seconds
    if isinstance(link, DistributedLink):
        link.wait_timeout = timedelta(seconds=seconds)
    return link


def message_and_seconds(wait: Callable[[], None]) -> tuple[str, float]:
    started = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        wait()
    return str(caught.value), time.monotonic() - started


def send_often(link: LinkEnd) -> None:
    for _ in range(10):
        link.send(torch.ones(4))


def wait_for_the_dead(rank: int, kind: LinkKind, sends: bool) -> tuple[str, float]:
    """Wait for a message of a dead rank, or for it to take the messages that fill all slots."""
    mesh = connected_mesh(MeshShape({"pipeline": 2}), torch.device("cpu"))
    there, back = two_links(mesh, kind, timeout=50)
    if rank == 1:
        there.receive(torch.zeros(4)).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    there.send(torch.ones(4)).wait()
    return message_and_seconds(partial(send_often, there) if sends else back.receive(torch.zeros(4)).wait)


@pytest.mark.parametrize(("kind", "sends"), [("gloo", False), ("shared_memory", False), ("shared_memory", True)])
def test_a_dead_peer_is_named_and_leaves_no_memory(kind: LinkKind, sends: bool) -> None:
    before = shared_memory_files()
    message, seconds = run_ranks(2, wait_for_the_dead, kind, sends, may_die=[1])[0]
    assert not shared_memory_files() - before
    awaited = r"take message \d+ of link 0->1" if sends else "send message 0 of link 1->0"
    end = "" if kind == "gloo" else "rank 1 has ended$"
    assert re.match(f"rank 0 waited for rank 1 to {awaited}, but .*{end}", message)
    assert seconds < 25, "half of the time-out"


def wait_for_the_silent(mesh: Mesh, kind: LinkKind, sends: bool, finished: Path) -> tuple[str, float]:
    """Rank 1 has its ends of the links open until rank 0 touches `finished`."""
    there, back = two_links(mesh, kind, timeout=20)
    outcome = "", 0.0
    if mesh.rank == 0:
        link = hurried(there if sends else back, 0.3)
        outcome = message_and_seconds(partial(send_often, link) if sends else link.receive(torch.zeros(4)).wait)
        finished.touch()
    wait_until(finished.exists)
    return outcome


@pytest.mark.parametrize(
    ("kind", "sends"), [("gloo", False), ("shared_memory", False), ("in_process", False), ("shared_memory", True)]
)
def test_a_silent_peer_is_named_after_the_timeout(tmp_path: Path, kind: LinkKind, sends: bool) -> None:
    backend: Backend = "threads" if kind == "in_process" else "processes"
    arguments = ({"pipeline": 2}, wait_for_the_silent, kind, sends, tmp_path / "finished")
    message, seconds = run_mesh(*arguments, backend=backend)[0]
    awaited = "take message 0 of link 0->1" if sends else "send message 0 of link 1->0"
    assert message.startswith(f"rank 0 waited for rank 1 to {awaited}, but ")
    assert kind == "gloo" or message.endswith(", but there was no answer within 0.3 s")
    assert 0.2 < seconds < 15


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "sem_clockwait"), reason="needs glibc 2.30")
def test_a_wall_clock_that_is_set_back_lengthens_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ctypes.create_string_buffer(SEMAPHORE_BYTES)
    semaphore = Semaphore(memory, ctypes.addressof(memory))
    semaphore.initialize(0)
    ahead, read = time.time_ns() + 20 * 10**9, time.clock_gettime_ns
    monkeypatch.setattr(time, "time_ns", lambda: ahead)
    monkeypatch.setattr(time, "clock_gettime_ns", lambda clock: ahead if clock == time.CLOCK_REALTIME else read(clock))
    started = time.monotonic()
    assert not semaphore.wait(0.01)
    assert time.monotonic() - started < 10


def receive_from_failing_thread(mesh: Mesh, messages: list[str]) -> None:
    _, back = two_links(mesh, "in_process", timeout=20)
    if mesh.rank == 1:
        raise ValueError("bad batch")
    messages.append(message_and_seconds(back.receive(torch.zeros(4)).wait)[0])


def test_failing_thread_ends_the_wait_of_its_peer() -> None:
    messages: list[str] = []
    with pytest.raises(ValueError, match="bad batch"):
        run_threads({"pipeline": 2}, receive_from_failing_thread, messages)
    (message,) = messages
    assert message.endswith("but rank 1 failed: ValueError('bad batch')")


def disagree_about_size(mesh: Mesh, kind: LinkKind) -> None:
    there, _ = two_links(mesh, kind, timeout=20)
    if mesh.rank == 0:
        there.send(torch.ones(4))
        mesh.world.barrier()
    else:
        mesh.world.barrier()
        there.receive(torch.zeros(5)).wait()


def test_messages_of_another_size_are_reported() -> None:
    with pytest.raises(RuntimeError, match="message 0 of link 0->1, but 16 bytes were sent and 20 expected"):
        run_mesh({"pipeline": 2}, disagree_about_size, "shared_memory")
    with pytest.raises(CommunicationError, match=r"4 elements of torch.float32 were sent and 5 elements"):
        run_threads({"pipeline": 2}, disagree_about_size, "in_process")


def leave_early(rank: int) -> float:
    """Rank 0 ends with everything sent, unread credits included, before rank 1 reads its last messages."""
    mesh = connected_mesh(MeshShape({"pipeline": 2}), torch.device("cpu"))
    there, _ = two_links(mesh, "shared_memory", timeout=20)
    if rank == 0:
        for number in range(4):
            there.send(torch.full((4,), float(number)))
        os._exit(0)
    into = torch.zeros(4)
    for number in range(4):
        if number == 2:
            time.sleep(0.3)
        there.receive(into).wait()
    return into[0].item()


def test_messages_outlive_their_sender() -> None:
    assert run_ranks(2, leave_early, may_die=[0])[1] == 3.0


def shared_memory_files() -> set[str]:
    """List the files of links; folders of other tests and of profiles come and go meanwhile."""
    names = {name for folder in ("/dev/shm", "/tmp") if Path(folder).is_dir() for name in os.listdir(folder)}
    return {name for name in names if "megapipe" in name and not name.startswith(("megapipe-ranks-", "megapipe-prof"))}
