"""The planner predicts the peak device bytes of every rank of a run to a megabyte."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.config.run import PretrainConfig
from megapipe.layout.prediction import layout_costs, predict_rank
from megapipe.layout.stages import StageLayout
from megapipe.layout.table import lowered_schedule
from megapipe.layout.walk import ACTING
from megapipe.schedules.actions import KIND, Kind, kind_mask
from tests.fake_cuda.table import MODELS, Changes, run_row, write_corpus
from tests.layers import bound as shapes

LIMIT = 2**20
GPT = MODELS["33M"]
LLAMA = replace(GPT, **{**shapes.LLAMA, "num_kv_heads": 4})  # type: ignore[arg-type]
DROPOUT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
LONG = replace(GPT, max_positions=1024, attention="unfused", hidden_size=256)
SELECTIVE = {"recompute": {"method": "selective"}}
ATTENTION = {"recompute": {"method": "selective", "parts": ["attention"]}}
FP32 = {"training": {"precision": "fp32"}}


def parallel(schedule: str = "1f1b", **sizes: Any) -> dict[str, Mapping[str, Any]]:
    return {"parallel": sizes, "schedule": {"name": schedule}}


CASES: dict[str, tuple[Any, Changes]] = {
    "llama": (LLAMA, {}),
    "llama, 4 stages": (LLAMA, parallel(pipeline=4)),
    "gpt, zb_h1": (GPT, parallel("zb_h1", pipeline=2)),
    "llama, window, grouped": (replace(LLAMA, sliding_window=100), {}),
    "gpt": (GPT, {}),
    "gpt, fp32": (GPT, FP32),
    "gpt, fp8": (GPT, {"training": {"fp8": "rowwise"}}),
    "gpt, Muon": (GPT, {"optimizer": {"name": "muon"}}),
    "gpt, offloaded activations": (GPT, {"offload": {"activations": "blocks"}}),
    "gpt, recomputed logits": (GPT, {"recompute": {"logits": True}}),
    "gpt, unfused": (replace(GPT, attention="unfused"), {}),
    "gpt, dropout": (replace(GPT, **DROPOUT), {}),
    "gpt, isolated documents": (GPT, {"data": {"isolate_documents": True}}),
    "gpt, 2 stages": (GPT, parallel(pipeline=2)),
    "gpt, 4 stages": (GPT, parallel(pipeline=4)),
    "gpt, gpipe": (GPT, parallel("gpipe", pipeline=2)),
    "gpt, zb_h2": (GPT, parallel("zb_h2", pipeline=2)),
    "gpt, modular": (GPT, parallel("modular", pipeline=2)),
    "gpt, ZeRO 1": (GPT, {"parallel": {"data": 2}, "zero": {"stage": 1}}),
    "gpt, ZeRO 2": (GPT, {"parallel": {"data": 2}, "zero": {"stage": 2}}),
    "gpt, ZeRO 3": (GPT, {"parallel": {"data": 2}, "zero": {"stage": 3}}),
    "gpt, tensor, 4 stages": (GPT, parallel(pipeline=4, tensor=2)),
    "gpt, sequence, 4 stages": (GPT, parallel(pipeline=4, tensor=2, sequence=True)),
    "gpt, unfused, 4 stages": (LONG, parallel(pipeline=4)),
    "gpt, dropout, 4 stages": (replace(LONG, **DROPOUT), parallel(pipeline=4)),
    "gpt, attention recomputed": (LONG, {**parallel(pipeline=4), **ATTENTION}),
    "llama, zb_v": (LLAMA, parallel("zb_v", pipeline=2)),
    "gpt, dualpipe_v, one stream": (GPT, parallel("dualpipe_v", pipeline=2)),
    "llama, interleaved": (LLAMA, parallel("interleaved_1f1b", pipeline=2)),
    "llama, full": (LLAMA, {**parallel(pipeline=4), "recompute": {"method": "full"}}),
    "llama, selective": (LLAMA, {**parallel(pipeline=4), **SELECTIVE}),
    "llama, window": (replace(LLAMA, sliding_window=100, num_kv_heads=None), {}),
    "llama, isolated documents": (LLAMA, {"data": {"isolate_documents": True}}),
    "llama, sequence": (LLAMA, {"parallel": {"tensor": 2, "sequence": True}}),
    "llama, sequence, zb_h1": (LLAMA, parallel("zb_h1", pipeline=2, tensor=2, sequence=True)),
    "llama, fp32": (LLAMA, FP32),
    "qwen3, fp32": (replace(LLAMA, qk_norm=True), FP32),
    "grouped, fp32": (replace(GPT, num_kv_heads=4), FP32),
    "one group, fp32": (replace(GPT, num_kv_heads=1), FP32),
    "grouped, fp32, tensor": (replace(LLAMA, num_kv_heads=2), {**FP32, "parallel": {"tensor": 2}}),
    "llama, ring": (LLAMA, parallel(pipeline=4, context=2)),
    "llama, all_to_all": (LLAMA, {"parallel": {"context": 2, "context_attention": "all_to_all"}}),
    "llama, experts": (replace(LLAMA, num_experts=4), {}),
    "llama, experts, 4 stages": (replace(LLAMA, num_experts=4), parallel(pipeline=4)),
    "llama, experts, tensor": (replace(LLAMA, num_experts=4), parallel(pipeline=2, tensor=2)),
    "llama, experts, zb_h1": (replace(LLAMA, num_experts=4), parallel("zb_h1", pipeline=2)),
    "llama, further tokens": (replace(LLAMA, mtp_layers=2), {}),
    "llama, further tokens, full": (replace(LLAMA, mtp_layers=2), {"recompute": {"method": "full"}}),
}
SPLIT: dict[str, tuple[Any, Changes]] = {
    "gpt": (GPT, parallel("zb_h1", pipeline=2, tensor=2)),
    "llama, sequence": CASES["llama, sequence, zb_h1"],
    "gpt, sequence, selective": (GPT, {**parallel("zb_h1", pipeline=2, tensor=2, sequence=True), **SELECTIVE}),
    "llama, sequence, experts": (
        replace(LLAMA, num_experts=4),
        parallel("zb_h1", pipeline=2, tensor=2, sequence=True),
    ),
    "llama, further tokens": (replace(LLAMA, mtp_layers=1), parallel("zb_h1", pipeline=2)),
}
OVERLAPPING: dict[str, tuple[Any, Changes]] = {
    "gpt, dualpipe_v": (GPT, parallel("dualpipe_v", pipeline=2, tensor=2)),
    "llama, dualpipe_v, sequence": (LLAMA, parallel("dualpipe_v", pipeline=2, tensor=2, sequence=True)),
    "llama, dualpipe_v, ring": (LLAMA, parallel("dualpipe_v", pipeline=2, context=2)),
}
"""Their pairs run on two streams."""
SLOW = 4
"""Cases, from the first on, of the slow tier."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow, pytest.mark.exhaustive][i >= SLOW]) for i, name in enumerate(CASES)],
)
def test_peaks_are_those_predicted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for peak, predicted, _ in peaks(name, *CASES[name], tmp_path, monkeypatch):
        assert abs(peak - predicted) <= LIMIT, (peak, predicted)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OVERLAPPING)
def test_peaks_of_two_streams_differ_by_one_forward(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a backward is at its peak, a forward on the other stream has not kept everything yet, and has temporary
    tensors: a few of the size of hidden states."""
    for peak, predicted, config in peaks(name, *OVERLAPPING[name], tmp_path, monkeypatch):
        layout, costs = StageLayout.of(config), layout_costs(config, device="cuda")
        kept = max(sum(costs.kept(layout.layers[layer]) for layer in layers) for layers in layout.ranges)
        hidden = config.batch.micro_size * config.data.sequence_length * config.model.hidden_size * 2
        assert -kept - LIMIT <= peak - predicted <= 4 * hidden, (peak, predicted)


@pytest.mark.parametrize("name", [pytest.param(each, marks=pytest.mark.slow) for each in SPLIT])
def test_bytes_within_weight_halves_are_declared(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, name, SPLIT[name][0])
    config, reports, _ = run_row(write_corpus(tmp_path), name, SPLIT[name][1])
    schedule = lowered_schedule(config, StageLayout.of(config))
    for rank, report in enumerate(reports):
        predicted = predict_rank(config, schedule, rank, device="cuda")
        rows = schedule.sections["body"][predicted.pipeline_rank][:, KIND]
        halves = rows[kind_mask(rows, *ACTING)] == Kind.BACKWARD_WEIGHT
        counted = [held for action, held in report.within if action.kind == Kind.BACKWARD_WEIGHT]
        assert counted[-halves.sum() :] == pytest.approx(predicted.timeline.temporaries[halves].tolist(), abs=2**17)


def peaks(
    name: str, model: Any, changes: Changes, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[int, float, PretrainConfig]]:
    """Peak and predicted bytes of every rank, and the configuration."""
    monkeypatch.setitem(MODELS, name, model)
    config, reports, predicted = run_row(write_corpus(folder), name, changes)
    for report, expected in zip(reports, predicted, strict=True):
        yield report.peak, expected, config
