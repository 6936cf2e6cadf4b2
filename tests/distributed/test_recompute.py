"""Recomputation changes no bit, under any schedule, and leaves a rank with the inputs that its formula counts."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.config.bert import BertModelConfig
from megapipe.config.errors import ConfigError
from megapipe.config.recompute import RecomputeConfig
from megapipe.config.run import PretrainConfig
from megapipe.engine.step import StepInput
from megapipe.parallel.mesh import Mesh
from megapipe.schedules import build
from megapipe.schedules.command.main import main
from megapipe.schedules.text import dumps
from megapipe.spec.layers import model_layers
from megapipe.training.batches import batch_loader, split_samples
from megapipe.training.kernel_choices import attention_kept
from megapipe.training.replica import Replica
from megapipe.training.validate import validate
from tests.spec.sizes import message_bytes, predicted_bytes
from tests.support.bert_runs import POST_NORM, PRE_NORM, make_bert_config, write_corpus
from tests.support.equality import check_bits, check_close
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, RankRun, make_config, run_gpt, write_shard
from tests.support.launch import launch
from tests.support.live_bytes import LiveBytes
from tests.support.meshes import run_mesh

MODELS = {
    "gpt2-tied-dropout": replace(
        GPT2_SHAPE, num_layers=4, embedding_dropout=0.1, hidden_dropout=0.1, attention_dropout=0.1
    ),
    "llama-untied": replace(LLAMA_SHAPE, num_layers=5),
}
STEPS = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("corpus"))


def config_of(
    corpus: str, model: str, sizes: dict[str, int], recompute: dict[str, Any], **schedule: Any
) -> PretrainConfig:
    layout = {name: sizes.get(name, 1) for name in ("pipeline", "tensor")}
    config = make_config(corpus, MODELS[model], parallel=layout, schedule=schedule)
    config.recompute = RecomputeConfig(**recompute)
    return config


@cache
def kept(corpus: str, model: str, schedule: str = "1f1b", pipeline: int = 1) -> list[RankRun]:
    """A run that keeps everything."""
    config = config_of(corpus, model, {"pipeline": pipeline}, {}, name=schedule)
    return run_mesh({"pipeline": pipeline}, run_gpt, config, STEPS)


FULL = {"method": "full"}
SELECTIVE = {"method": "selective"}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"name": "gpipe"}, FULL),
    ({"name": "1f1b"}, FULL),
    ({"name": "1f1b"}, {**FULL, "every": 2}),
    ({"name": "1f1b"}, {**FULL, "num_blocks": 1}),
    ({"name": "interleaved_1f1b"}, FULL),
    ({"name": "modular"}, {**FULL, "every": 3}),
    ({"name": "1f1b", "two_bp": True}, {**FULL, "every": 2}),
    ({"name": "zb_h1"}, FULL),
    ({"name": "zb_v"}, {**FULL, "every": 2}),
    ({"name": "1f1b"}, SELECTIVE),
    ({"name": "zb_h1"}, SELECTIVE),
    ({"name": "1f1b", "two_bp": True}, {**SELECTIVE, "parts": ["norms"]}),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("schedule", "recompute"), CASES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_what_runs_again_gives_the_bits_of_one_process_that_keeps_all(
    corpus: str, model: str, schedule: dict[str, Any], recompute: dict[str, Any]
) -> None:
    config = config_of(corpus, model, {"pipeline": 2}, recompute, **schedule)
    check_bits(run_mesh({"pipeline": 2}, run_gpt, config, STEPS), kept(corpus, model)[0])


@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
def test_stale_gradients_are_the_same_ones(corpus: str, schedule: str) -> None:
    config = config_of(corpus, "llama-untied", {"pipeline": 2}, FULL, name=schedule)
    plain = config_of(corpus, "llama-untied", {"pipeline": 2}, {}, name=schedule)
    for each in (config, plain):
        each.optimizer = replace(each.optimizer, clip_norm=None if schedule == "pipedream" else 1.0)
    found, expected = (run_mesh({"pipeline": 2}, fed, each) for each in (config, plain))
    assert found == expected


def fed(mesh: Mesh, config: PretrainConfig) -> list[tuple[float, float]]:
    """Losses and gradient norms of a schedule that never flushes."""
    config = replace(config, parallel=replace(config.parallel, data=1, timeout_seconds=30.0))
    replica = Replica(config, mesh, model_layers(config.model))
    loader = batch_loader(config, mesh, replica, split_samples(config, "train"))
    results = []
    for step in range(STEPS):
        batch = loader.load(step * config.batch.global_size)
        results += replica.engine.feed(StepInput(step, batch.contexts, batch.token_counts, 1e-2))
    results += replica.engine.drain()
    return [(result.loss, result.gradient_norm) for result in results]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("model", [PRE_NORM, POST_NORM], ids=["pre", "post"])
@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", FULL), ("zb_h1", FULL), ("zb_h1", SELECTIVE)], ids=str)
def test_bert_runs_again_too(tmp_path: Path, schedule: str, recompute: dict[str, Any], model: BertModelConfig) -> None:
    layout, data = {"pipeline": 2}, write_corpus(tmp_path)
    config = make_bert_config(data, model, parallel=layout, schedule={"name": schedule}, recompute=recompute)
    (expected,) = run_mesh({}, run_gpt, make_bert_config(data, model), STEPS)
    check_bits(run_mesh(layout, run_gpt, config, STEPS), expected)


def test_a_traced_run_is_laid_over(tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--recompute.method=full", "--parallel.pipeline=2", "--training.steps=6", "--profile.trace=trace"]
    done = launch(2, f"--data.prefix={corpus}", *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert main(["overlay", str(tmp_path / "trace"), "-o", str(tmp_path / "overlay.html")]) == 0
    assert "recompute" in capsys.readouterr().out


def test_what_is_kept_is_told(corpus: str) -> None:
    config = config_of(corpus, "llama-untied", {}, SELECTIVE)
    cpu = torch.device("cpu")
    assert "runs fused here" in str(attention_kept(config, cpu))
    for other in ({**SELECTIVE, "parts": ["mlp"]}, FULL):
        assert attention_kept(replace(config, recompute=RecomputeConfig(**other)), cpu) is None
    assert attention_kept(replace(config, model=replace(config.model, attention="unfused")), cpu) is None
    config.training = replace(config.training, compile=True)
    with pytest.raises(ConfigError, match=r"selective cannot be combined with training.compile"):
        validate(config, 1)


def test_what_cannot_run_again_is_told(tmp_path: Path) -> None:
    file = tmp_path / "schedule.txt"
    file.write_text(dumps(build("1f1b", 1, 8, units_per_stage=[6])))
    for recompute, schedule, message in (
        ({"every": 0}, {}, r"recompute.every is 0; it must be at least 1"),
        ({**FULL, "num_blocks": 0}, {}, r"recompute.num_blocks is 0"),
        ({**SELECTIVE, "parts": []}, {}, r"recompute.parts is empty"),
        ({**SELECTIVE, "every": 2}, {}, r"need recompute.method full, and it is selective; set it to full"),
        (FULL, {"name": "1f1b", "file": str(file)}, r"is lowered and defines recomputation itself"),
    ):
        config = config_of("corpus", "gpt2-tied-dropout", {}, recompute, **schedule)
        with pytest.raises(ConfigError, match=message):
            validate(config, 1)


@pytest.mark.parametrize("sizes", [{"data": 2, "pipeline": 2}, {"tensor": 2, "pipeline": 2}], ids=str)
def test_replicas_and_tensor_ranks_run_again_too(corpus: str, sizes: dict[str, int]) -> None:
    config = config_of(corpus, "gpt2-tied-dropout", sizes, FULL, name="1f1b")
    config.parallel = replace(config.parallel, data=sizes.get("data", 1))
    check_close(run_mesh(sizes, run_gpt, config, STEPS), kept(corpus, "gpt2-tied-dropout")[0], 1e-5)


def peak(mesh: Mesh, config: PretrainConfig) -> int:
    """The most bytes that a step made and held at once, its second time."""
    config = replace(config, parallel=replace(config.parallel, data=1))
    replica = Replica(config, mesh, model_layers(config.model))
    loader = batch_loader(config, mesh, replica, split_samples(config, "train"))
    batch = loader.load(0)
    replica.engine.run(StepInput(0, batch.contexts, batch.token_counts, 1e-3))
    with LiveBytes() as live:
        replica.engine.run(StepInput(1, batch.contexts, batch.token_counts, 1e-3))
    return live.peak


@pytest.mark.parametrize(
    ("every", "inputs", "inside"),
    [(2, 2, 2), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((1, 4, 1), (4, 1, 4)))],
)
def test_a_rank_keeps_inputs_and_one_run_of_blocks(corpus: str, every: int, inputs: int, inside: int) -> None:
    """gpipe keeps the inputs of all micro-batches and of one the activations of what ran again; the heads' activations
    are kept throughout."""
    model = replace(GPT2_SHAPE, num_layers=4, attention="unfused")
    config = make_config(corpus, model, schedule={"name": "gpipe"})
    config.recompute = RecomputeConfig(method="full", every=every)
    microbatches = config.batch.global_size // config.batch.micro_size
    shape = config.batch.micro_size, config.data.sequence_length
    stream = message_bytes(model, *shape, "fp32")
    layers = {layer.kind: predicted_bytes(model, layer, *shape, "fp32", "unfused") for layer in model_layers(model)}
    expected = microbatches * (inputs * stream + layers["head"]) + inside * layers["block"]
    found = run_mesh({}, peak, config)[0]
    assert 0.9 * expected < found < 1.1 * expected + 2 * stream
    everything = replace(config, recompute=RecomputeConfig())
    assert run_mesh({}, peak, everything)[0] > microbatches * 4 * layers["block"]
