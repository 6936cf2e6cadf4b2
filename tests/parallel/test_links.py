"""Every kind of link carries what was sent, in order."""

import itertools

import pytest
import torch

from megapipe.parallel.links import Edge, LinkEnd, Loan
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.pipeline_links import LinkKind, make_links
from tests.support.meshes import Backend, run_mesh

KINDS: list[LinkKind] = ["gloo", "shared_memory", "in_process"]
DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool]


def backend_of(kind: LinkKind) -> Backend:
    return "threads" if kind == "in_process" else "processes"


def message(number: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 2, (3, 5), generator=generator).mul(number + 1).to(dtype)


def exchange(mesh: Mesh, kind: LinkKind, receive_first: bool) -> None:
    """Both ranks send ten messages of every type to each other; all arrive, in order."""
    edges = [Edge(source, 1 - source, 3 * 5 * 8, slots=4) for source in (0, 1)]
    links = make_links(mesh, edges, kind, timeout=30)
    me = mesh.coordinate("pipeline")
    outgoing = [links[edge] for edge in edges if edge.source == me]
    incoming = [links[edge] for edge in edges if edge.destination == me]
    for dtype in DTYPES:
        buffers = {link: [torch.zeros(3, 5, dtype=dtype) for _ in range(10)] for link in incoming}
        receives = [link.receive(buffers[link][n]) for n in range(10) for link in incoming] if receive_first else []
        # Without posted receives a sender may have sent one unread message per slot.
        for numbers in (range(4), range(4, 8), range(8, 10)):
            sends = [link.send(message(100 * link.edge.source + n, dtype)) for n in numbers for link in outgoing]
            if not receive_first:
                receives = [link.receive(buffers[link][n]) for n in numbers for link in incoming]
                for transfer in reversed(receives):
                    transfer.wait()
            for transfer in sends:
                transfer.wait()
        for transfer in receives:
            transfer.wait()
        for link in incoming:
            for number in range(10):
                assert torch.equal(buffers[link][number], message(100 * link.edge.source + number, dtype))
    # A rank that closes first must not take away what its peer has yet to read.
    for link in links.values():
        link.close()


@pytest.mark.parametrize("receive_first", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_messages_arrive_in_order(kind: LinkKind, receive_first: bool) -> None:
    run_mesh({"pipeline": 2}, exchange, kind, receive_first, backend=backend_of(kind))


def pass_along(mesh: Mesh, kind: LinkKind, count: int, slots: int) -> list[float]:
    """A ring: each rank adds its number to what it gets and passes it on; everything is in flight at once."""
    size, me = mesh.size("pipeline"), mesh.coordinate("pipeline")
    edges = [Edge(rank, (rank + 1) % size, 4, slots) for rank in range(size)]
    links = make_links(mesh, edges, kind, timeout=30)
    following, previous = links[edges[me]], links[edges[me - 1]]
    values = []
    sends = []
    buffers = [torch.zeros(1) for _ in range(count)]
    receives = [previous.receive(buffer) for buffer in buffers]
    for number in range(count):
        if me > 0:
            receives[number].wait()
        payload = buffers[number] + 10.0**me if me > 0 else torch.full((1,), 1.0 + number * 10.0**size)
        sends.append(following.send(payload))
    if me == 0:
        for transfer in receives:
            transfer.wait()
        values = [buffer.item() for buffer in buffers]
    for transfer in sends:
        transfer.wait()
    return values


@pytest.mark.parametrize("kind", KINDS)
def test_ring_with_more_messages_than_slots_does_not_block(kind: LinkKind) -> None:
    results = run_mesh({"pipeline": 3, "data": 2}, pass_along, kind, 50, 1, backend=backend_of(kind))
    assert results[0] == results[3] == [111.0 + number * 1000.0 for number in range(50)]


def cross_wait(mesh: Mesh, kind: LinkKind) -> list[float]:
    """Rank 1 has posted receives on one link but waits for another, which rank 2 feeds once the first is full."""
    many, one, notice = Edge(0, 1, 4, slots=1), Edge(2, 1, 4, slots=1), Edge(0, 2, 4)
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
    buffers = [torch.zeros(1) for _ in range(6)]
    receives = [links[many].receive(buffer) for buffer in buffers[:5]]
    links[one].receive(buffers[5]).wait()
    assert buffers[5].item() == 9.0
    for transfer in receives:
        transfer.wait()
    return [buffer.item() for buffer in buffers[:5]]


@pytest.mark.parametrize("kind", KINDS)
def test_posted_receives_are_filled_while_another_link_is_awaited(kind: LinkKind) -> None:
    assert run_mesh({"pipeline": 3}, cross_wait, kind, backend=backend_of(kind))[1] == [0.0, 1.0, 2.0, 3.0, 4.0]


def borrow(mesh: Mesh) -> list[float]:
    """Rank 1 borrows up to three of ten messages in place, and gives them back in another order."""
    edge = Edge(0, 1, 8 * 15, slots=1, loans=3)
    link = make_links(mesh, [edge], "shared_memory", timeout=20)[edge]
    if mesh.rank == 0:
        for number in range(10):
            link.send(message(number, torch.float64).requires_grad_()).wait()
        return []
    like = torch.empty(3, 5, dtype=torch.float64, device="meta")
    kept: dict[int, tuple[Loan, torch.Tensor]] = {}
    for number in range(10):
        if len(kept) == 3:
            kept.pop(sorted(kept)[number % 2])[0].give_back()
        loan = link.borrow(like)
        kept[number] = loan, loan.take()
        for known, (_, tensor) in kept.items():
            assert torch.equal(tensor, message(known, torch.float64))
            assert not tensor.requires_grad
    loan = kept[9][0]
    loan.give_back()
    with pytest.raises(ValueError, match="message 9 of link 0->1 was not taken, or given back already"):
        loan.give_back()
    return [float(tensor.sum()) for _, tensor in kept.values()]


def test_messages_can_be_read_in_place() -> None:
    assert len(run_mesh({"pipeline": 2}, borrow)[1]) == 3


def receive_and_borrow(mesh: Mesh) -> list[float]:
    """Both ways of receiving take turns on one link; what was posted first is filled first."""
    edge = Edge(0, 1, 4, slots=2, loans=1)
    link = make_links(mesh, [edge], "shared_memory", timeout=20)[edge]
    if mesh.rank == 0:
        for number in range(9):
            link.send(torch.full((1,), float(number)))
        return []
    values = []
    for _ in range(3):
        into = torch.zeros(2, 1)
        first = link.receive(into[0])
        loan = link.borrow(into[0])
        last = link.receive(into[1])
        last.wait()
        first.wait()
        values += [into[0].item(), loan.take().item(), into[1].item()]
        loan.give_back()
    return values


def test_lent_and_copied_messages_keep_their_order() -> None:
    assert run_mesh({"pipeline": 2}, receive_and_borrow)[1] == [float(number) for number in range(9)]


def wait_with_loans(mesh: Mesh) -> list[float]:
    """As `cross_wait`, with the first link's only free slot taken by loans that are posted."""
    many, one, notice = Edge(0, 1, 4, slots=1, loans=2), Edge(2, 1, 4, slots=1), Edge(0, 2, 4)
    links = make_links(mesh, [many, one, notice], "shared_memory", timeout=20)
    if mesh.rank == 2:
        links[notice].receive(torch.zeros(1)).wait()
        links[one].send(torch.full((1,), 9.0))
        return []
    if mesh.rank == 0:
        for number in range(5):
            links[many].send(torch.full((1,), float(number)))
        links[notice].send(torch.ones(1))
        return []
    like = torch.zeros(1)
    loans = [links[many].borrow(like) for _ in range(2)]
    values = [loan.take().item() for loan in loans]
    buffers = [torch.zeros(1) for _ in range(4)]
    receives = [links[many].receive(buffer) for buffer in buffers[:3]]
    links[one].receive(buffers[3]).wait()
    for transfer in receives:
        transfer.wait()
    for loan in loans:
        loan.give_back()
    return [*values, *(buffer.item() for buffer in buffers)]


def test_loans_do_not_block_posted_receives() -> None:
    assert run_mesh({"pipeline": 3}, wait_with_loans)[1] == [0.0, 1.0, 2.0, 3.0, 4.0, 9.0]


def every_shape(mesh: Mesh, kind: LinkKind) -> None:
    shapes = (shape for axes in range(5) for shape in itertools.product(range(4), repeat=axes))
    edge = Edge(0, 1, 8 * 3**4, slots=2)
    link = make_links(mesh, [edge], kind, timeout=20)[edge]
    for number, shape in enumerate(shapes):
        # Transposed, so that what is sent is not contiguous.
        expected = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + number
        if mesh.rank == 0:
            link.send(expected.mT.contiguous().mT if len(shape) > 1 else expected).wait()
        else:
            into = torch.empty(shape, dtype=torch.float64)
            link.receive(into).wait()
            assert torch.equal(into, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_every_shape_arrives(kind: LinkKind) -> None:
    run_mesh({"pipeline": 2}, every_shape, kind, backend=backend_of(kind))


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


def no_edges(mesh: Mesh) -> dict[Edge, LinkEnd]:
    return make_links(mesh, [])


def test_one_process_needs_no_links() -> None:
    assert run_mesh({"pipeline": 1}, no_edges) == [{}]
