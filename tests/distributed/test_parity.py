"""Families train on a layout as by a plain loop over transformers; docs/parity.md has all families and layouts."""

from pathlib import Path

import pytest

from tests.distributed.parity import TOLERANCES, differences, refusal, run_layout, train_transformers, written


@pytest.mark.parametrize("layout", ["tensor 2, sequence"])
def test_training_equals_a_loop_over_transformers(layout: str, tmp_path: Path) -> None:
    families = written(tmp_path, ("gemma2", "qwen2_moe", "bert"), steps=8)
    assert [refusal(family.config, layout) for family in families] == [None] * 3
    results = run_layout(layout, families, backend="threads")
    for family in families:
        apart = differences(results[family.model_type], train_transformers(family))
        assert all(apart[name] <= limit for name, limit in TOLERANCES.items()), (family.model_type, apart)
