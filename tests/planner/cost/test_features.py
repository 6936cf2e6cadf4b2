"""Every feature of a configuration has its time and its bytes: the closed form against simulation and exact memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.config.bert import BertModelConfig, BertPretrainConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import PRESETS, Hardware, hardware_device_type, load_hardware
from megapipe.planner.cost.estimate import Assumptions
from megapipe.planner.cost.model import estimate, predict
from megapipe.schedules import dumps, order
from tests.planner.cost.runs import PLAIN, SELENE, SMALL, config_of

TINY = replace(SMALL, num_layers=4, hidden_size=128, num_heads=4, vocabulary_size=512)


def agree(config: PretrainConfig, hardware: Hardware = SELENE) -> None:
    closed = estimate(config, hardware, assumptions=PLAIN)
    exact = predict(config, hardware, assumptions=PLAIN).estimate
    assert closed.step_seconds == pytest.approx(exact.step_seconds, rel=0.05)
    for one, other in zip(closed.memory, exact.memory, strict=True):
        assert 0.98 * other.total <= one.total <= 1.05 * other.total


FEATURES: dict[str, dict[str, Any]] = {
    "ring": {"parallel": {"context": 4, "tensor": 2}},
    "all to all": {"parallel": {"context": 4, "context_attention": "all_to_all"}},
    "muon": {"optimizer": {"name": "muon"}, "parallel": {"data": 4, "tensor": 2}, "zero": {"stage": 1}},
    "shards of some replicas": {"parallel": {"data": 16}, "zero": {"stage": 3, "shard_size": 8}},
    "sums in bf16": {"parallel": {"data": 8}, "zero": {"stage": 2, "reduce_dtype": "bf16"}},
    "tokens in pieces": {"parallel": {"tensor": 8, "sequence": True, "sequence_chunks": 4}},
    "blocks that run again together": {"recompute": {"method": "full", "every": 4}},
    "some blocks that run again": {"recompute": {"method": "full", "num_blocks": 4}, "parallel": {"pipeline": 2}},
    "logits that run again": {"recompute": {"logits": True}},
    "halves": {"schedule": {"name": "1f1b", "two_bp": True}, "parallel": {"pipeline": 4}},
    "few halves": {"schedule": {"name": "gpipe", "two_bp": True, "max_pending": 3}, "parallel": {"pipeline": 4}},
    "larger groups": {"schedule": {"name": "interleaved_1f1b", "group_size": 8}, "parallel": {"pipeline": 4}},
    "moments in bf16": {"optimizer": {"moment_dtype": "bf16"}},
    "bf16 alone": {"training": {"master_weights": False}},
    "documents apart": {"data": {"isolate_documents": True}},
}  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_both_ways_know_a_feature(feature: str) -> None:
    groups = {name: dict(values) for name, values in FEATURES[feature].items()}
    agree(config_of(replace(SMALL, tie_embeddings=True), batch={"global_size": 64}, **groups))


@pytest.mark.parametrize("parallel", [{}, {"tensor": 2, "sequence": True}, {"tensor": 2, "context": 2}])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_both_ways_know_a_bert(parallel: dict[str, Any], norm: str) -> None:
    model = BertModelConfig(num_layers=8, hidden_size=1024, num_heads=16, norm_position=norm)  # type: ignore[arg-type]
    config = BertPretrainConfig(model=model)
    config.training.precision = "bf16"
    config.batch = replace(config.batch, global_size=64, micro_size=4)
    config.parallel = replace(config.parallel, pipeline=2, data=1, **parallel)
    agree(config)


@pytest.mark.parametrize("parallel", [{"pipeline": 2}, {"data": 2}, {"tensor": 2}])
def test_both_ways_know_this_cpu(parallel: dict[str, int]) -> None:
    """Over gloo, whose sums take memory of their own."""
    config = config_of(
        TINY,
        training={"precision": "fp32"},
        parallel=dict(parallel),
        batch={"global_size": 8},
        zero={"stage": 1 if "data" in parallel else 0},
    )
    agree(config, load_hardware("cpu"))


def test_a_schedule_from_a_file_is_simulated_by_both(tmp_path: Path) -> None:
    path = tmp_path / "order.txt"
    path.write_text(dumps(order("interleaved_1f1b", 2, 8)))
    named = config_of(parallel={"pipeline": 2}, batch={"global_size": 8}, schedule={"name": "interleaved_1f1b"})
    read = config_of(parallel={"pipeline": 2}, batch={"global_size": 8}, schedule={"name": str(path)})
    expected = predict(named, SELENE).estimate
    for result in (estimate(read, SELENE), predict(read, SELENE).estimate):
        assert result.step_seconds == pytest.approx(expected.step_seconds)
        assert result.memory == expected.memory


def test_cpus_serialize_communication_and_gpus_overlap_it() -> None:
    assert {name: hardware_device_type(load_hardware(name)) for name in PRESETS} == {
        name: "cpu" if name == "cpu" else "cuda" for name in PRESETS
    }
    machine = load_hardware("h100")
    (group,) = machine.groups
    changes: list[tuple[dict[str, Any], str]] = [
        ({"name": "Xeon core"}, "cpu"),
        ({"peak_flops": {"fp32": 1e12}}, "cpu"),
        ({"name": "Scorecard 9"}, "cuda"),
    ]
    for change, expected in changes:
        changed = replace(group, device=replace(group.device, **change))
        assert hardware_device_type(replace(machine, groups=(changed,))) == expected
    assumptions = Assumptions().on(load_hardware("cpu")), Assumptions().on(machine), PLAIN.on(machine)
    assert [each.slow_down for each in assumptions] == [2.0, 1.1, 1.0]


def test_published_assumptions_cost_what_they_say() -> None:
    config = config_of(parallel={"pipeline": 4, "tensor": 4, "data": 2}, batch={"global_size": 32}, zero={"stage": 1})

    def seconds(**changes: Any) -> dict[str, float]:
        result = estimate(config, SELENE, assumptions=replace(PLAIN, **changes))
        return {name: result.seconds_of(name) for name in ("pipeline", "data", "compute")}

    plain = seconds()
    waiting, scattered = seconds(waits_for_sends=True), seconds(waits_for_sends=True, scattered_sends=True)
    assert plain["pipeline"] < scattered["pipeline"] < waiting["pipeline"]
    assert seconds(gathers_beside_forward=True)["data"] < plain["data"]
    assert seconds(megatron_kernels=True)["compute"] > plain["compute"]
    simulated = predict(config, SELENE, assumptions=replace(PLAIN, waits_for_sends=True)).estimate.step_seconds
    assert simulated > predict(config, SELENE, assumptions=PLAIN).estimate.step_seconds
