"""The search for shares, with and without priors, compared with closed forms; sources of priors and of presets."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.layout.hardware.description import Device, load_hardware
from megapipe.layout.hardware.roofline import matrix_product_time
from megapipe.planner.fitting import (
    A100_FP16,
    H100_BF16,
    LINKS,
    MEMORY,
    PARAMETERS,
    ROW_ERROR,
    TABLES,
    WIDTH,
    Belief,
    Floats,
    Parameter,
    Prior,
    fit_parameters,
    half_size_and_ceiling,
    law_of,
    prior_of,
)

NAMES = ("a", "b", "c")
FREE = [Parameter(name, 1e-3, 1e3, 0.5, 1e-3) for name in NAMES]


def problem(seed: int, rows: int, scale: float) -> tuple[Floats, Floats, Prior]:
    """Slopes of rows' errors in logarithms, the errors at 1, and a prior."""
    random = np.random.default_rng(seed)
    means = dict(zip(NAMES, random.uniform(0.4, 0.9, 3), strict=True))
    prior = Prior({name: Belief(float(mean), "drawn") for name, mean in means.items()})
    return scale * random.standard_normal((rows, 3)), scale * random.standard_normal(rows) / 10, prior


def errors_of(slopes: Floats, start: Floats, prior: Prior) -> Callable[[Floats], Floats]:
    return lambda point: np.concatenate([slopes @ np.log(point) + start, prior.errors(point)])


def ridge(slopes: Floats, start: Floats, prior: Prior) -> tuple[Floats, Floats]:
    """Mean and standard deviation of the logarithms after the rows, by the normal distribution's closed form."""
    means = np.log([belief.mean for belief in prior.beliefs.values()])
    precision = slopes.T @ slopes / ROW_ERROR**2 + np.eye(3) / prior.width**2
    moment = -slopes.T @ start / ROW_ERROR**2 + means / prior.width**2
    return np.linalg.solve(precision, moment), np.sqrt(np.diag(np.linalg.inv(precision)))


@given(seed=st.integers(0, 10_000), rows=st.integers(0, 6), scale=st.floats(0.01, 1.0))
@settings(max_examples=30, deadline=None)
def test_rows_move_shares_as_in_the_closed_form(seed: int, rows: int, scale: float) -> None:
    """Also with fewer rows than shares, which without a prior have no answer."""
    slopes, start, prior = problem(seed, rows, scale)
    errors = errors_of(slopes, start, prior)
    mean, deviation = ridge(slopes, start, prior)
    result = fit_parameters(errors, FREE)
    assert np.log(result.point) == pytest.approx(mean, abs=0.02)
    spreads = np.array(result.spreads(ROW_ERROR)) / result.point
    assert spreads == pytest.approx(deviation, rel=0.02)


def test_without_rows_the_prior_stays() -> None:
    prior = prior_of("a100-80")
    result = fit_parameters(prior.errors, PARAMETERS)
    assert result.point == pytest.approx([belief.mean for belief in prior.beliefs.values()], rel=1e-3)
    assert np.array(result.spreads(ROW_ERROR)) / result.point == pytest.approx(WIDTH, rel=0.05)


@pytest.mark.parametrize("name", [table.hardware for table in TABLES.values()])
def test_every_share_has_a_mean_between_its_sources(name: str) -> None:
    prior = prior_of(name)
    assert list(prior.beliefs) == [each.name for each in PARAMETERS]
    for rates, share in ((MEMORY[name], "memory"), (LINKS[name], "links")):
        shares = [rate.share for rate in rates]
        assert 0 < min(shares) < prior.beliefs[share].mean < max(shares) < 1
        assert all(rate.source and rate.what for rate in rates)
    assert 0.8 < prior.beliefs["ceiling"].mean < 1


def test_the_width_is_how_far_published_kernels_scatter() -> None:
    shares = [rate.share for rates in MEMORY.values() for rate in rates]
    assert np.std(np.log(shares), ddof=1) == pytest.approx(WIDTH, abs=0.05)


TOGETHER = np.array([[1.0, 1.0], [2.0, 2.0], [0.3, 0.3]])
INFLUENCES: dict[str, tuple[Callable[[Floats], Floats], tuple[float, ...]]] = {
    "none of the third": (lambda point: 2.0 * point[:2] - 1.0, (0.05, 0.05, np.inf)),
    "fewer errors than parameters": (lambda point: point[:1] * point[1:2] - 0.25, (np.inf, np.inf)),
    "only together": (lambda point: TOGETHER @ point - 1.0, (np.inf, np.inf)),
}


@pytest.mark.parametrize("case", INFLUENCES)
def test_parameters_that_errors_do_not_determine_are_named(case: str) -> None:
    errors, spreads = INFLUENCES[case]
    assert fit_parameters(errors, FREE[: len(spreads)]).spreads(0.1) == pytest.approx(spreads)


def test_a_bent_valley_is_followed() -> None:
    """Rosenbrock's function as two errors; its least is at (1, 1)."""
    free = [Parameter(name, -1e3, 1e3, 0.5, 0.01) for name in NAMES]
    result = fit_parameters(lambda point: np.array([1 - point[0], 3 * (point[1] - point[0] ** 2), point[2]]), free)
    assert result.point == pytest.approx([1, 1, 0], abs=0.02)


def test_bounds_hold() -> None:
    free = [Parameter(name, 0.0, 1.0, 0.5, 0.01) for name in NAMES]
    result = fit_parameters(lambda point: point - np.array([5.0, -3.0, 0.25]), free)
    assert result.point == pytest.approx([1.0, 0.0, 0.25], abs=1e-6)


def device(name: str) -> Device:
    return load_hardware(name).groups[0].device


def test_the_a100_has_the_law_of_its_products() -> None:
    law, preset = law_of(device("a100-80"), "fp16", A100_FP16), device("a100-80").efficiency
    assert preset.half_size == pytest.approx(law.half_size, abs=1.0)
    assert preset.launch == pytest.approx(law.launch, abs=1e-7)


def test_h100_has_its_own_half_size_and_a100s_launch() -> None:
    preset = device("h100").efficiency
    assert preset.launch == device("a100-80").efficiency.launch
    half, _ = half_size_and_ceiling(device("h100"), "bf16", H100_BF16, preset.launch)
    assert preset.half_size == pytest.approx(half, abs=1.0)


def test_the_law_predicts_the_products_it_was_fitted_to() -> None:
    """Within 6% on average; a constant rate, the best one, is 3 times as far off."""
    rates = np.array(list(A100_FP16.values()))
    law = law_of(device("a100-80"), "fp16", A100_FP16)
    machine = Device("a", {"fp16": 312e12}, 80e9, 2e12, law)
    predicted = [2 * n**3 / matrix_product_time(machine, n, n, n, "fp16").seconds / 1e12 for n in A100_FP16]
    off = np.abs(np.log(predicted / rates))
    constant = np.abs(np.log(rates / np.median(rates)))
    assert off.mean() < 0.06
    assert constant.mean() > 3 * off.mean()


@given(half=st.floats(1.0, 500.0), launch=st.floats(0.0, 2e-5), peak=st.floats(50.0, 900.0))
def test_fits_recover_half_size_and_ceiling_of_synthetic_products(half: float, launch: float, peak: float) -> None:
    rates = {
        size: 2e-12 * size**3 / (2.0 * (size + half) ** 3 / (peak * 1e12) + launch) for size in (2048, 4096, 8192)
    }
    machine = Device("a", {"bf16": 989e12}, 80e9, 3e12)
    fitted = half_size_and_ceiling(machine, "bf16", rates, launch)
    assert fitted == pytest.approx((half, peak / 989), rel=1e-6)
