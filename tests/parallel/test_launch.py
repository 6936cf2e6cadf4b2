"""A launcher's environment is taken as it is or refused with the reason, before any process group exists."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megapipe.cli.main import end_after
from megapipe.config import ConfigError
from megapipe.config.command_line import exit_status
from megapipe.parallel import launch
from megapipe.parallel.groups import CommunicationError, DistributedGroup, LaunchError, SoloGroup
from megapipe.parallel.launch import LaunchEnvironment, initialize, joined, shutdown
from tests.support.ranks import RankError, free_port, run_ranks

COMPLETE = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in COMPLETE:
        monkeypatch.delenv(name, raising=False)


def test_complete_environment_is_read() -> None:
    read = LaunchEnvironment(rank=1, world_size=4, local_rank=1, address="localhost", port=29500)
    assert LaunchEnvironment.read(COMPLETE) == read
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert LaunchEnvironment.read(COMPLETE | agent) == replace(read, launcher_serves=True)
    assert LaunchEnvironment.read({"PATH": "/bin"}) == LaunchEnvironment(rank=0, world_size=1, local_rank=0)


@given(st.sets(st.sampled_from(sorted(COMPLETE)), min_size=1, max_size=len(COMPLETE) - 1))
def test_partial_environment_names_what_is_missing(kept: set[str]) -> None:
    with pytest.raises(LaunchError, match="torchrun") as caught:
        LaunchEnvironment.read({name: COMPLETE[name] for name in kept})
    missing, present = str(caught.value).split(" not set, but ")
    assert set(missing.split(", ")) == set(COMPLETE) - kept
    assert set(present.split(" is: ")[0].split(", ")) == kept


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("RANK", "one", "RANK='one' is not an integer"),
        ("WORLD_SIZE", "", "WORLD_SIZE='' is not an integer"),
        ("RANK", "4", r"RANK=4 is outside 0\.\.WORLD_SIZE-1 \(WORLD_SIZE=4\)"),
        ("RANK", "-1", "RANK=-1 is outside"),
        ("WORLD_SIZE", "0", r"WORLD_SIZE=0 is outside 1\.\.1048576: start with torchrun"),
        ("WORLD_SIZE", "9" * 20, r"WORLD_SIZE=9{20} is outside 1\.\.1048576"),
        ("LOCAL_RANK", "7", "LOCAL_RANK=7 is outside"),
        ("MASTER_PORT", "70000", "MASTER_PORT=70000 is not a port"),
    ],
)
def test_impossible_value_is_named(name: str, value: str, rule: str) -> None:
    with pytest.raises(LaunchError, match=rule):
        LaunchEnvironment.read(COMPLETE | {name: value})


@pytest.mark.usefixtures("bare_environment")
def test_one_process_needs_no_torch_distributed() -> None:
    mesh = initialize({}, device="cpu")
    assert not dist.is_initialized()
    assert isinstance(mesh.world, SoloGroup)
    assert isinstance(mesh.group("data", "context"), SoloGroup)
    assert (mesh.rank, mesh.world_size, mesh.device) == (0, 1, torch.device("cpu"))
    assert mesh.stage_group((0,)) is not None
    shutdown()


@pytest.mark.usefixtures("bare_environment")
def test_layout_that_does_not_fit_the_world_is_refused() -> None:
    with pytest.raises(LaunchError, match="tensor 3 needs 6 processes, but the launcher started 1: start 6"):
        initialize({"pipeline": 2, "tensor": 3})
    assert not dist.is_initialized()


@pytest.mark.usefixtures("bare_environment")
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_missing_gpu_is_reported() -> None:
    with pytest.raises(LaunchError, match="LOCAL_RANK=0 needs GPU 0 but this host has 0"):
        initialize({}, device="cuda")


def leave_for(port: int, rank: int, world_size: int) -> None:
    """Leave the world of the test's ranks, and set the environment of another one."""
    dist.destroy_process_group()
    numbers = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in numbers.items()}, MASTER_ADDR="localhost")


def join_by_environment(rank: int, port: int) -> list[float]:
    leave_for(port, rank, 4)
    mesh = initialize({"data": 2, "tensor": 2}, device="auto" if not torch.cuda.is_available() else "cpu", timeout=30)
    assert isinstance(mesh.group("tensor"), DistributedGroup)
    value = torch.tensor([float(rank)])
    mesh.group("tensor").all_reduce(value)
    shutdown()
    assert not dist.is_initialized()
    with pytest.raises(CommunicationError, match=r"the tensor group ended with `launch\.shutdown`"):
        mesh.group("tensor").all_reduce(value)
    return value.tolist()


def test_ranks_of_an_environment_join_one_mesh() -> None:
    assert run_ranks(4, join_by_environment, free_port()) == [[1.0], [1.0], [5.0], [5.0]]


def fail_in_a_world(rank: int, port: int, error: Exception) -> None:
    leave_for(port, rank, 2)

    def command() -> None:
        with joined({"data": 2}, device="cpu", timeout=30) as mesh:
            mesh.world.barrier()
            raise error

    end_after(lambda: exit_status(command))


@pytest.mark.parametrize(("error", "status"), [(CommunicationError("a peer is gone"), 1), (ConfigError(["wrong"]), 2)])
def test_groups_of_lost_peers_delay_no_end(error: Exception, status: int) -> None:
    """Freeing a group waits for its operations, so the process ends before."""
    with pytest.raises(RankError, match=rf"rank \d died with exit code {status}"):
        run_ranks(2, fail_in_a_world, free_port(), error)


EAGER = {"CUDA_MODULE_LOADING": "EAGER", "NCCL_RUNTIME_CONNECT": "0"}
SEGMENTS = {"PYTORCH_ALLOC_CONF": launch.allocator_settings(torch.__version__)}


@pytest.mark.parametrize(
    ("sizes", "zero_stage", "capability", "queues"),
    [
        ({"pipeline": 8, "data": 2}, 0, (9, 0), "32"),
        ({"tensor": 2}, 2, (9, 0), "1"),
        ({"context": 4, "tensor": 1}, 0, (8, 6), "1"),
        ({"tensor": 2}, 3, (9, 0), "32"),
        ({"tensor": 2, "context": 2}, 0, (10, 0), "32"),
        ({"tensor": 2}, 0, (12, 0), "32"),
    ],
)
def test_gpu_variables_follow_the_layout_and_the_gpu(
    sizes: dict[str, int], zero_stage: int, capability: tuple[int, int], queues: str
) -> None:
    wanted = {**EAGER, **SEGMENTS, "CUDA_DEVICE_MAX_CONNECTIONS": queues}
    assert launch.gpu_variables(sizes, zero_stage, capability, {"HOME": "/root"}) == wanted


def test_pinned_memory_is_not_rounded_where_torch_permits() -> None:
    older, newer = "expandable_segments:True", ",pinned_max_round_threshold_mb:16,pinned_max_cached_size_mb:16"
    versions = {"2.11.0+cu128": older, "2.12.1": older}
    versions |= dict.fromkeys(("2.13.0+cpu", "2.14.0a0+git1", "3.0"), older + newer)
    assert {version: launch.allocator_settings(version) for version in versions} == versions


def test_gpu_variables_that_the_user_sets_stay() -> None:
    given = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "CUDA_MODULE_LOADING": "LAZY", "NCCL_RUNTIME_CONNECT": "1"}
    assert launch.gpu_variables({"tensor": 2}, 0, (9, 0), given) == SEGMENTS
    assert launch.gpu_variables({}, 0, (9, 0), {**given, "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}) == {}


def test_gpu_variables_precede_driver_and_context(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, dict[str, str]]] = []
    names = (*EAGER, *SEGMENTS, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS")
    for name in names:
        # Set, then removed: what the test leaves in the environment is undone at its end.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def sees(call: str, result: object) -> Any:
        def seen_by(*_: object) -> object:
            seen.append((call, {name: os.environ[name] for name in names if name in os.environ}))
            return result

        return seen_by

    monkeypatch.setattr(launch, "_variables_set", {})
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert launch.set_gpu_variables("auto", 0, {"tensor": 2}) == {}
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    for call, result in (("is_available", True), ("device_count", 1), ("get_device_capability", (9, 0))):
        monkeypatch.setattr(torch.cuda, call, sees(call, result))
    assert launch.set_gpu_variables("cpu", 0, {"tensor": 2}) == {}
    assert seen == []
    monkeypatch.setattr(torch.cuda, "set_device", sees("set_device", None))
    variables = launch.set_gpu_variables("auto", 0, {"tensor": 2})
    launch.choose_device("auto", 0)
    assert variables == {**EAGER, **SEGMENTS, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert seen[0] == ("is_available", {**EAGER, **SEGMENTS})
    assert seen[-1] == ("set_device", variables)
    assert launch.set_gpu_variables("auto", 0, {}, zero_stage=3) == variables, "the context exists"
