"""Intensities, thresholds and sizes of the trillion-parameter model X_160, compared with figures by hand."""

import pytest

from megapipe.planner.command.train_time import (
    Cluster,
    MethodLayout,
    Transformer,
    critical_batch_tokens,
)

X_160 = Transformer(160, 160**2, 160, 16 * 160)
"""The paper's X_n has n layers of n heads of n numbers, on sequences of 16 n tokens."""
A100 = 312e12


@pytest.mark.parametrize(("size", "parameters"), [(160, 1.258e12), (108, 176e9), (64, 12.9e9), (32, 403e6)])
def test_the_family_has_its_sizes(size: int, parameters: float) -> None:
    num_parameters = Transformer(size, size**2, size, 16 * size).parameters
    assert num_parameters == 12 * size**5
    assert num_parameters == pytest.approx(parameters, rel=3e-3)


@pytest.mark.parametrize(
    ("bytes_per_second", "threshold"), [(300e9, 1040), (31.5e9, 9905), (25e9, 12480), (3.125e9, 99840)]
)
def test_thresholds_of_an_a100(bytes_per_second: float, threshold: float) -> None:
    thresholds = Cluster(A100, 80e9, bytes_per_second, 2 * bytes_per_second, 8).thresholds
    assert round(thresholds["inside"]) == threshold
    assert thresholds["outside"] == thresholds["inside"] / 2


def test_intensities_of_one_sequence_and_five_micro_batches() -> None:
    assert round(MethodLayout("sharded", 2, 1, 1, 1, 5).intensities(X_160)["data"]) == 3413
    assert round(MethodLayout("layered", 2, 1, 1, 1, 5).intensities(X_160)["data"]) == 17067
    assert MethodLayout("3d", 2, 1, 1, 5, 1).intensities(X_160)["data"] == 5 * 3840
    modular = MethodLayout("modular", 1, 5, 16, 1, 5).intensities(X_160)
    assert modular["data"] == float("inf")
    assert modular["pipeline"] == 614_400
    assert round(modular["tensor"]) == 6827
    assert A100 / 300e9 / modular["tensor"] == pytest.approx(0.15, abs=0.005)


def test_checkpoint_bytes_of_the_modular_layout() -> None:
    assert X_160.checkpoint_bytes == pytest.approx(21.0e9, rel=2e-3)
    assert X_160.checkpoint_bytes * 2415 / 38640 == pytest.approx(1.31e9, rel=2e-3)


def test_critical_batch_is_gpt_3s_scaled_by_cube_root() -> None:
    assert critical_batch_tokens(175e9) == pytest.approx(3.2e6)
    assert critical_batch_tokens(8 * 175e9) == pytest.approx(2 * 3.2e6)
    assert critical_batch_tokens(X_160.parameters) == pytest.approx(6.2e6, rel=5e-3)
    assert critical_batch_tokens(1e9) / 1e3 == pytest.approx(572, rel=1e-3)
