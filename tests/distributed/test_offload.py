"""What goes to host memory and comes back changes no bit, under any schedule."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megapipe.config.bert import BertModelConfig
from megapipe.config.offload import OffloadConfig
from megapipe.config.recompute import RecomputeConfig
from megapipe.config.run import PretrainConfig
from megapipe.parallel.mesh import Mesh
from megapipe.schedules.command.main import main
from megapipe.spec.layers import model_layers
from megapipe.training import assemble
from megapipe.training.assemble import CompiledForward
from megapipe.training.replica import Replica
from tests.distributed.test_recompute import MODELS, STEPS, fed
from tests.support.bert_runs import POST_NORM, PRE_NORM, make_bert_config, write_corpus
from tests.support.equality import check_bits, check_close
from tests.support.gpt_runs import RankRun, make_config, run_gpt, write_shard
from tests.support.launch import launch
from tests.support.meshes import run_mesh
from tests.training.test_offload_plan import MODEL, auto

BLOCKS = {"activations": "blocks"}
EVERYTHING = {**BLOCKS, "optimizer": True}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("corpus"))


def config_of(
    corpus: str, model: str, sizes: dict[str, int], offload: dict[str, Any], precision: str = "fp32", **schedule: Any
) -> PretrainConfig:
    layout = {name: sizes.get(name, 1) for name in ("pipeline", "tensor")}
    config = make_config(corpus, MODELS[model], parallel=layout, schedule=schedule)
    config.training = replace(config.training, precision=precision)
    config.offload = OffloadConfig(**offload)
    return config


@cache
def resident(corpus: str, model: str, precision: str = "fp32") -> RankRun:
    """One process that moves nothing."""
    run: RankRun = run_mesh({}, run_gpt, config_of(corpus, model, {}, {}, precision), STEPS)[0]
    return run


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"name": "gpipe"}, BLOCKS),
    ({"name": "1f1b"}, EVERYTHING),
    ({"name": "1f1b"}, {**BLOCKS, "prefetch": 3, "every": 2}),
    ({"name": "1f1b"}, {"optimizer": True}),
    ({"name": "interleaved_1f1b"}, EVERYTHING),
    ({"name": "modular"}, BLOCKS),
    ({"name": "1f1b", "two_bp": True}, EVERYTHING),
    ({"name": "zb_h1"}, EVERYTHING),
    ({"name": "zb_v"}, {**BLOCKS, "prefetch": 2}),
]


TIED, UNTIED = MODELS
EXHAUSTIVE = pytest.mark.exhaustive
ALTERNATING = [
    pytest.param(model, *case, id=f"{model}-{case[0]}-{case[1]}", marks=() if turn == index % 2 else EXHAUSTIVE)
    for index, case in enumerate(CASES)
    for turn, model in enumerate(MODELS)
]
"""Every case with one model, with the other among the slow tests."""


@pytest.mark.parametrize(("model", "schedule", "offload"), ALTERNATING)
def test_what_comes_back_gives_the_bits_of_one_process_that_moves_nothing(
    corpus: str, model: str, schedule: dict[str, Any], offload: dict[str, Any]
) -> None:
    config = config_of(corpus, model, {"pipeline": 2}, offload, **schedule)
    check_bits(run_mesh({"pipeline": 2}, run_gpt, config, STEPS), resident(corpus, model))


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=EXHAUSTIVE), "zb_h1"])
def test_bf16_with_its_master_in_host_memory_is_the_same(corpus: str, schedule: str) -> None:
    config = config_of(corpus, UNTIED, {"pipeline": 2}, EVERYTHING, "bf16", name=schedule)
    check_bits(run_mesh({"pipeline": 2}, run_gpt, config, STEPS), resident(corpus, UNTIED, "bf16"))


@pytest.mark.parametrize(
    ("schedule", "precision"),
    [
        ("2bw", "bf16"),
        ("pipedream", "fp32"),
        pytest.param("2bw", "fp32", marks=EXHAUSTIVE),
        pytest.param("pipedream", "bf16", marks=EXHAUSTIVE),
    ],
)
def test_stale_gradients_are_the_same_ones(corpus: str, schedule: str, precision: str) -> None:
    results = []
    for offload in (EVERYTHING, {}):
        config = config_of(corpus, UNTIED, {"pipeline": 2}, offload, precision, name=schedule)
        config.optimizer = replace(config.optimizer, clip_norm=None if schedule == "pipedream" else 1.0)
        results.append(run_mesh({"pipeline": 2}, fed, config))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("schedule", "model"),
    [
        pytest.param("1f1b", PRE_NORM, id="1f1b-pre"),
        pytest.param("zb_h1", POST_NORM, id="zb_h1-post"),
        pytest.param("1f1b", POST_NORM, id="1f1b-post", marks=EXHAUSTIVE),
        pytest.param("zb_h1", PRE_NORM, id="zb_h1-pre", marks=EXHAUSTIVE),
    ],
)
def test_bert_is_the_same_too(tmp_path: Path, schedule: str, model: BertModelConfig) -> None:
    layout, data = {"pipeline": 2}, write_corpus(tmp_path)
    config = make_bert_config(data, model, parallel=layout, schedule={"name": schedule}, offload=EVERYTHING)
    (expected,) = run_mesh({}, run_gpt, make_bert_config(data, model), STEPS)
    check_bits(run_mesh(layout, run_gpt, config, STEPS), expected)


def test_some_blocks_move_and_others_run_again(corpus: str) -> None:
    config = config_of(corpus, TIED, {"pipeline": 2}, EVERYTHING, name="zb_h1")
    config.recompute = RecomputeConfig(method="full", num_blocks=1)
    check_bits(run_mesh({"pipeline": 2}, run_gpt, config, STEPS), resident(corpus, TIED))


@pytest.mark.parametrize("sizes", [{"data": 2, "pipeline": 2}, {"tensor": 2, "pipeline": 2}], ids=str)
def test_replicas_and_tensor_ranks_move_theirs_too(corpus: str, sizes: dict[str, int]) -> None:
    config = config_of(corpus, TIED, sizes, EVERYTHING, name="1f1b")
    config.parallel = replace(config.parallel, data=sizes.get("data", 1))
    check_close(run_mesh(sizes, run_gpt, config, STEPS), resident(corpus, TIED), 1e-5)


def test_a_traced_run_tells_what_auto_decided_and_is_laid_over(
    tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = ["--offload.optimizer=true", "--offload.weights=true"]
    offload = ["--offload.activations=auto", "--offload.memory=1", *state]
    arguments = [*offload, "--parallel.pipeline=2", "--training.steps=6", "--profile.trace=trace"]
    done = launch(2, f"--data.prefix={corpus}", *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "offload auto: stage 1: of " in done.stdout
    assert main(["overlay", str(tmp_path / "trace"), "-o", str(tmp_path / "overlay.html")]) == 0
    assert "predicted" in capsys.readouterr().out


@EXHAUSTIVE
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_compiled_blocks_move_theirs_too(corpus: str, schedule: str) -> None:
    results = []
    for offload in (BLOCKS, {}):
        config = config_of(corpus, UNTIED, {}, offload, name=schedule)
        config.training = replace(config.training, compile=True)
        results.append(run_mesh({}, compiled_run, config, timeout=300)[0])
    check_bits([results[0]], results[1])


def compiled_run(mesh: Mesh, config: PretrainConfig) -> RankRun:
    assemble.CompiledForward = lambda **options: CompiledForward(backend="aot_eager", **options)  # type: ignore[misc, assignment]
    return run_gpt(mesh, config, STEPS, timeout=200.0)


def test_what_auto_decides_is_the_same_too(corpus: str) -> None:
    """Of six blocks two keep, two move and two run again."""
    plain = make_config(corpus, MODEL, schedule={"name": "gpipe"})
    mixed = replace(plain, offload=OffloadConfig(**auto(22.0, 0.6)))
    (found,), (expected,) = (run_mesh({}, run_and_plan, each) for each in (mixed, plain))
    assert "2 keep, 2 move, 2 recompute (rmrmkk)" in found[1]
    check_bits([found[0]], expected[0])


def run_and_plan(mesh: Mesh, config: PretrainConfig) -> tuple[RankRun, str]:
    config = replace(config, parallel=replace(config.parallel, data=1))
    remarks = Replica(config, mesh, model_layers(config.model)).plan.remarks
    return run_gpt(mesh, config, STEPS), " ".join(remarks)
