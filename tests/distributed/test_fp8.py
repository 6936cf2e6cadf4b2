"""Training with products in fp8: alike on every pipeline, close on tensor ranks, and near to bf16's losses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.layers.fp8 import Fp8Products
from megapipe.layers.linear import Linear
from megapipe.parallel.mesh import Mesh
from megapipe.training.families import family_of
from megapipe.training.kernel_choices import fp8_problems
from megapipe.training.replica import Replica
from megapipe.training.validate import validate
from tests.support.equality import check_bits
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, RankRun, assembled, make_config, run_gpt, write_shard
from tests.support.launch import launch
from tests.support.meshes import run_mesh

MODELS = {"gpt2-tied": replace(GPT2_SHAPE, num_layers=4, hidden_dropout=0.1), "llama-untied": LLAMA_SHAPE}
STEPS = 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("corpus"))


def trained(
    corpus: str, model: str, recipe: str, sizes: dict[str, int], steps: int = STEPS, **groups: dict[str, Any]
) -> list[RankRun]:
    training = {"fp8": recipe, **groups.pop("training", {})}
    layout = {"tensor": sizes.get("tensor", 1), "pipeline": sizes.get("pipeline", 1), **groups.pop("parallel", {})}
    config = make_config(corpus, MODELS[model], parallel=layout, training=training, **groups)
    return run_mesh(sizes, run_gpt, config, steps)


@pytest.mark.parametrize(
    ("model", "recipe"),
    [pytest.param("gpt2-tied", "tensorwise", marks=pytest.mark.exhaustive), ("llama-untied", "rowwise")],
)
def test_pipelines_split_backwards_and_recomputation_give_the_bits_of_one_process(
    corpus: str, model: str, recipe: str
) -> None:
    (expected,) = trained(corpus, model, recipe, {})
    two = {"pipeline": 2}
    check_bits(trained(corpus, model, recipe, two, schedule={"name": "zb_h1"}), expected)
    check_bits(trained(corpus, model, recipe, two, recompute={"method": "full"}), expected)
    selective = {"recompute": {"method": "selective"}, "schedule": {"name": "1f1b", "two_bp": True}}
    check_bits(trained(corpus, model, recipe, two, **selective), expected)


@pytest.mark.slow
def test_bf16_trains_with_fp8_too(corpus: str) -> None:
    bf16 = {"training": {"precision": "bf16"}}
    (expected,) = trained(corpus, "llama-untied", "rowwise", {}, **bf16)
    check_bits(trained(corpus, "llama-untied", "rowwise", {"pipeline": 2}, **bf16), expected)


@pytest.mark.parametrize("model", [pytest.param("gpt2-tied", marks=pytest.mark.exhaustive), "llama-untied"])
def test_tensor_ranks_train_the_same_model_with_agreed_scales(corpus: str, model: str) -> None:
    """A sum in another order may round an operand to its other neighbour, 1/8 away: single elements, so that losses
    stay within 1e-4 and gradients within 1% of one process; scales of each rank's own would be an order worse."""
    (expected,) = trained(corpus, model, "tensorwise", {})
    ranks = trained(corpus, model, "tensorwise", {"tensor": 2})
    for rank in ranks:
        losses = [result.loss for result in rank.results]
        assert losses == pytest.approx([result.loss for result in expected.results], rel=1e-4)
    found, wanted = assembled([rank.gradients for rank in ranks]), assembled([expected.gradients])
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 0.01 * gradient.norm() + 1e-6, name


@pytest.mark.parametrize(
    ("recipe", "chunks", "halves", "within"),
    [
        ("tensorwise", 1, {}, 1e-5),
        pytest.param("rowwise", 1, {"schedule": {"name": "zb_h1"}}, 1e-5, marks=pytest.mark.exhaustive),
        pytest.param("tensorwise", 2, {}, 1e-4, marks=pytest.mark.exhaustive),
    ],
)
def test_shards_of_the_tokens_are_rounded_as_whole_samples_are(
    corpus: str, recipe: str, chunks: int, halves: dict[str, Any], within: float
) -> None:
    """Sums of two ranks' numbers have the same bits scattered, and tokens the same scales gathered; chunks of them
    have finer ones. Only the gradients of what all ranks hold are added up in another order."""
    sizes = {"tensor": 2, "pipeline": 2} if halves else {"tensor": 2}
    plain = trained(corpus, "llama-untied", recipe, sizes, **halves)
    sequence = {"parallel": {"sequence": True, "sequence_chunks": chunks}}
    sharded = trained(corpus, "llama-untied", recipe, sizes, **halves, **sequence)
    losses, wanted = ([result.loss for result in run[0].results] for run in (sharded, plain))
    assert losses == pytest.approx(wanted, rel=within)
    assert (losses[0] == wanted[0]) == (chunks == 1)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_it_learns_nearly_as_fp32_does(corpus: str, recipe: str) -> None:
    (fp8,), (exact,) = (trained(corpus, "llama-untied", each, {}, steps=15) for each in (recipe, "none"))
    losses, wanted = ([result.loss for result in run.results] for run in (fp8, exact))
    assert losses != wanted
    assert losses == pytest.approx(wanted, rel=0.02)
    assert losses[-1] < losses[0] - 0.2


def in_fp8(mesh: Mesh, config: PretrainConfig) -> list[str]:
    """Names of the linear layers of this rank that multiply in fp8."""
    replica = Replica(replace(config, parallel=replace(config.parallel, data=1)), mesh, family_of(config).layers)
    found = []
    for number, stage in replica.stages.items():
        for unit, index in zip(stage.units, replica.layout.ranges[number], strict=True):
            for path, module in unit[0].named_modules():  # type: ignore[attr-defined]
                if isinstance(module, Linear) and isinstance(module.products, Fp8Products):
                    found.append(f"{replica.layout.layers[index].name}.{path}")
    return found


def test_embedding_head_and_kept_blocks_stay_as_they_are(corpus: str) -> None:
    training = {"fp8": "rowwise", "fp8_first_kept": 1, "fp8_last_kept": 2}
    config = make_config(corpus, MODELS["gpt2-tied"], training=training, parallel={"pipeline": 2})
    found = [name for rank in run_mesh({"pipeline": 2}, in_fp8, config) for name in rank]
    assert found == [f"blocks.1.{path}" for path in ("attention.qkv", "attention.output", "mlp.up", "mlp.down")]


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"fp8": "rowwise", "precision": "fp16"}, r"fp8 rowwise already scales every operand .*precision bf16"),
        ({"fp8": "tensorwise", "fp8_first_kept": 2}, r"fp8_first_kept 2 and .*must .* leave some of the 2 blocks"),
        ({"fp8": "tensorwise", "fp8_last_kept": -1}, r"fp8_last_kept -1 must be at least 0"),
        ({"fp8_last_kept": 1}, r"fp8_last_kept 1, but training.fp8 is none"),
    ],
)
def test_what_does_not_go_together_is_told(corpus: str, training: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(make_config(corpus, LLAMA_SHAPE, training=training), 1)


def test_what_a_gpu_cannot_is_told(corpus: str) -> None:
    config = make_config(corpus, LLAMA_SHAPE, training={"fp8": "rowwise"}, parallel={"tensor": 8})
    told = "\n".join(fp8_problems(config, (8, 0)))
    assert "compute capability 8.9 (Ada, Hopper) or later, and this one has 8.0" in told
    assert "results in bf16, but training.precision is fp32" in told
    assert "columns of the attention's output matrix on a rank 4 must be a multiple of 16" in told
    config = make_config(corpus, LLAMA_SHAPE, training={"fp8": "tensorwise"})
    assert fp8_problems(config, (9, 0)) == []
    in_chunks = {"tensor": 2, "sequence": True, "sequence_chunks": 3}
    config = make_config(corpus, LLAMA_SHAPE, training={"fp8": "tensorwise"}, parallel=in_chunks)
    assert "tokens of the smallest chunk (parallel.sequence_chunks)" in "\n".join(fp8_problems(config, (9, 0)))


@pytest.mark.slow
def test_a_run_says_that_it_emulates(tmp_path: Path, corpus: str) -> None:
    done = launch(1, f"--data.prefix={corpus}", "--training.fp8=tensorwise", "--training.steps=2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fp8: tensorwise scales, rounding emulated and products in fp32 (no fp8 units on cpu)" in done.stdout
