"""Ten steps, a checkpoint and ten steps are twenty steps: bit for bit on one layout, within tolerance on others.

Every pair of layouts: tests/faults/test_changed_mesh.py.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import Outcome, Sizes, assert_close, assert_same_bits, config_in, run
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, write_shard

DROPOUT = replace(GPT2_SHAPE, tie_embeddings=False, embedding_dropout=0.1, hidden_dropout=0.1, attention_dropout=0.1)
MODELS = {"gpt2-tied": GPT2_SHAPE, "gpt2-untied-dropout": DROPOUT, "llama-untied": LLAMA_SHAPE}
SAME: list[tuple[str, Sizes]] = [
    ("gpt2-tied", {}),
    ("gpt2-tied", {"tensor": 2, "pipeline": 2}),
    ("gpt2-untied-dropout", {"pipeline": 2}),
    ("llama-untied", {"data": 2}),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("corpus"))


class Runs:
    """Runs of the test module, each made once: whole ones of 20 steps, and the first 10 steps of saved ones."""

    def __init__(self, folder: Path, corpus: str) -> None:
        self._folder = folder
        self._corpus = corpus
        self._whole: dict[str, Outcome] = {}
        self._saved: dict[str, Path] = {}
        self._resumed = 0

    def whole(self, model: str, sizes: Sizes) -> Outcome:
        """Twenty steps without a checkpoint."""
        key = f"{model} {sizes}"
        if key not in self._whole:
            unsaved = {"every": None, "at_end": False}
            config = config_in(self._folder / "unused", self._corpus, MODELS[model], checkpoint=unsaved)
            self._whole[key] = run(sizes, config, 20)
        return self._whole[key]

    def resumed(self, model: str, saved_on: Sizes, resumed_on: Sizes) -> Outcome:
        """Ten steps on one layout, then steps 11 to 20 on another."""
        key = f"{model} {saved_on}"
        if key not in self._saved:
            self._saved[key] = self._folder / f"saved-{len(self._saved)}"
            run(saved_on, config_in(self._saved[key], self._corpus, MODELS[model]), 10)
        self._resumed += 1
        folder = self._folder / f"resumed-{self._resumed}"
        shutil.copytree(self._saved[key], folder)
        outcome = run(resumed_on, config_in(folder, self._corpus, MODELS[model]), 20)
        assert outcome.start == 10
        assert [step for step, _ in outcome.losses] == list(range(1, 21))
        return outcome


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: str) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), corpus)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("model", "sizes"), SAME, ids=str)
def test_the_same_layout_goes_on_bit_for_bit(runs: Runs, model: str, sizes: Sizes) -> None:
    assert_same_bits(runs.resumed(model, sizes, sizes), runs.whole(model, sizes))


def test_a_pipeline_goes_on_with_the_bits_of_one_process(runs: Runs) -> None:
    assert_same_bits(runs.resumed("gpt2-tied", {}, {"pipeline": 2}), runs.whole("gpt2-tied", {}))


def test_another_layout_goes_on_within_tolerance(runs: Runs) -> None:
    found = runs.resumed("gpt2-tied", {"tensor": 2, "pipeline": 2}, {"data": 2})
    assert_close(found, runs.whole("gpt2-tied", {}))


def test_bf16_goes_on_bit_for_bit(tmp_path: Path, corpus: str) -> None:
    cut, whole = (
        config_in(tmp_path / folder, corpus, GPT2_SHAPE, training={"precision": "bf16"}) for folder in ("cut", "whole")
    )
    run({}, cut, 3)
    assert_same_bits(run({"pipeline": 2}, cut, 6), run({"pipeline": 2}, whole, 6))


ZERO: list[tuple[Sizes, dict[str, Any], Sizes, dict[str, Any]]] = [
    ({"data": 2}, {"stage": 1}, {"data": 2}, {"stage": 3}),
    ({"data": 2, "pipeline": 2}, {"stage": 3}, {}, {}),
    ({"data": 4}, {"stage": 2, "shard_size": 2}, {"data": 2, "pipeline": 2}, {"stage": 1}),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("saved_on", "saved_zero", "resumed_on", "resumed_zero"), ZERO, ids=str)
def test_shared_state_moves_to_any_other_sharing_bit_for_bit(
    tmp_path: Path, corpus: str, saved_on: Sizes, saved_zero: dict[str, Any], resumed_on: Sizes, resumed_zero: Any
) -> None:
    model = replace(GPT2_SHAPE, num_layers=3)
    saved = run(saved_on, config_in(tmp_path, corpus, model, zero=saved_zero, checkpoint={"every": 3}), 3)
    found = run(resumed_on, config_in(tmp_path, corpus, model, zero=resumed_zero, checkpoint={"every": 3}), 3)
    assert found.start == 3
    assert_same_bits(found, saved)
    assert run(resumed_on, config_in(tmp_path, corpus, model, zero=resumed_zero), 5).start == 3


@pytest.mark.slow
def test_bf16_shards_go_on_bit_for_bit(tmp_path: Path, corpus: str) -> None:
    options: dict[str, Any] = {"training": {"precision": "bf16"}, "zero": {"stage": 3}}
    cut, whole = (config_in(tmp_path / folder, corpus, GPT2_SHAPE, **options) for folder in ("cut", "whole"))
    run({"data": 2}, cut, 3)
    assert_same_bits(run({"data": 2}, cut, 6), run({"data": 2}, whole, 6))


@pytest.mark.slow
def test_a_2bw_run_with_shared_versions_goes_on_bit_for_bit(tmp_path: Path, corpus: str) -> None:
    options: dict[str, Any] = {"schedule": {"name": "2bw"}, "zero": {"stage": 3}}
    cut, whole = (config_in(tmp_path / folder, corpus, GPT2_SHAPE, **options) for folder in ("cut", "whole"))
    run({"data": 2}, cut, 3)
    assert_same_bits(run({"data": 2}, cut, 6), run({"data": 2}, whole, 6))
