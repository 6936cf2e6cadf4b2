"""Every kind of link carries what was sent, in order."""

import itertools

import pytest
import torch

from megapipe.parallel.links import Edge, Loan
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.pipeline_links import LinkKind, make_links
from tests.support.meshes import Backend, run_mesh

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
