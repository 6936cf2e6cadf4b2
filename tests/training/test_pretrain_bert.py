"""A BERT run from its configuration: what it prints, evaluates and saves."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.bert_runs import PRE_NORM, make_bert_config, write_corpus
from tests.support.gpt_runs import train_alone
from tests.training.records import events, steps


def test_a_run_reports_both_terms_and_accuracies_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_bert_config(
        write_corpus(tmp_path),
        PRE_NORM,
        batch={"global_size": 4},
        evaluation={"every": 2, "samples": 8},
        checkpoint={"every": 2},
        training={"steps": 4, "log_every": 1, "directory": str(tmp_path / "whole")},
    )
    assert train_alone(config) == 0
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
    for stop_at in (2, None):
        training = replace(config.training, directory=str(tmp_path / "parts"), stop_at=stop_at)
        assert train_alone(replace(config, training=training)) == 0
    assert [record["terms"] for record in steps(tmp_path / "parts")] == [record["terms"] for record in whole]
