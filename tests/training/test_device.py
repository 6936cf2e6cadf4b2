"""The device of a run: determinism, freed memory, the precision that `auto` chooses, and imports that take long."""

import os
from pathlib import Path

import pytest
import torch

from megapipe.config.run import PretrainConfig, TrainingConfig
from megapipe.parallel.mesh import Mesh
from megapipe.training import device
from megapipe.training.device import USER_VARIABLES, keep_freed_memory, require_determinism, with_precision
from tests.faults.jobs import RUN, saved_files
from tests.support.commands import run
from tests.support.gpt_runs import write_shard
from tests.support.launch import launch
from tests.support.meshes import run_threads


def test_determinism_turns_every_switch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    try:
        require_determinism()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.mark.slow
def test_two_starts_of_the_program_have_the_same_bits(tmp_path: Path) -> None:
    corpus = write_shard(tmp_path)
    arguments = ["--data.prefix", corpus, "--training.steps", "3", "--training.deterministic", "true",
                 "--checkpoint.every", "3", "--model.hidden_dropout", "0.1", "--parallel.pipeline", "2"]  # fmt: skip
    outcomes = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        finished = launch(2, *arguments, folder=tmp_path / name)
        assert finished.returncode == 0, finished.stderr
        outcomes.append(saved_files(tmp_path / name / RUN, 3))
    assert len(outcomes[0]) == 2
    assert outcomes[0] == outcomes[1]


ROUNDS = 3
PAGES = 4 * 8192
"""Pages of the blocks of one round: four of 32 MiB."""

PROGRAM = f"""
import resource, torch
from megapipe.training.device import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({ROUNDS}):
        blocks = [torch.empty(2**23).fill_(1.0) for _ in range(4)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
assert keep_freed_memory({{}})
faults()
print(faults())
"""


def test_freed_pages_are_cleared_again_unless_they_are_kept() -> None:
    """Page faults of a process that allocates the same blocks again and again."""
    freed, kept = map(int, run(f"python -c '{PROGRAM}'", 60).split())
    assert kept < PAGES
    assert freed > 2 * PAGES
    for name in USER_VARIABLES:
        assert not keep_freed_memory({name: "1"}), "what the user has chosen stays"


def chosen(mesh: Mesh, precision: str, saved: str | None) -> tuple[str, list[str]]:
    lines: list[str] = []
    config = PretrainConfig(training=TrainingConfig(precision=precision))  # type: ignore[arg-type]
    return with_precision(config, mesh, saved, lines.append).training.precision, lines


@pytest.mark.parametrize(("bf16", "fp32", "choice"), [(0.001, 0.002, "bf16"), (0.004, 0.002, "fp32")])
def test_rank_zero_chooses_the_faster_precision_for_all(
    monkeypatch: pytest.MonkeyPatch, bf16: float, fp32: float, choice: str
) -> None:
    times = {torch.bfloat16: bf16, torch.float32: fp32}
    monkeypatch.setattr(device, "product_seconds", lambda dtype, device: times[dtype])
    (first, (line,)), second = run_threads({"pipeline": 2}, chosen, "auto", None)
    assert (first, second) == (choice, (choice, []))
    for words in (choice, f"{bf16 * 1e3:.2f} ms in bf16", f"{fp32 * 1e3:.2f} ms in fp32"):
        assert words in line
    monkeypatch.setattr(device, "product_seconds", pytest.fail)
    for asked, saved, kept in (("auto", "fp32", "fp32"), ("fp32", "bf16", "fp32"), ("bf16", "fp32", "bf16")):
        assert run_threads({}, chosen, asked, saved)[0][0] == kept, "a checkpoint's, or what was asked for"


@pytest.mark.slow
def test_compiler_and_triton_are_imported_on_demand() -> None:
    # Seconds for every rank; and Triton reads TRITON_INTERPRET when it is first imported.
    program = (
        "import sys, megapipe.training.pretrain, megapipe.training.loop.replica; "
        "print([m for m in ('torch._dynamo', 'triton') if m in sys.modules])"
    )
    assert run(f'python -c "{program}"', 60) == "[]\n"
