"""Compiled blocks train the same model: with sharded tokens, shared samples and offloaded activations."""

from functools import partial

import pytest
from torch._dynamo.testing import CompileCounterWithBackend

from megapipe.config.run import PretrainConfig
from megapipe.engine import assembly
from megapipe.engine.assembly import CompiledForward
from megapipe.parallel.mesh import Mesh
from tests.distributed.conftest import Make, Oracle
from tests.distributed.layout_cases import (
    BLOCKS,
    C2,
    DOCUMENTS,
    EXHAUSTIVE,
    ONE,
    T2,
    TWO_BP,
    Case,
    Groups,
    check,
    context,
    schedule,
    sequence,
)
from tests.support.equality import check_bits
from tests.support.gpt_runs import RankRun, run_gpt
from tests.support.meshes import run_mesh

STEPS = 2
COMPILED: Groups = {"training": {"compile": True}}
SLOW = pytest.mark.slow


def on_compiler(mesh: Mesh, config: PretrainConfig) -> tuple[RankRun, int]:
    """Return a run, and the number of frames that were compiled."""
    counter = CompileCounterWithBackend("aot_eager")
    assembly.CompiledForward = partial(CompiledForward, backend=counter)  # type: ignore[misc, assignment]
    return run_gpt(mesh, config, STEPS, timeout=200.0), counter.frame_count


SHARED = [
    pytest.param(Case("gpt2-untied-dropout", T2, sequence()), marks=SLOW),
    pytest.param(Case("llama", T2, sequence(2)), marks=SLOW),
    *(pytest.param(Case("llama", C2, context(kind), DOCUMENTS), marks=EXHAUSTIVE) for kind in ("ring", "all_to_all")),
]


@pytest.mark.parametrize("case", SHARED, ids=str)
def test_compiled_blocks_train_the_model_of_one_process(make: Make, one_process: Oracle, case: Case) -> None:
    """Also in halves, whose compiled forward takes probes: they have the same losses."""
    expected = one_process(case, STEPS)
    whole, halves = (
        run_mesh(
            case.sizes, on_compiler, make(case.model, case.sizes, case.layout, change, case.run, COMPILED), timeout=300
        )
        for change in ({}, TWO_BP)
    )
    for ranks in (whole, halves):
        check(case, [run for run, _ in ranks], expected)
        if case.sizes == T2:
            assert {frames for _, frames in ranks} == {1}, "all blocks share one frame"
    assert [[each.loss for each in run.results] for run, _ in halves] == [
        [each.loss for each in run.results] for run, _ in whole
    ]


@EXHAUSTIVE
@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_compiled_blocks_move_their_activations(make: Make, name: str) -> None:
    """The bits of compiled blocks that move nothing."""
    ((moved, _),), ((kept, _),) = (
        run_mesh(ONE, on_compiler, make("llama-5", ONE, change, schedule(name), COMPILED), timeout=300)
        for change in (BLOCKS, {})
    )
    check_bits([moved], kept)
