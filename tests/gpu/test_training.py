"""Training on one GPU: against the CPU, and a pipeline of threads against one process."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megapipe.config.run import PretrainConfig
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, assembled, make_config, run_gpt, write_shard
from tests.support.meshes import run_threads

pytestmark = pytest.mark.gpu

MODELS = {"gpt2": GPT2_SHAPE, "llama": LLAMA_SHAPE}


def config_of(folder: Path, model: str, precision: str = "fp32") -> PretrainConfig:
    return make_config(write_shard(folder), MODELS[model], training={"precision": precision})


def losses(config: PretrainConfig, sizes: dict[str, int], device: str, steps: int = 5) -> list[float]:
    """Losses of a run whose ranks are threads on one device."""
    return [result.loss for result in run_threads(sizes, run_gpt, config, steps, device=device)[0].results]


@pytest.mark.parametrize("model", MODELS)
def test_a_gpu_follows_the_cpu(tmp_path: Path, model: str) -> None:
    config = config_of(tmp_path, model)
    assert losses(config, {}, "cuda") == pytest.approx(losses(config, {}, "cpu"), rel=1e-4)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "interleaved_1f1b"])
def test_a_pipeline_of_threads_equals_one_process(tmp_path: Path, schedule: str) -> None:
    config = config_of(tmp_path, "gpt2")
    config.parallel.pipeline, config.schedule.name = 2, schedule
    ranks = run_threads({"pipeline": 2}, run_gpt, config, 5, device="cuda")
    config.parallel.pipeline, config.schedule.name = 1, "1f1b"
    (alone,) = run_threads({}, run_gpt, config, 5, device="cuda")
    actual = assembled([rank.weights for rank in ranks])
    for name, expected in assembled([alone.weights]).items():
        torch.testing.assert_close(actual[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_of_threads_share_their_state(tmp_path: Path, stage: int) -> None:
    config = config_of(tmp_path, "gpt2")
    config.zero.stage = stage
    actual = losses(config, {"data": 2}, "cuda")
    config.zero.stage = 0
    assert actual == pytest.approx(losses(config, {}, "cuda"), rel=1e-4)


def test_bf16_learns_as_fp32_does(tmp_path: Path) -> None:
    expected = losses(config_of(tmp_path, "gpt2"), {}, "cuda", steps=20)
    actual = losses(config_of(tmp_path, "gpt2", "bf16"), {}, "cuda", steps=20)
    assert actual == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("window", [None, 7])
def test_documents_are_kept_apart_as_by_the_cpus_mask(tmp_path: Path, window: int | None) -> None:
    """By blocks of flex_attention here, whose heads have at least 16 channels, by a mask there."""
    shape = replace(LLAMA_SHAPE, head_size=16, sliding_window=window)
    config = make_config(write_shard(tmp_path), shape, data={"isolate_documents": True})
    assert losses(config, {}, "cuda") == pytest.approx(losses(config, {}, "cpu"), rel=1e-4)
