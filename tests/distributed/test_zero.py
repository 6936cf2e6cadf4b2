"""State that replicas share out trains the same model, under every schedule, and stage 1 as plain replicas do."""

import itertools
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.config.errors import ConfigError
from megapipe.config.load import parse
from megapipe.config.run import PretrainConfig
from megapipe.config.zero import ZeroConfig
from megapipe.training.validate import validate
from tests.support.bert_runs import PRE_NORM, make_bert_config, write_corpus
from tests.support.equality import check_close
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, RankRun, assembled, make_config, run_gpt, write_shard
from tests.support.meshes import run_mesh

MODELS = {
    "gpt2-tied-dropout": replace(
        GPT2_SHAPE, num_layers=3, embedding_dropout=0.1, hidden_dropout=0.1, attention_dropout=0.1
    ),
    "llama-untied": replace(LLAMA_SHAPE, num_layers=4),
}
STEPS = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("corpus"))


def config_of(corpus: str, model: str, sizes: dict[str, int], schedule: dict[str, Any], **zero: Any) -> PretrainConfig:
    layout = {name: sizes.get(name, 1) for name in ("data", "pipeline", "tensor")}
    config = make_config(corpus, MODELS[model], parallel=layout, schedule=schedule)
    config.zero = ZeroConfig(**zero)
    return config


@cache
def one_process(corpus: str, model: str) -> RankRun:
    return run_mesh({}, run_gpt, config_of(corpus, model, {}, {}), STEPS)[0]


DATA = {"data": 2}
BOTH = {"data": 2, "pipeline": 2}
CASES: list[tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = [
    (DATA, {"name": "1f1b"}, {"stage": 1}),
    (DATA, {"name": "1f1b"}, {"stage": 2}),
    (DATA, {"name": "1f1b"}, {"stage": 3}),
    (DATA, {"name": "modular", "chunks": 5}, {"stage": 3}),
    (BOTH, {"name": "gpipe"}, {"stage": 1}),
    (BOTH, {"name": "gpipe"}, {"stage": 3, "weight_buffers": 1, "gradient_buffers": 1}),
    (BOTH, {"name": "1f1b", "two_bp": True}, {"stage": 2, "gradient_buffers": 1}),
    (BOTH, {"name": "interleaved_1f1b"}, {"stage": 3}),
    (BOTH, {"name": "modular"}, {"stage": 2}),
    (BOTH, {"name": "zb_h1"}, {"stage": 3}),
    (BOTH, {"name": "zb_v"}, {"stage": 1}),
]


def each_with_one_model(cases: list[Any]) -> list[Any]:
    """Every case with every model; with the one or the other, in turn, among the fast tests."""
    found = []
    for number, case in enumerate(cases):
        for index, model in enumerate(MODELS):
            found.append(pytest.param(*case, model, marks=[] if number % 2 == index else [pytest.mark.exhaustive]))
    return found


@pytest.mark.parametrize(("sizes", "schedule", "zero", "model"), each_with_one_model(CASES))
def test_shared_state_trains_what_one_process_trains(
    corpus: str, sizes: dict[str, int], schedule: dict[str, Any], zero: dict[str, Any], model: str
) -> None:
    config = config_of(corpus, model, sizes, schedule, **zero)
    check_close(run_mesh(sizes, run_gpt, config, STEPS), one_process(corpus, model), 1e-5)


@pytest.mark.parametrize(
    ("sizes", "precision", "model"),
    [
        (DATA, "bf16", "llama-untied"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in itertools.product((DATA, BOTH), ("fp32", "bf16"), MODELS)
            if case != (DATA, "bf16", "llama-untied")
        ),
    ],
)
def test_two_replicas_get_the_bits_of_plain_ones(
    corpus: str, sizes: dict[str, int], precision: str, model: str
) -> None:
    """Two numbers have one sum in any order. Only the gradient norm is added up in other parts, so none is taken."""
    runs = []
    for stage in (0, 1):
        config = config_of(corpus, model, sizes, {"name": "1f1b"}, stage=stage)
        config.optimizer = replace(config.optimizer, clip_norm=None)
        config.training = replace(config.training, precision=precision)
        runs.append(run_mesh(sizes, run_gpt, config, STEPS))
    plain, shared = runs
    for rank, expected in zip(shared, plain, strict=True):
        assert [result.loss for result in rank.results] == [result.loss for result in expected.results]
        norms = [result.gradient_norm for result in expected.results]
        assert [result.gradient_norm for result in rank.results] == pytest.approx(norms, rel=1e-6)
    for kind in ("gradients", "weights"):
        found, wanted = (assembled([getattr(rank, kind) for rank in ranks]) for ranks in (shared, plain))
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 3},
        *(
            pytest.param(zero, marks=pytest.mark.exhaustive)
            for zero in ({"stage": 2, "reduce_dtype": "bf16"}, {"stage": 1})
        ),
    ],
    ids=str,
)
def test_hybrid_shards_train_what_one_process_trains(corpus: str, zero: dict[str, Any]) -> None:
    """Four replicas, two copies of the state."""
    sizes = {"data": 4}
    config = config_of(corpus, "gpt2-tied-dropout", sizes, {"name": "1f1b"}, shard_size=2, **zero)
    ranks = run_mesh(sizes, run_gpt, config, STEPS)
    expected = one_process(corpus, "gpt2-tied-dropout")
    if "reduce_dtype" not in zero:
        check_close(ranks, expected, 1e-5)
        return
    losses = [result.loss for result in expected.results]
    for rank in ranks:
        assert [result.loss for result in rank.results] == [result.loss for result in ranks[0].results]
    assert [result.loss for result in ranks[0].results] == pytest.approx(losses, rel=1e-3)
    assembled([rank.weights for rank in ranks])


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.exhaustive) for stage in (1, 2))])
def test_bert_shares_state_too(tmp_path: Path, stage: int) -> None:
    data = write_corpus(tmp_path)
    (expected,) = run_mesh({}, run_gpt, make_bert_config(data, PRE_NORM), STEPS)
    config = make_bert_config(data, PRE_NORM, parallel=BOTH, zero={"stage": stage})
    check_close(run_mesh(BOTH, run_gpt, config, STEPS), expected, 1e-5)


@pytest.mark.parametrize(
    ("schedule", "method"),
    [
        ("zb_h1", "selective"),
        *(pytest.param("1f1b", method, marks=pytest.mark.exhaustive) for method in ("full", "selective")),
    ],
)
def test_what_runs_again_finds_its_weights(corpus: str, schedule: str, method: str) -> None:
    """In the weight half of a split backward too, which comes when its unit's weights are released."""
    config = config_of(corpus, "gpt2-tied-dropout", BOTH, {"name": schedule}, stage=3)
    config.recompute = replace(config.recompute, method=method)  # type: ignore[arg-type]
    check_close(run_mesh(BOTH, run_gpt, config, STEPS), one_process(corpus, "gpt2-tied-dropout"), 1e-5)


def test_the_example_fits_the_ranks_of_its_launch_line() -> None:
    root = Path(__file__).resolve().parents[2]
    path = root / "examples/parallel/zero.yaml"
    line = r"megapipe train -n (\d+) --config (\S+)"
    found = re.search(line, path.read_text())
    assert found is not None
    assert found[2] == path.stem
    config = parse(["--config", str(path)])
    validate(config, int(found[1]))
    assert config.schedule.chunks == config.model.num_layers + 2


def test_what_cannot_be_shared_is_told() -> None:
    for sizes, schedule, zero, message in (
        ({}, {}, {"stage": 1}, r"zero.stage is 1 but there is only one replica of the weights"),
        ({"data": 4}, {}, {"stage": 1, "shard_size": 3}, r"zero.shard_size 3 does not divide the 4 replicas"),
        ({"data": 4}, {}, {"stage": 1, "shard_size": 1}, r"zero.shard_size is 1; it must be at least 2"),
        ({"data": 2}, {}, {"stage": 3, "weight_buffers": 0}, r"zero.weight_buffers is 0; it must be at least 1"),
        ({"data": 2}, {}, {"stage": 1, "gradient_buffers": 3}, r"gradient_buffers is 3 but zero.stage 1 does"),
        ({"data": 2}, {}, {"reduce_dtype": "bf16"}, r"zero.reduce_dtype is bf16 but zero.stage 0 does"),
    ):
        config = config_of("corpus", "gpt2-tied-dropout", sizes, schedule, **zero)
        config.optimizer = replace(config.optimizer, clip_norm=None)
        with pytest.raises(ConfigError, match=message):
            validate(config, sizes.get("data", 1))
