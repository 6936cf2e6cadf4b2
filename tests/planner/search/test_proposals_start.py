"""Proposals of a search are started: each one trains as one process does, in the predicted bytes.

The best layouts, the front of speed against memory and the alternatives that fit are run for two real steps on gloo
ranks, for 1 to 4 CPU devices, several small GPTs and a BERT, and spaces with each schedule, ZeRO stage, recomputation,
sequence and context parallelism.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware, load_hardware
from megapipe.layout.prediction import predict_rank
from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.cost.model import predict
from megapipe.planner.search.plan import Effort, search_speed
from megapipe.planner.search.space import SearchSpace
from megapipe.training.validation import validate
from tests.support.bert_runs import POST_NORM, make_bert_config, write_corpora, write_corpus
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, make_config, write_shard
from tests.support.layout_runs import LayoutRun, run_layout
from tests.support.meshes import run_mesh, run_threads

GPT = replace(GPT2_SHAPE, num_layers=4)
LLAMA = replace(LLAMA_SHAPE, num_layers=3)
BERT = replace(POST_NORM, num_layers=3)


class Asked(NamedTuple):
    """One search. model: a GPT's, or None for the BERT. groups: fields of the configuration that stay."""

    devices: int
    model: ModelConfig | None
    space: SearchSpace
    memory: float = 1e9
    groups: Mapping[str, dict[str, Any]] = {}


SMALL = SearchSpace(max_micro_size=2, max_chunks=2)
TWO_STAGES = {"parallel": {"pipeline": 2}}
ASKED = {
    "one device": Asked(1, GPT, SMALL),
    "two devices": Asked(2, GPT, SMALL),
    "three devices": Asked(3, replace(GPT, num_layers=5), SMALL),
    "four devices": Asked(4, GPT, SMALL),
    "four devices, little memory": Asked(4, GPT, SMALL, memory=4.6e5),
    "llama, four devices": Asked(4, LLAMA, SMALL),
    "bert, two devices": Asked(2, None, SMALL),
    "bert, four devices": Asked(4, None, SMALL),
    "zero-bubble": Asked(4, GPT, replace(SMALL, schedules=("zb_h1", "zb_v"), max_tensor=2), groups=TWO_STAGES),
    "modular": Asked(4, GPT, replace(SMALL, schedules=("modular", "gpipe")), groups=TWO_STAGES),
    "2bw": Asked(2, LLAMA, replace(SMALL, schedules=("2bw",)), groups=TWO_STAGES),
    "long samples": Asked(4, LLAMA, replace(SMALL, max_context=2), groups={"parallel": {"context": 2}}),
    "sharded": Asked(4, GPT, SMALL, groups={"zero": {"stage": 3}}),
    "recomputed": Asked(2, LLAMA, SMALL, groups={"recompute": {"method": "full"}, "parallel": {"tensor": 2}}),
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    return write_corpora(tmp_path_factory.mktemp("corpora"))


def machine(asked: Asked) -> Hardware:
    """A node of CPU cores with links so fast that layouts with traffic are proposed as well."""
    cpu = load_hardware("cpu")
    group = cpu.groups[0]
    fast = replace(group.inside, bandwidth=1e11, pair_bandwidth=1e11, latency=1e-8)
    device = replace(group.device, memory_bytes=asked.memory)
    return replace(cpu, groups=(replace(group, device=device, devices_per_node=asked.devices, inside=fast),))


def base_of(asked: Asked, prefix: str, bert: Any) -> PretrainConfig:
    """The run without a layout. AdamW's large epsilon keeps rounding from moving a weight as far as a gradient."""
    groups: dict[str, dict[str, Any]] = {"optimizer": {"epsilon": 1e-3}, **asked.groups}
    if asked.devices == 3:
        groups["batch"] = {"global_size": 6}
    if asked.model is None:
        return make_bert_config(bert, BERT, **groups)
    return make_config(prefix, asked.model, **groups)


def proposals(asked: Asked, prefix: str, bert: Any, **effort: Any) -> list[Estimate]:
    """Each layout that a search proposes once: ranked ones, the front, alternatives that fit."""
    base, hardware, effort_of = base_of(asked, prefix, bert), machine(asked), Effort(keep=3, **effort)
    pinned = frozenset(f"{group}.{name}" for group, fields in asked.groups.items() for name in fields)
    findings = search_speed(base, hardware, asked.devices, pinned, space=asked.space, effort=effort_of)
    every = [each.estimate for each in (*findings.ranked, *findings.pareto)]
    every += [each.estimate for each in findings.alternatives if each.estimate is not None and each.estimate.fits]
    once: dict[str, Estimate] = {}
    for each in every:
        once.setdefault(json.dumps(each.as_json()["layout"]), each)
    return list(once.values())


def alone(config: PretrainConfig) -> PretrainConfig:
    """The same training on one process that keeps everything; 2bw's recursion is its own."""
    parallel = replace(config.parallel, data=1, tensor=1, pipeline=1, context=1, sequence=False, layers_per_stage=None)
    name = "2bw" if config.schedule.name == "2bw" else "1f1b"
    return replace(
        config,
        parallel=parallel,
        zero=replace(config.zero, stage=0),
        recompute=replace(config.recompute, method="none"),
        schedule=replace(config.schedule, name=name, chunks=None),
        batch=replace(config.batch, micro_size=1),
    )


def losses_alone(config: PretrainConfig) -> list[float]:
    """Return the losses of two steps on one process."""
    (only,) = run_threads({}, run_layout, alone(config))
    return [result.loss for result in only.run.results]


@pytest.mark.exhaustive
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_proposals_match_one_process_and_predicted_bytes(corpora: tuple[str, Any], asked: Asked) -> None:
    checked = proposals(asked, *corpora)
    assert checked
    expected = {each.config.schedule.name: each.config for each in checked}
    losses = {name: losses_alone(config) for name, config in expected.items()}
    for each in checked:
        check_start(each, machine(asked), losses[each.config.schedule.name])


def check_start(proposed: Estimate, hardware: Hardware, expected: list[float]) -> None:
    """Two steps on real ranks: the losses of one process, and bytes within the estimate."""
    config, layout = proposed.config, json.dumps(proposed.as_json()["layout"])
    validate(config, proposed.world_size)
    sizes = {name: getattr(config.parallel, name) for name in ("data", "pipeline", "context", "tensor")}
    ranks: list[LayoutRun] = run_mesh(sizes, run_layout, config, timeout=120.0)
    for rank in ranks:
        assert [result.loss for result in rank.run.results] == pytest.approx(expected, rel=1e-5), layout
    simulated = predict(config, hardware).estimate
    for number, rank in enumerate(ranks):
        predicted = predict_rank(config, rank.schedule, number, predictions=rank.predictions)
        live = rank.lasting - rank.host + rank.together
        after_any_action = float(np.sum(predicted.timeline[:-1], axis=0).max())
        state = predicted.state().total - predicted.in_host()
        assert live == pytest.approx(state + after_any_action, rel=0.1), layout
        coordinate = number // (sizes["context"] * sizes["tensor"]) % sizes["pipeline"]
        for estimate in (proposed, simulated):
            memory = estimate.memory[coordinate]
            assert live <= 1.1 * (memory.total - memory.messages), layout


@pytest.mark.slow
def test_proposals_of_each_kind_are_started(tmp_path: Path) -> None:
    """The exhaustive test would pass if a search proposed less than its name says."""
    (tmp_path / "bert").mkdir()
    files = write_shard(tmp_path), write_corpus(tmp_path / "bert")
    seen: dict[str, set[Any]] = {}
    for asked in ASKED.values():
        for each in proposals(asked, *files, actions=0):
            for name, value in each.as_json()["layout"].items():
                seen.setdefault(name, set()).add(value)
    assert seen["data"] >= {1, 2, 4}
    assert seen["tensor"] >= {1, 2, 4}
    assert seen["pipeline"] >= {1, 2, 3, 4}
    assert seen["zero"] == {0, 1, 2, 3}
    assert seen["recompute"] == {"none", "selective", "full"}
    assert seen["sequence"] == {False, True}
    assert seen["context"] == {1, 2}
    assert seen["schedule"] >= {"1f1b", "interleaved_1f1b", "zb_h1", "2bw"}
