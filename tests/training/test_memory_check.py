"""The memory check before a model is built: its limit, its suggestions, what is free on a host."""

import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config import ConfigError
from megapipe.config.load import parse_as
from megapipe.config.model import ModelConfig
from megapipe.config.run import BatchConfig, DataConfig, PretrainConfig
from megapipe.engine.assembly import building_progress
from megapipe.layout.batch_plan import data_parallel_size
from megapipe.layout.stages import StageLayout
from megapipe.parallel.mesh import Mesh
from megapipe.planner.recompute import peak_bytes
from megapipe.training import memory_check
from megapipe.training.memory_check import Free, Need, Rank, check_memory, free_on_host, memory_problem, needed
from tests.support.gpt_runs import write_shard
from tests.support.launch import ROOT
from tests.support.meshes import run_threads

MODEL = {"vocabulary_size": 512, "num_layers": 4, "hidden_size": 64, "num_heads": 8, "max_positions": 64}


def _config() -> PretrainConfig:
    return PretrainConfig(
        model=ModelConfig(**MODEL),  # type: ignore[arg-type]
        data=DataConfig(prefix="corpus", sequence_length=64),
        batch=BatchConfig(global_size=16, micro_size=4),
    )


def _ranks(config: PretrainConfig, count: int, free: int, device: str = "cuda") -> list[Rank]:
    """Ranks on one host. Each GPU has `free` bytes; on a CPU all ranks share them."""
    return [
        Rank(
            "node0",
            f"cuda:{rank}" if device == "cuda" else "cpu",
            needed(config, count, rank, device),
            Free(free, "") if device == "cuda" else None,
            Free(free if device == "cpu" else 10**15, ""),
        )
        for rank in range(count)
    ]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_limit_is_the_prediction_to_the_byte(device: str) -> None:
    config = replace(_config(), parallel=replace(_config().parallel, pipeline=2))
    own = [sum(needed(config, 2, rank, device)) for rank in range(2)]
    assert max(own) == peak_bytes(replace(config, parallel=replace(config.parallel, data=1)), device)
    needs = sum(own) if device == "cpu" else max(own)
    assert memory_problem(config, _ranks(config, 2, needs, device)) is None
    assert memory_problem(config, _ranks(config, 2, needs - 1, device)) is not None


@settings(max_examples=6, deadline=None)
@given(share=st.floats(0.05, 0.99), count=st.sampled_from((1, 2, 4)), device=st.sampled_from(("cpu", "cuda")))
def test_suggested_changes_fit(share: float, count: int, device: str) -> None:
    """Read each suggestion back from its text, and predict it with another function."""
    config = _config()
    total = sum(sum(needed(config, count, rank, device)) for rank in range(count))
    free = int(share * (total if device == "cpu" else total / count))
    problem = memory_problem(config, _ranks(config, count, free, device))
    assert problem is not None
    changes = re.findall(r"\(\d\) (--.*?)(?: on (\d+) ranks, \d+ times the hosts or devices)?(?=, \(|$)", problem)
    assert len(changes) <= 3
    assert changes or share < 0.3
    flags = [f"--model.{name}={value}" for name, value in MODEL.items()]
    flags += ["--data.prefix=corpus", "--data.sequence_length=64", "--batch.global_size=16", "--batch.micro_size=4"]
    for change, ranks in changes:
        world_size = int(ranks or count)
        changed = parse_as(PretrainConfig, [*flags, *shlex.split(change)])
        data = data_parallel_size(changed, world_size)
        changed = replace(changed, parallel=replace(changed.parallel, data=data))
        if device == "cpu" and world_size == count:
            needed_bytes = sum(sum(needed(changed, count, rank, "cpu")) for rank in range(count))
        else:
            needed_bytes = peak_bytes(changed, device) * (count if device == "cpu" else 1)
        assert needed_bytes <= free, change


def test_memory_of_equal_names_is_counted_apart() -> None:
    """Containers of one host, each with its own limit, and GPUs that are each the first one in their process."""
    own = Free(10, "its cgroup allows 10 B")
    ranks = [Rank("node", "cuda:0", Need(8, 6), Free(9, ""), own, f"GPU-{each}", f"boot {each}") for each in (0, 1)]
    assert memory_problem(_config(), ranks) is None
    shared = [replace(each, device_id="GPU-0") for each in ranks]
    assert str(memory_problem(_config(), shared)).startswith("training needs 16 B on cuda:0 of host node for 2 ranks")


def _checked(mesh: Mesh, config: PretrainConfig) -> str:
    said: list[str] = []
    try:
        check_memory(config, mesh, said.append)
    except ConfigError as error:
        return str(error)
    return "; ".join(said)


def test_all_ranks_end_alike_where_one_lacks_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config()
    total = 2 * sum(needed(config, 2, 0, "cpu"))
    for free, refused in ((total - 1, True), (total, False)):
        there = iter([Free(free, "its cgroup allows 1 GB"), Free(10**15, "")])
        monkeypatch.setattr(memory_check, "free_on_host", lambda there=there: next(there))
        first, second = run_threads({"data": 2}, _checked, config)
        assert first == second
        assert ("its cgroup allows 1 GB" in first and "memory_check warn" in first) == refused
    warned = replace(config, training=replace(config.training, memory_check="warn"))
    monkeypatch.setattr(memory_check, "free_on_host", lambda: Free(1, ""))
    assert run_threads({}, _checked, warned)[0].startswith("warning: training needs")


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_free_memory_of_a_host_is_the_least_limit(tmp_path: Path) -> None:
    assert free_on_host(tmp_path) is None
    _write(tmp_path, {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n"})
    assert free_on_host(tmp_path) == Free(8_192_000, "")
    _write(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,memory:/job/step\n0::/slice/unit\n",
            "sys/fs/cgroup/slice/unit/memory.max": "max\n",
            "sys/fs/cgroup/slice/unit/memory.current": "1000000\n",
            "sys/fs/cgroup/slice/memory.max": "6000000\n",
            "sys/fs/cgroup/slice/memory.current": "2000000\n",
            "sys/fs/cgroup/slice/memory.stat": "anon 1\nactive_file 200000\ninactive_file 300000\n",
        },
    )
    assert free_on_host(tmp_path) == Free(4_500_000, "its cgroup allows 6.0 MB")
    # In a container, the path is that of the host, but only the root of the mount exists.
    _write(
        tmp_path,
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000000",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "4000000",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 1000\n",
        },
    )
    assert free_on_host(tmp_path) == Free(1_001_000, "its cgroup allows 5.0 MB")
    _write(tmp_path, {"sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096)})
    assert free_on_host(tmp_path) == Free(4_500_000, "its cgroup allows 6.0 MB")


def test_slow_builds_print_their_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    now = iter([0.0, 1.0, 3.0, 4.0, 9.0, 10.0, 11.0])
    monkeypatch.setattr("megapipe.engine.assembly.time.monotonic", lambda: next(now))
    built = building_progress(lines.append, StageLayout.of(_config()), [0])
    for _ in range(6):
        built()
    assert lines == [
        "building the model: 2 of 6 layers on rank 0, about 6 s left",
        "building the model: 4 of 6 layers on rank 0, about 4 s left",
    ]


@pytest.mark.slow
def test_too_large_models_fail_in_one_line_before_building(tmp_path: Path) -> None:
    command = [
        sys.executable, "pretrain_gpt.py", "--model", "examples/models/gpt3_175b.yaml", "--data.prefix",
        write_shard(tmp_path), "--data.split", "1,0,0", "--data.sequence_length", "512", "--training.directory",
        str(tmp_path / "run"), "--batch.global_size", "8",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(
        r"error: training needs 2\.8 TB on host .*to train anyway, set --training.memory_check warn\n", done.stderr
    )
