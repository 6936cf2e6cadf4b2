import math

import pytest
import torch

from megapipe.optim.scaling import clip_coefficient


@pytest.mark.parametrize("size", [1e-3, 1.0, 17.0, 1e6])
def test_equals_torchs_clipping_bit_for_bit(size: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1000))
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * size
    parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_([parameter], 2.5)
    assert torch.equal(parameter.grad, gradient * clip_coefficient(norm, 2.5))


def test_only_norms_above_the_limit_are_clipped_to_it() -> None:
    assert clip_coefficient(0.0, 1.0).item() == 1.0
    assert clip_coefficient(0.999, 1.0).item() == 1.0
    assert clip_coefficient(8.0, 1.0).item() == pytest.approx(0.125, rel=1e-6)


def test_norms_may_be_floats_or_tensors_of_either_precision() -> None:
    single = clip_coefficient(torch.tensor(3.0), 1.0)
    double = clip_coefficient(torch.tensor(3.0, dtype=torch.float64), 1.0)
    plain = clip_coefficient(3.0, 1.0)
    assert single.dtype == double.dtype == plain.dtype == torch.float32
    assert single.shape == double.shape == plain.shape == ()
    assert torch.equal(double, plain)
    torch.testing.assert_close(single, plain, rtol=2e-7, atol=0)


def test_infinite_norms_do_not_count_as_small() -> None:
    assert math.isnan(clip_coefficient(math.nan, 1.0).item())
    assert clip_coefficient(math.inf, 1.0).item() == 0.0


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_a_limit_that_is_not_positive_is_refused(limit: float) -> None:
    with pytest.raises(ValueError, match=r"optimizer\.clip_norm"):
        clip_coefficient(1.0, limit)
