"""A peer that dies, falls silent or sends something else is named, and no shared memory remains."""

import ctypes
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
from megapipe.parallel.links import Edge, LinkEnd
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.pipeline_links import DistributedLink, LinkKind, make_links
from megapipe.parallel.shared_ring import SEMAPHORE_BYTES, Semaphore
from tests.support.meshes import Backend, run_mesh, run_threads
from tests.support.patience import wait_until
from tests.support.ranks import run_ranks


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


def count_descriptors(mesh: Mesh) -> int:
    """Make links, use them, close them and count what stays open."""
    before = len(os.listdir("/proc/self/fd"))
    there, back = two_links(mesh, "shared_memory", timeout=20)
    outgoing, incoming = (there, back) if mesh.rank == 0 else (back, there)
    outgoing.send(torch.ones(4))
    incoming.receive(torch.zeros(4)).wait()
    outgoing.close()
    incoming.close()
    return len(os.listdir("/proc/self/fd")) - before


def test_closed_links_hold_no_descriptors() -> None:
    assert run_mesh({"pipeline": 2}, count_descriptors) == [0, 0]
