"""A peer that dies, falls silent or sends something else is named, and no shared memory remains."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megapipe.config.parallel import MeshShape
from megapipe.parallel.groups import CommunicationError
from megapipe.parallel.launch import connected_mesh
from megapipe.parallel.links import Edge, LinkEnd, Transfer
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.pipeline_links import DistributedLink, LinkKind, make_links
from tests.support.meshes import run_mesh, run_threads
from tests.support.patience import wait_until
from tests.support.ranks import run_ranks

PROCESS_KINDS: list[LinkKind] = ["gloo", "shared_memory"]


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


def message_and_seconds(transfer: Transfer) -> tuple[str, float]:
    started = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        transfer.wait()
    return str(caught.value), time.monotonic() - started


def wait_for_the_dead(rank: int, kind: LinkKind) -> tuple[str, float]:
    mesh = connected_mesh(MeshShape({"pipeline": 2}), torch.device("cpu"))
    there, back = two_links(mesh, kind, timeout=50)
    if rank == 1:
        there.receive(torch.zeros(4)).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    there.send(torch.ones(4)).wait()
    return message_and_seconds(back.receive(torch.zeros(4)))


@pytest.mark.parametrize("kind", PROCESS_KINDS)
def test_a_dead_peer_is_named_and_leaves_no_memory(kind: LinkKind) -> None:
    before = shared_memory_files()
    message, seconds = run_ranks(2, wait_for_the_dead, kind, may_die=[1])[0]
    assert not shared_memory_files() - before
    assert message.startswith("rank 0 waited for rank 1 to send message 0 of link 1->0, but ")
    assert kind == "gloo" or message.endswith("rank 1 has ended")
    assert seconds < 25, "half of the time-out"


def send_often(link: LinkEnd, count: int) -> None:
    for _ in range(count):
        link.send(torch.ones(4))


def send_to_the_dead(rank: int) -> str:
    mesh = connected_mesh(MeshShape({"pipeline": 2}), torch.device("cpu"))
    there, _ = two_links(mesh, "shared_memory", timeout=50)
    if rank == 1:
        there.receive(torch.zeros(4)).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommunicationError) as caught:
        send_often(there, 10)
    return str(caught.value)


def test_sender_to_a_dead_peer_gets_an_error() -> None:
    message = run_ranks(2, send_to_the_dead, may_die=[1])[0]
    assert message.startswith("rank 0 waited for rank 1 to take message ")
    assert message.endswith("of link 0->1, but rank 1 has ended")


def wait_for_the_silent(mesh: Mesh, kind: LinkKind, finished: Path) -> tuple[str, float]:
    """Rank 1 has its end of the link open until rank 0 touches `finished`."""
    _, back = two_links(mesh, kind, timeout=20)
    outcome = "", 0.0
    if mesh.rank == 0:
        outcome = message_and_seconds(hurried(back, 0.3).receive(torch.zeros(4)))
        finished.touch()
    wait_until(finished.exists)
    return outcome


@pytest.mark.parametrize("kind", PROCESS_KINDS)
def test_silent_process_is_named_after_the_timeout(tmp_path: Path, kind: LinkKind) -> None:
    message, seconds = run_mesh({"pipeline": 2}, wait_for_the_silent, kind, tmp_path / "finished")[0]
    assert message.startswith("rank 0 waited for rank 1 to send message 0 of link 1->0")
    assert 0.2 < seconds < 15


def overfill(mesh: Mesh) -> str:
    there, _ = two_links(mesh, "shared_memory", timeout=20)
    message = ""
    if mesh.rank == 0:
        with pytest.raises(CommunicationError) as caught:
            send_often(hurried(there, 0.3), 3)
        message = str(caught.value)
    mesh.world.barrier()
    return message


def test_sender_with_full_slots_gives_up_after_the_timeout() -> None:
    assert run_mesh({"pipeline": 2}, overfill)[0] == (
        "rank 0 waited for rank 1 to take message 0 of link 0->1, but there was no answer within 0.3 s"
    )


def wait_for_a_silent_thread(mesh: Mesh) -> str:
    _, back = two_links(mesh, "in_process", timeout=0.3)
    return message_and_seconds(back.receive(torch.zeros(4)))[0] if mesh.rank == 0 else ""


def test_silent_thread_is_named_after_the_timeout() -> None:
    message = run_threads({"pipeline": 2}, wait_for_a_silent_thread)[0]
    assert message.startswith("rank 0 waited for rank 1 to send message 0 of link 1->0")
    assert message.endswith("within 0.3 s")


def receive_from_failing_thread(mesh: Mesh) -> None:
    _, back = two_links(mesh, "in_process", timeout=20)
    if mesh.rank == 1:
        raise ValueError("bad batch")
    assert "but rank 1 failed: ValueError('bad batch')" in message_and_seconds(back.receive(torch.zeros(4)))[0]


def test_failing_thread_ends_the_wait_of_its_peer() -> None:
    with pytest.raises(ValueError, match="bad batch"):
        run_threads({"pipeline": 2}, receive_from_failing_thread)


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
    total = torch.zeros(4)
    there.receive(total).wait()
    there.receive(total).wait()
    time.sleep(0.3)
    there.receive(total).wait()
    there.receive(total).wait()
    return total[0].item()


def test_messages_outlive_their_sender() -> None:
    assert run_ranks(2, leave_early, may_die=[0])[1] == 3.0


def shared_memory_files() -> set[str]:
    """List the files of links; folders of other tests and of profiles come and go meanwhile."""
    names = {name for folder in ("/dev/shm", "/tmp") if Path(folder).is_dir() for name in os.listdir(folder)}
    return {name for name in names if "megapipe" in name and not name.startswith(("megapipe-ranks-", "megapipe-prof"))}


def count_descriptors(mesh: Mesh) -> int:
    """Make links, use them, close them and count what stays open."""
    before = len(os.listdir("/proc/self/fd"))
    there, back = two_links(mesh, "shared_memory", timeout=20)
    link = there if mesh.rank == 0 else back
    link.send(torch.ones(4))
    (back if mesh.rank == 0 else there).receive(torch.zeros(4)).wait()
    there.close()
    back.close()
    return len(os.listdir("/proc/self/fd")) - before


def test_closed_links_hold_no_descriptors() -> None:
    assert run_mesh({"pipeline": 2}, count_descriptors) == [0, 0]
