"""Sequence parallelism beside what else a run may have, and against plain tensor parallelism.

Where two ranks add, no sum over channels is reordered against plain tensor parallelism: losses of the first step and
gradients of all matrices and tables are the same bits. Vectors that every rank holds whole (norms, biases behind
row-parallel products) are sums over tokens, which are taken in another order.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.engine.step import StepInput
from megapipe.parallel.groups import Group
from megapipe.parallel.mesh import Mesh
from megapipe.schedules import build
from megapipe.schedules.text import dumps
from megapipe.spec.layers import model_layers
from megapipe.training.evaluation import Evaluator
from megapipe.training.families import family_of
from megapipe.training.generation_request import on_layout
from megapipe.training.records import EvaluationRecord
from megapipe.training.replica import Replica
from megapipe.training.sources import open_loader, open_samples
from megapipe.training.validate import validate
from tests.checkpoint.runs import config_in
from tests.checkpoint.runs import run as run_saving
from tests.distributed.test_never_flushing import trained
from tests.layers.test_sequence_products import WatchedGroup
from tests.support.equality import check_close
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, assembled, make_config, run_gpt, write_shard
from tests.support.live_bytes import LiveBytes
from tests.support.meshes import run_mesh

DROPOUT = replace(GPT2_SHAPE, embedding_dropout=0.1, hidden_dropout=0.1, attention_dropout=0.1)
MODELS = {"gpt2": DROPOUT, "llama": LLAMA_SHAPE}
STEPS = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("corpus"))


def config_of(corpus: str, model: str, sizes: dict[str, int], **groups: dict[str, Any]) -> PretrainConfig:
    sequence = {"sequence": True} if "tensor" in sizes else {}
    groups["parallel"] = {**sizes, **sequence, **groups.get("parallel", {})}
    return make_config(corpus, MODELS[model], **groups)


@pytest.mark.parametrize("model", ["gpt2", pytest.param("llama", marks=pytest.mark.exhaustive)])
def test_matrices_have_the_gradients_of_tensor_parallelism_bit_for_bit(corpus: str, model: str) -> None:
    sizes = {"tensor": 2}
    config = config_of(corpus, model, sizes)
    ranks = run_mesh(sizes, run_gpt, config, 1)
    plain = run_mesh(sizes, run_gpt, replace(config, parallel=replace(config.parallel, sequence=False)), 1)
    assert [rank.results[0].loss for rank in ranks] == [rank.results[0].loss for rank in plain]
    found, expected = (assembled([rank.gradients for rank in each]) for each in (ranks, plain))
    matrices = [name for name, gradient in expected.items() if gradient.dim() > 1]
    assert len(matrices) >= 2 * 4 + 2
    for name in matrices:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("schedule", ["2bw", pytest.param("pipedream", marks=pytest.mark.exhaustive)])
def test_schedules_that_never_flush(corpus: str, schedule: str) -> None:
    """Against the same recursion on whole samples; 2bw's sums hide beside the next step's actions."""
    sizes = {"pipeline": 2, "tensor": 2}
    clip = {"clip_norm": None if schedule == "pipedream" else 0.3}
    config = config_of(corpus, "llama", sizes, schedule={"name": schedule}, optimizer=clip)
    expected = run_mesh(
        {"pipeline": 2},
        trained,
        config_of(corpus, "llama", {"pipeline": 2}, schedule={"name": schedule}, optimizer=clip),
        (),
        False,
    )
    for rank in run_mesh(sizes, trained, config, (2,), False):
        losses, wanted = ([result.loss for result in each.results] for each in (rank, expected[0]))
        assert losses == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("model", [pytest.param("gpt2", marks=pytest.mark.exhaustive), "llama"])
def test_documents_are_kept_apart(corpus: str, model: str) -> None:
    data = {"isolate_documents": True}
    (expected,) = run_mesh({}, run_gpt, config_of(corpus, model, {}, data=data), STEPS)
    sizes = {"tensor": 2, "pipeline": 2}
    check_close(run_mesh(sizes, run_gpt, config_of(corpus, model, sizes, data=data), STEPS), expected, 1e-5)


@pytest.mark.slow
def test_bf16_follows_one_process(corpus: str) -> None:
    runs = []
    for sizes in ({}, {"tensor": 2}):
        config = config_of(corpus, "gpt2", sizes, training={"precision": "bf16"})
        runs.append([result.loss for result in run_mesh(sizes, run_gpt, config, STEPS)[0].results])
    assert runs[1] == pytest.approx(runs[0], rel=2e-2)


def evaluated(mesh: Mesh, config: PretrainConfig) -> EvaluationRecord:
    replica = Replica(config, mesh, family_of(config).layers)
    return Evaluator(config, mesh, replica, open_samples(config, "validation")).run(3)


def test_evaluation_runs_on_shards_too(corpus: str) -> None:
    options = {"evaluation": {"every": 1, "samples": 8}}
    (expected,) = run_mesh({}, evaluated, config_of(corpus, "gpt2", {}, **options))
    for record in run_mesh({"tensor": 2}, evaluated, config_of(corpus, "gpt2", {"tensor": 2}, **options)):
        assert record.loss_tokens == expected.loss_tokens
        assert record.loss == pytest.approx(expected.loss, rel=1e-6)


def test_generation_takes_whole_samples(corpus: str) -> None:
    """Its passes have few tokens, which need not divide."""
    config = config_of(corpus, "gpt2", {"tensor": 2})
    assert config.parallel.sequence
    assert not on_layout(config, 2, tensor=2, pipeline=None, device="cpu").parallel.sequence


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "resumed"), [(True, False), (False, True)])
def test_a_run_goes_on_with_and_without(tmp_path: Path, corpus: str, saved: bool, resumed: bool) -> None:
    """A checkpoint holds weights, which are the same."""

    def configured(folder: str, sequence: bool, **checkpoint: Any) -> PretrainConfig:
        parallel = {"tensor": 2, "sequence": sequence}
        return config_in(tmp_path / folder, corpus, DROPOUT, parallel=parallel, checkpoint=checkpoint)

    whole = run_saving({"tensor": 2}, configured("whole", saved, every=None), 20)
    run_saving({"tensor": 2}, configured("parts", saved), 10)
    again = run_saving({"tensor": 2}, configured("parts", resumed), 20)
    assert again.start == 10
    assert again.losses[:10] == whole.losses[:10]
    assert [loss for _, loss in again.losses] == pytest.approx([loss for _, loss in whole.losses], rel=1e-4)


def sums_of_a_step(mesh: Mesh, config: PretrainConfig) -> list[int]:
    """Elements of each all-reduce that the engine asks the tensor group for in one step."""
    found: list[int] = []

    class Watched(WatchedGroup):
        def count(self, operation: str, elements: float) -> None:
            if operation == "all_reduce":
                found.append(round(elements / 2))

    group = mesh.group

    def watched(*names: str) -> Group:
        return Watched(group(*names)) if names == ("tensor",) else group(*names)

    mesh.group = watched  # type: ignore[method-assign]
    run_gpt(mesh, config, 1)
    return found


@pytest.mark.parametrize("micro_size", [pytest.param(1, marks=pytest.mark.exhaustive), 4])
def test_whole_vectors_are_summed_once_a_step_whatever_the_micro_batches(corpus: str, micro_size: int) -> None:
    """One exchange a unit: positions; of each block two norms and two biases behind row-parallel products; a norm.

    Each of the micro-batches has an all-reduce of its own for nothing.
    """
    config = config_of(corpus, "gpt2", {"tensor": 2}, batch={"micro_size": micro_size})
    hidden = config.model.hidden_size
    wanted = [config.model.max_positions * hidden, *[6 * hidden] * 2, 2 * hidden]
    for found in run_mesh({"tensor": 2}, sums_of_a_step, config):
        assert sorted(found) == sorted(wanted)


def peak(mesh: Mesh, config: PretrainConfig) -> tuple[int, int]:
    """The most bytes that a step made and held at once, its second time; elements of a message between stages."""
    config = replace(config, parallel=replace(config.parallel, data=1, timeout_seconds=30.0))
    replica = Replica(config, mesh, model_layers(config.model))
    batch = open_loader(config, mesh, replica, open_samples(config, "train")).load(0)
    replica.engine.run(StepInput(0, batch.contexts, batch.token_counts, 1e-3))
    with LiveBytes() as live:
        replica.engine.run(StepInput(1, batch.contexts, batch.token_counts, 1e-3))
    stage = next(iter(replica.stages.values()))
    (message,) = stage.outputs or stage.inputs
    return live.peak, message.allocate(torch.device("cpu")).numel()


@pytest.mark.slow
def test_stages_hold_less_and_send_shards(corpus: str) -> None:
    """gpipe keeps the activations of all micro-batches, of which the paper's 10 of 34 bytes are no longer whole."""
    sizes = {"pipeline": 2, "tensor": 2}
    config = config_of(corpus, "gpt2", sizes, schedule={"name": "gpipe"}, batch={"micro_size": 2})
    plain = replace(config, parallel=replace(config.parallel, sequence=False))
    sharded, whole = run_mesh(sizes, peak, config), run_mesh(sizes, peak, plain)
    for (less, half), (more, full) in zip(sharded, whole, strict=True):
        assert less < 0.9 * more
        assert 2 * half == full == 2 * config.data.sequence_length * config.model.hidden_size


def test_a_lowered_schedule_has_to_sum_gradients(tmp_path: Path, corpus: str) -> None:
    file = tmp_path / "schedule.txt"
    sizes = {"tensor": 2}
    config = config_of(corpus, "llama", sizes, schedule={"name": "1f1b", "file": str(file)})
    file.write_text(dumps(build("1f1b", 1, 8, units_per_stage=[4])))
    with pytest.raises(
        Exception, match=r"sums of gradients over shards of the tokens or replicas no, but this run has"
    ):
        run_mesh(sizes, run_gpt, config, 1)
    file.write_text(dumps(build("1f1b", 1, 8, units_per_stage=[4], data_parallel=True)))
    named = replace(config, schedule=replace(config.schedule, file=""))
    (found, _), (expected, _) = run_mesh(sizes, run_gpt, config, 2), run_mesh(sizes, run_gpt, named, 2)
    assert [result.loss for result in found.results] == [result.loss for result in expected.results]


def test_what_cannot_be_shared_is_told() -> None:
    for parallel, length, message in (
        ({"sequence": True}, 16, r"parallel.tensor is 1; .*set parallel.tensor to 2 or more"),
        ({"sequence": True, "tensor": 2}, 15, r"data.sequence_length 15 is not divisible by parallel.tensor 2"),
        ({"sequence": True, "tensor": 2, "sequence_chunks": 3}, 16, r"16 .* parallel.tensor 2 x .*chunks 3.*of 6"),
        ({"sequence_chunks": 2, "tensor": 2}, 16, r"sequence_chunks is 2 but parallel.sequence is false"),
        ({"sequence": True, "tensor": 2, "sequence_chunks": 0}, 16, r"sequence_chunks is 0; it must be at least 1"),
    ):
        config = make_config("corpus", GPT2_SHAPE, parallel=parallel, data={"sequence_length": length})
        with pytest.raises(ConfigError, match=message):
            validate(config, parallel.get("tensor", 1))
