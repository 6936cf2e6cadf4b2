"""A BERT run from its configuration: what it prints, evaluates and saves."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megapipe.config.bert import BertDataConfig, BertModelConfig, BertPretrainConfig
from megapipe.kernels.ops import OPS
from megapipe.kernels.registry import Registry
from megapipe.training.validation import kernel_choices
from tests.support.bert_runs import POST_NORM, PRE_NORM, make_bert_config, write_corpus
from tests.support.gpt_runs import train_alone
from tests.training.records import events, steps


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> BertDataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def configuration(corpus: BertDataConfig, directory: Path, **training: object) -> BertPretrainConfig:
    config = make_bert_config(
        corpus,
        PRE_NORM,
        batch={"global_size": 4},
        evaluation={"every": 2, "samples": 8},
        checkpoint={"every": 2},
        training={"steps": 4, "log_every": 1, "directory": str(directory)},
    )
    config.training = replace(config.training, **training)
    return config


def test_a_run_reports_both_terms_and_accuracies_and_resumes(
    tmp_path: Path, corpus: BertDataConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_alone(configuration(corpus, tmp_path / "whole")) == 0
    output = capsys.readouterr().out
    assert "of sentence pairs 0.693" in output
    assert "kernels: reference for" in output
    assert (tmp_path / "whole/loss_curve.png").is_file()
    whole = steps(tmp_path / "whole")
    assert len(whole) == 4
    for record in whole:
        assert set(record["terms"]) == {"mlm", "sop"}
        assert record["loss"] == pytest.approx(sum(record["terms"].values()))
        assert f"(mlm {record['terms']['mlm']:.4f}, sop {record['terms']['sop']:.4f})" in output
    evaluations = events(tmp_path / "whole", "evaluation")
    assert len(evaluations) == 2
    for record in evaluations:
        assert set(record["accuracies"]) == {"mlm", "sop"}
        assert f"mlm accuracy {record['accuracies']['mlm']:.1%}, sop accuracy" in output
    assert train_alone(configuration(corpus, tmp_path / "parts", stop_at=2)) == 0
    assert train_alone(configuration(corpus, tmp_path / "parts")) == 0
    assert [record["terms"] for record in steps(tmp_path / "parts")] == [record["terms"] for record in whole]


@pytest.mark.parametrize("model", [POST_NORM, PRE_NORM], ids=["post", "pre-dropout"])
def test_the_reported_kernels_are_those_that_run(
    corpus: BertDataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: BertModelConfig
) -> None:
    picked = set()
    pick = Registry.pick

    def recording(self: Registry, op: str, like: torch.Tensor) -> object:
        picked.add(op)
        return pick(self, op, like)

    monkeypatch.setattr(Registry, "pick", recording)
    config = replace(configuration(corpus, tmp_path, steps=1), model=model)
    assert train_alone(config) == 0
    assert {choice.op for choice in kernel_choices(config, torch.device("cpu"), OPS)} == picked
