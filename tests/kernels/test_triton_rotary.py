"""Rotary position embedding in Triton, and both layouts of the reference."""

from types import ModuleType

import pytest
import torch
from torch.autograd import gradcheck

from megapipe.kernels.reference import rotary as reference
from tests.kernels.apply_checks import check_compiled, results
from tests.kernels.cases import DEVICE, DTYPES, LAYOUTS, assert_same_bits, draw, needs_triton
from tests.kernels.rotary_checks import angles, check, with_angles


@pytest.fixture
def triton_op() -> ModuleType:
    from megapipe.kernels.triton_backend import rotary

    return rotary


def test_the_layouts_are_rotations_in_the_complex_plane() -> None:
    x = draw(2, 5, 3, 8).requires_grad_()
    turns = draw(5, 4)
    cosine, sine = turns.cos(), turns.sin()
    by_angle = torch.polar(torch.ones_like(turns), turns).unsqueeze(1)
    interleaved = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous()) * by_angle).flatten(
        -2
    )
    assert torch.allclose(reference.apply(x, cosine, sine, True), interleaved)
    halves = torch.complex(x[..., :4], x[..., 4:]) * by_angle
    assert torch.allclose(reference.apply(x, cosine, sine), torch.cat([halves.real, halves.imag], -1))
    for layout in (True, False):
        assert gradcheck(lambda t, kind=layout: reference.apply(t, cosine, sine, kind), x)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(2, 7, 3, 64), (1, 1, 1, 128), (2, 5, 4, 80), (1, 30, 2, 2), (3, 4, 5, 6)], ids=str)
def test_no_less_exact_than_torch(
    triton_op: ModuleType, shape: tuple[int, int, int, int], interleaved: bool, dtype: torch.dtype
) -> None:
    check(triton_op, shape, dtype, DEVICE, interleaved)


@needs_triton
@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_are_read_where_they_lie(triton_op: ModuleType, interleaved: bool) -> None:
    """Heads of a joint tensor, batch and tokens exchanged, misaligned, and with gaps between channels."""
    function = with_angles(triton_op, 5, 8, DEVICE, interleaved)
    x, dy = (
        draw(2, 5, 4, 16, dtype=torch.bfloat16, device=DEVICE),
        draw(2, 5, 4, 16, seed=1).to(DEVICE, torch.bfloat16),
    )
    joint = torch.cat([x.new_full((2, 5, 3, 16), 9.0), x], dim=2)[:, :, 3:]
    exchanged = x.transpose(0, 1).contiguous().transpose(0, 1)
    plain = results(function, [x], dy)
    for other in (joint, exchanged, *(layout(x) for layout in LAYOUTS)):
        for first, second in zip(plain, results(function, [other], dy), strict=True):
            assert_same_bits(first, second)


@needs_triton
@pytest.mark.parametrize("shape", [(0, 5, 4, 16), (2, 0, 4, 16)])
def test_no_rows(triton_op: ModuleType, shape: tuple[int, ...]) -> None:
    y, dx = results(with_angles(triton_op, shape[1], 8, DEVICE, False), [draw(*shape).float()], torch.empty(shape))
    assert y.shape == dx.shape == shape


@needs_triton
@pytest.mark.parametrize("interleaved", [False, True])
def test_nan_stays_in_its_pair(triton_op: ModuleType, interleaved: bool) -> None:
    x = draw(1, 3, 2, 8, dtype=torch.float32, device=DEVICE)
    x[0, 1, 1, 0] = torch.nan
    cosine, sine = angles(3, 4, DEVICE)
    found = triton_op.apply(x, cosine, sine, interleaved)
    assert torch.equal(found.isnan(), reference.apply(x, cosine, sine, interleaved).isnan())
    assert found.isnan().sum() == 2


@needs_triton
def test_compilers_see_through(triton_op: ModuleType) -> None:
    check_compiled(with_angles(triton_op, 5, 8, DEVICE, False), [draw(2, 5, 4, 16).to(DEVICE, torch.float32)], 16)


@needs_triton
def test_an_odd_head_is_refused(triton_op: ModuleType) -> None:
    assert "no pairs" in triton_op.refusal("cuda", torch.float32, 7)
    assert triton_op.refusal("cuda", torch.float32, 8) is None
