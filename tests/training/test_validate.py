"""Every rule between settings is broken once; the message names the value and the fix."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.config import ConfigError
from megapipe.config.model import ModelConfig
from megapipe.config.parallel import ScheduleConfig
from megapipe.config.rope import RopeScaling
from megapipe.config.run import PretrainConfig
from megapipe.layout.batch_plan import data_parallel_size, num_microbatches
from megapipe.layout.scheduling import schedule_name
from megapipe.schedules import GENERATORS, build, order
from megapipe.schedules.registry import find_generator
from megapipe.schedules.text import dumps
from megapipe.training.validation import validate
from tests.schedules.support import TRAINED


def make(**groups: dict[str, Any]) -> PretrainConfig:
    config = PretrainConfig(model=ModelConfig(num_layers=2, hidden_size=64, num_heads=4, max_positions=128))
    config.data = replace(config.data, prefix="shard", sequence_length=128)
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in groups.items()})


def test_a_good_configuration_passes() -> None:
    config = make(parallel={"pipeline": 2, "tensor": 2}, batch={"global_size": 8, "micro_size": 2})
    validate(config, world_size=8)
    assert data_parallel_size(config, 8) == 2
    assert num_microbatches(config, 8) == 2
    config.parallel = replace(config.parallel, context=2)
    validate(config, world_size=16)
    assert data_parallel_size(config, 16) == 2


@pytest.mark.parametrize(
    ("groups", "world_size", "parts"),
    [
        ({"model": {"num_heads": 5}}, 1, ["hidden_size 64", "num_heads 5", "head_size"]),
        ({"model": {"num_heads": 4, "num_kv_heads": 3}}, 1, ["num_heads 4", "num_kv_heads 3"]),
        ({"model": {"attention": "sdpa", "attention_dropout": 0.1}}, 1, ["'sdpa'", "'unfused'", "attention_dropout"]),
        ({"model": {"positions": "rotary", "head_size": 7}}, 1, ["head_size is 7", "even"]),
        ({"model": {"rope_scaling": RopeScaling(kind="linear")}}, 1, ["'linear'", "'learned'", "'rotary'"]),
        ({"data": {"prefix": ""}}, 1, ["data.prefix is empty", "megapipe preprocess"]),
        ({"data": {"blend": {"other": 1.0}}}, 1, ["data.prefix is 'shard'", "data.blend has 1", "leave one"]),
        ({"data": {"order": "megatron", "pack": "best_fit"}}, 1, ["data.pack is best_fit", "megatron", "concat"]),
        ({"data": {"fim_rate": 0.5}}, 1, ["data.fim_tokens is None", "three different ids"]),
        ({"data": {"fim_rate": 0.5, "fim_tokens": [1, 2, 50257]}}, 1, ["50257]", "below model.vocabulary_size 50257"]),
        ({"data": {"fim_tokens": [1, 2, 3]}}, 1, ["fim_tokens is [1, 2, 3]", "fim_rate is 0"]),
        ({"data": {"sequence_length": 129}}, 1, ["129", "max_positions 128"]),
        ({"parallel": {"tensor": 3}}, 3, ["num_heads 4", "parallel.tensor 3", "1, 2, 4"]),
        ({"parallel": {"pipeline": 2}}, 3, ["world size 3", "megapipe train -n 2"]),
        ({"parallel": {"data": 2}}, 1, ["parallel.data 2", "world size is 1", "megapipe train -n 2"]),
        ({"parallel": {"pipeline": 5}}, 5, ["parallel.pipeline 5", "4 layers", "at most 4"]),
        (
            {"parallel": {"pipeline": 3}, "schedule": {"name": "interleaved_1f1b"}},
            3,
            ["parallel.pipeline 3", "2 stages per rank", "4 layers", "at most 2"],
        ),
        (
            {"schedule": {"name": "2bw"}, "parallel": {"pipeline": 2}, "batch": {"global_size": 1}},
            2,
            ["2bw", "1 micro-batches on 2 ranks", "weights that do not exist yet", "at least 2 micro-batches"],
        ),
        ({"schedule": {"name": "pipedream"}}, 1, ["optimizer.clip_norm 1.0", "8 times per step", "null", "2bw"]),
        ({"batch": {"global_size": 6, "micro_size": 4}}, 1, ["global_size 6", "micro_size 4", "4 or 8"]),
        ({"batch": {"ramp_samples": 9}}, 1, ["ramp_samples is 9", "ramp_start is null"]),
        ({"batch": {"ramp_start": 2}}, 1, ["ramp_samples is 0", "ramp_start 2"]),
        ({"batch": {"ramp_start": 9, "ramp_samples": 9}}, 1, ["ramp_start is 9", "global_size 8"]),
        ({"batch": {"ramp_start": 3, "ramp_samples": 9}}, 2, ["ramp_start 3", "data-parallel size 2", "2 or 4"]),
        ({"checkpoint": {"keep_every": 5, "keep_last": None}}, 1, ["keep_every is 5", "keep_last null", "leave"]),
        ({"schedule": {"name": "1f2b"}}, 1, ["1f2b", "1f1b"]),
        ({"parallel": {"pipeline": 2, "layers_per_stage": [1, 2]}}, 2, ["layers_per_stage", "[1, 2]", "with sum 4"]),
        ({"schedule": {"name": "gpipe", "chunks": 2}}, 1, ["gpipe", "chunks"]),
        ({"optimizer": {"warmup_steps": 60, "decay_steps": 50}}, 1, ["warmup_steps 60", "50"]),
        ({"offload": {"every": 2}}, 1, ["need offload.activations blocks"]),
        ({"offload": {"prefetch": 2}}, 1, ["offload.prefetch needs offload.activations blocks or auto"]),
        ({"offload": {"activations": "auto"}}, 1, ["auto needs offload.memory"]),
        ({"offload": {"weights": True}}, 1, ["offload.weights needs offload.optimizer"]),
        ({"offload": {"weight_buffers": 1}}, 1, ["offload.weight_buffers needs offload.weights"]),
        ({"offload": {"activations": "blocks", "memory": 1.0}}, 1, ["need offload.activations auto"]),
        (
            {"offload": {"activations": "auto", "memory": 1.0}, "recompute": {"method": "full"}},
            1,
            ["full cannot be combined with offload"],
        ),
        ({"model": {"num_experts": 4, "experts_per_token": 5}}, 1, ["experts_per_token is 5", "model.num_experts 4"]),
        (
            {"model": {"num_experts": 4, "experts_per_token": 1}},
            1,
            ["would learn nothing; set model.normalize_expert_shares false"],
        ),
        (
            {"model": {"num_experts": 3}, "parallel": {"tensor": 2}},
            2,
            ["model.num_experts 3 is not divisible by parallel.tensor 2"],
        ),
        *(
            ({"model": {"num_experts": 4}, group: values}, 1, [f"{words} cannot be combined with model.num_experts 4"])
            for group, values, words in (
                ("training", {"fp8": "tensorwise"}, "training.fp8 tensorwise"),
                ("training", {"compile": True}, "training.compile"),
                ("optimizer", {"name": "muon"}, "optimizer.name muon"),
                ("training", {"precision": "bf16", "master_weights": False}, "training.master_weights false"),
            )
        ),
        ({"parallel": {"context": 2}}, 3, ["world size 3", "parallel.context 2", "megapipe train -n 2"]),
        ({"parallel": {"context": 2, "data": 2}}, 2, ["parallel.data 2", "parallel.context 2", "= 4 ranks"]),
        (
            {"parallel": {"context": 2}, "data": {"sequence_length": 126}},
            2,
            ["sequence_length 126", "divisible by 4", "parallel.context 2", "head_tail", "124 or 128"],
        ),
        (
            {"parallel": {"context": 3, "context_attention": "all_to_all"}, "data": {"sequence_length": 126}},
            3,
            ["num_heads 4", "parallel.context 3", "all_to_all", "set it to ring", "1, 2, 4"],
        ),
        (
            {"parallel": {"context": 2}, "model": {"attention": "flex"}, "data": {"isolate_documents": True}},
            2,
            ["model.attention is 'flex'", "ring", "all_to_all"],
        ),
    ],
)
def test_each_rule_names_value_rule_and_fix(
    groups: dict[str, dict[str, Any]], world_size: int, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(make(**groups), world_size)
    for part in parts:
        assert part in str(caught.value)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        validate(make(model={"num_heads": 5}, optimizer={"learning_rate": -1.0}), world_size=1)
    assert len(caught.value.problems) == 2


def test_recomputed_logits_go_with_whole_backwards_alone(tmp_path: Path) -> None:
    """This applies to a schedule in a file too, whatever its name."""
    refusal = r"recompute\.logits is true.* splits the backward.*recompute\.logits false.* 1f1b without"
    for name in TRAINED:
        splits = find_generator(name).splits
        config = make(
            schedule={"name": name},
            recompute={"logits": True},
            optimizer={"clip_norm": None},
            model={"tie_embeddings": False},
        )
        configs = [config]
        if name not in ("pipedream", "2bw"):
            file = tmp_path / f"{name}.txt"
            file.write_text(dumps(order(name, 1, 8)), encoding="utf-8")
            configs.append(replace(config, schedule=replace(ScheduleConfig(), name=str(file))))
        for each in configs:
            with pytest.raises(ConfigError, match=refusal) if splits else nullcontext():
                validate(each, world_size=1)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (dumps(build("1f1b", 2, 4)), "it was made for units (layers) by stage [1, 1], but this run has [3, 1]"),
        (
            dumps(order("1f1b", 2, 4)).replace("F1.1 B1.1", "B1.1 F1.1"),
            "line 10), BACKWARD stage 1, micro-batch 1: it needs",
        ),
        (
            dumps(order("1f1b", 2, 4)).replace("F1.1 B1.1", "F1.1 F1.1"),
            "line 10), FORWARD stage 1, micro-batch 1: it app",
        ),
        (dumps(order("1f1b", 2, 4)).replace("stage 1", "stage 1 replica 1"), "does not sum the gradients of copies"),
    ],
)
def test_schedule_files_are_checked_against_the_model_early(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(text.replace("stage 1 replica 1 rank 1", "stage 1 rank 1 replica 1"), encoding="utf-8")
    config = make(
        schedule={"name": str(file)},
        parallel={"pipeline": 2},
        batch={"global_size": 8, "micro_size": 2},
        model={"tie_embeddings": False},
    )
    with pytest.raises(ConfigError) as caught:
        validate(config, world_size=2)
    assert len(caught.value.problems) == 1
    assert problem in caught.value.problems[0]
    assert "\n" not in caught.value.problems[0]
    file.write_text(dumps(order("1f1b", 2, 4)).replace("name 1f1b", "name mine"), encoding="utf-8")
    validate(config, world_size=2)
    assert schedule_name(config) == "mine"


def test_files_with_parameters_fit_every_ramp_step(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(GENERATORS["interleaved_1f1b"].text.replace("\nbody", "\nrequire m >= 4\nbody"))
    config = make(
        schedule={"name": str(file), "chunks": 1},
        parallel={"pipeline": 2},
        batch={"global_size": 16, "micro_size": 1, "ramp_start": 4, "ramp_samples": 100},
    )
    validate(config, world_size=2)
    with pytest.raises(ConfigError, match=r"line 8, .*: m >= 4 is required, but false with p = 2, m = 2, chunks = 1"):
        validate(replace(config, batch=replace(config.batch, micro_size=2)), world_size=2)
    file.write_text(dumps(order("1f1b", 2, 16)))
    with pytest.raises(ConfigError, match=r"but batch\.ramp_start changes it"):
        validate(config, world_size=2)
