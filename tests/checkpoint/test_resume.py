"""A run that stops and resumes is the undisturbed run: bit for bit on one layout, within tolerance on others.

Every pair of layouts: tests/faults/test_changed_mesh.py.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.checkpoint.manifest import _SELF, MANIFEST, _checksum, read_manifest
from megapipe.config.run import PretrainConfig
from tests.checkpoint.runs import Outcome, Sizes, assert_close, assert_same_bits, config_in, run
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE
from tests.support.meshes import Backend

DROPOUT = replace(GPT2_SHAPE, tie_embeddings=False, embedding_dropout=0.1, hidden_dropout=0.1, attention_dropout=0.1)
BF16: dict[str, Any] = {"training": {"precision": "bf16"}}
CUT, END = 2, 4
"""Step after which a run stops, and the last step."""


def resumed(
    folder: Path, corpus: str, model: Any, first: Sizes, then: Sizes, backend: Backend = "threads", **options: Any
) -> Outcome:
    """Train to CUT on one layout, then to END on another."""
    config = config_in(folder / "cut", corpus, model, **options)
    run(first, config, CUT, backend)
    outcome = run(then, config, END, backend)
    assert outcome.start == CUT
    assert [step for step, _ in outcome.losses] == list(range(1, END + 1))
    return outcome


def whole(folder: Path, corpus: str, model: Any, sizes: Sizes, **options: Any) -> Outcome:
    """Train to END without a stop."""
    config = config_in(folder / "whole", corpus, model, **options)
    config.checkpoint = replace(config.checkpoint, every=None, at_end=False)
    return run(sizes, config, END)


slow, rare = pytest.mark.slow, pytest.mark.exhaustive
SAME = [
    pytest.param(GPT2_SHAPE, {}, {"pipeline": 2}, {}, id="one process, then a pipeline"),
    pytest.param(LLAMA_SHAPE, {"data": 2}, {"data": 2}, {}, id="llama, data 2", marks=rare),
    pytest.param(GPT2_SHAPE, {"tensor": 2, "pipeline": 2}, {"tensor": 2, "pipeline": 2}, {}, id="2 x 2", marks=rare),
    pytest.param(DROPOUT, {"pipeline": 2}, {"pipeline": 2}, {}, id="dropout", marks=rare),
    pytest.param(GPT2_SHAPE, {}, {"pipeline": 2}, BF16, id="bf16", marks=rare),
    pytest.param(GPT2_SHAPE, {"data": 2}, {"data": 2}, {**BF16, "zero": {"stage": 3}}, id="bf16 shards", marks=slow),
    pytest.param(
        GPT2_SHAPE, {"data": 2}, {"data": 2}, {"schedule": {"name": "2bw"}, "zero": {"stage": 3}}, id="2bw", marks=slow
    ),
]


@pytest.mark.parametrize(("model", "first", "then", "options"), SAME)
def test_a_resumed_run_has_the_same_bits(
    tmp_path: Path, corpus: str, model: Any, first: Sizes, then: Sizes, options: dict[str, Any]
) -> None:
    outcome = resumed(tmp_path, corpus, model, first, then, **options)
    assert_same_bits(outcome, whole(tmp_path, corpus, model, then if options else first, **options))


@pytest.mark.slow
def test_another_layout_is_within_tolerance(tmp_path: Path, corpus: str) -> None:
    outcome = resumed(tmp_path, corpus, GPT2_SHAPE, {"tensor": 2}, {"data": 2}, "processes")
    assert_close(outcome, whole(tmp_path, corpus, GPT2_SHAPE, {}))


ZERO: list[tuple[Sizes, dict[str, Any], Sizes, dict[str, Any]]] = [
    ({"data": 2}, {"stage": 1}, {"data": 2}, {"stage": 3}),
    ({"data": 2, "pipeline": 2}, {"stage": 3}, {}, {}),
    ({"data": 4}, {"stage": 2, "shard_size": 2}, {"data": 2, "pipeline": 2}, {"stage": 1}),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("saved_on", "saved_zero", "resumed_on", "resumed_zero"), ZERO, ids=str)
def test_sharded_state_moves_to_any_other_sharding(
    tmp_path: Path, corpus: str, saved_on: Sizes, saved_zero: dict[str, Any], resumed_on: Sizes, resumed_zero: Any
) -> None:
    model = replace(GPT2_SHAPE, num_layers=3)
    saved = run(saved_on, config_in(tmp_path, corpus, model, zero=saved_zero, checkpoint={"every": 3}), 2)
    outcome = run(resumed_on, config_in(tmp_path, corpus, model, zero=resumed_zero, checkpoint={"every": 3}), 2)
    assert outcome.start == 2
    assert_same_bits(outcome, saved)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.exhaustive), "bf16"])
def test_offloaded_state_and_weights_resume_anywhere(tmp_path: Path, corpus: str, precision: str) -> None:
    def config(folder: str, **offload: bool) -> PretrainConfig:
        return config_in(tmp_path / folder, corpus, GPT2_SHAPE, training={"precision": precision}, offload=offload)

    run({}, config("cut", optimizer=True), 1)
    run({}, config("cut", optimizer=True, weights=True), 2)
    run({}, config("cut"), 3)
    outcome = run({}, config("cut", optimizer=True), 4)
    assert_same_bits(outcome, run({}, config("whole"), 4))


FIRST_GROUPS = (
    *("model", "data", "batch", "parallel", "schedule", "optimizer", "training", "evaluation", "checkpoint"),
    *("tracking", "init_from"),
)
"""Groups of the configuration in the first checkpoints of this format version."""
FIELDS_ADDED = {
    "parallel": ("context", "context_attention", "sequence", "sequence_chunks"),
    "checkpoint": ("asynchronous", "every_minutes", "max_overhead", "keep_every", "signal_deadline_seconds"),
    "data": ("pack", "order"),
}


def test_a_checkpoint_without_later_entries_resumes(tmp_path: Path, corpus: str) -> None:
    config = config_in(tmp_path / "older", corpus, GPT2_SHAPE)
    run({}, config, CUT)
    folder = tmp_path / f"older/checkpoints/step-{CUT:08d}"
    document = json.loads((folder / MANIFEST).read_bytes())
    stored = document["config"]
    older = {name: stored[name] for name in FIRST_GROUPS}
    for group, names in FIELDS_ADDED.items():
        assert set(names) < stored[group].keys()
        older[group] = {name: value for name, value in stored[group].items() if name not in names}
    assert older.keys() < stored.keys()
    document = {name: value for name, value in document.items() if name not in ("loss_scale", "skipped", _SELF)}
    document["config"] = older
    (folder / MANIFEST).write_text(json.dumps({**document, _SELF: _checksum(document)}))
    found = read_manifest(folder).run
    assert (found.loss_scale, found.skipped) == ({}, ())
    outcome = run({}, config, END)
    assert outcome.start == CUT
    assert_same_bits(outcome, whole(tmp_path, corpus, GPT2_SHAPE, {}))
