"""Products in fp8 against float64 within the bounds that the formats give, and against torch's own scaled product."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megapipe.layers.linear import E4M3, E5M2, Fp8Products, Linear, Recipe, fp8_product, quantised
from megapipe.parallel.groups import SoloGroup
from megapipe.parallel.mesh import Mesh
from megapipe.spec.layers import model_layers
from tests.layers.bound import GPT2, LLAMA, bind, check_halves, make_context, small_model
from tests.support.meshes import run_mesh

RECIPES: list[Recipe] = ["tensorwise", "rowwise"]
RELATIVE = {E4M3: 2.0**-4, E5M2: 2.0**-3}
ABSOLUTE = {E4M3: 2.0**-10, E5M2: 2.0**-17}
"""Half the distance of the smallest numbers."""
SOLO = SoloGroup("tensor")


def drawn(*shape: int, seed: int, spread: float = 2.0) -> Tensor:
    """Magnitudes over many powers of two."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp(spread * torch.randn(shape, generator=generator))


@given(st.sampled_from([E4M3, E5M2]), st.integers(0, 1000), st.integers(-100, 100), st.booleans())
def test_rounding_is_within_the_format(dtype: torch.dtype, seed: int, exponent: int, by_row: bool) -> None:
    x = drawn(6, 40, seed=seed) * 2.0**exponent
    largest = x.abs().amax(1, keepdim=True) if by_row else x.abs().amax()
    short, scale = quantised(x, largest, dtype)
    error = (short.double() * scale.double() - x.double()).abs()
    assert (
        error <= torch.maximum(RELATIVE[dtype] * x.double().abs(), ABSOLUTE[dtype] * scale.double()) * 1.00001
    ).all()
    assert (short.float().abs().amax(1 if by_row else (0, 1)) == torch.finfo(dtype).max).all()


def test_zeros_stay_and_infinities_pass_through() -> None:
    zeros = torch.zeros(3, 4)
    assert not quantised(zeros, zeros.abs().amax(), E4M3)[0].float().any()
    for value in (torch.inf, torch.nan):
        x = torch.ones(3, 4)
        x[1, 2] = value
        y = Fp8Products("tensorwise", SOLO).output(x, torch.ones(5, 4), None)
        assert not y[1].isfinite().any()


def bound(a: Tensor, b: Tensor, format_a: torch.dtype, by_row: bool) -> tuple[Tensor, Tensor]:
    """The product a b^T in float64, and how far rounding the operands may move each of its elements."""
    errors = []
    for x, dtype in ((a, format_a), (b, E4M3)):
        largest = x.abs().amax(1, keepdim=True) if by_row else x.abs().amax()
        smallest = ABSOLUTE[dtype] * largest.double() / torch.finfo(dtype).max
        errors.append(torch.maximum(RELATIVE[dtype] * x.double().abs(), smallest))
    wide_a, wide_b = a.double(), b.double()
    off_a, off_b = errors
    off = off_a @ wide_b.abs().t() + wide_a.abs() @ off_b.t() + off_a @ off_b.t()
    return wide_a @ wide_b.t(), off * 1.0001


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_three_products_are_within_the_bound(recipe: Recipe, dtype: torch.dtype) -> None:
    x, weight = drawn(2, 24, 32, seed=1).to(dtype), drawn(4, 12, 32, seed=2).to(dtype)
    dy, bias = drawn(2, 24, 48, seed=3).to(dtype), drawn(4, 12, seed=4).to(dtype)
    products, rows, matrix = Fp8Products(recipe, SOLO), x.flatten(0, 1), weight.view(48, 32)
    gradients = E5M2 if recipe == "tensorwise" else E4M3
    by_row = recipe == "rowwise"
    for actual, a, b, format_a in (
        (products.output(x, weight, None).flatten(0, 1), rows, matrix, E4M3),
        (products.input_gradient(dy, weight).flatten(0, 1), dy.flatten(0, 1), matrix.t(), gradients),
        (products.weight_gradient(x, dy), dy.flatten(0, 1).t(), rows.t(), gradients),
    ):
        exact, allowed = bound(a, b, format_a, by_row)
        rounding = torch.finfo(dtype).eps * (exact.abs() + allowed)
        assert actual.dtype == dtype
        assert ((actual.double() - exact).abs() <= allowed + rounding).all()
        assert not torch.equal(actual, (a @ b.t()).to(dtype))
    assert torch.equal(products.output(x, weight, bias), products.output(x, weight, None) + bias.view(-1))


@pytest.mark.parametrize("format_a", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("by_row", [False, True])
def test_the_emulation_is_torchs_scaled_product(format_a: torch.dtype, by_row: bool) -> None:
    """torch multiplies fp8 on CPUs as well: the same layout of operands and scales as on a GPU."""
    a, b = drawn(32, 64, seed=5), drawn(48, 64, seed=6)
    operands = [
        quantised(x, x.abs().amax(1, keepdim=True) if by_row else x.abs().amax().view(1, 1), dtype)
        for x, dtype in ((a, format_a), (b, E4M3))
    ]
    (short_a, scale_a), (short_b, scale_b) = operands
    actual = fp8_product(short_a, short_b, scale_a, scale_b, torch.bfloat16)
    expected = torch._scaled_mm(short_a, short_b.t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=torch.bfloat16)
    scale = expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-9 * scale)


@pytest.mark.parametrize("fields", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_split_backward_gives_the_same_bits(recipe: Recipe, fields: dict[str, Any]) -> None:
    model = small_model(**fields)
    layer = bind(model_layers(model)[1], model)
    for module in layer.module.modules():
        if isinstance(module, Linear):
            module.products = Fp8Products(recipe, SOLO)
    check_halves([layer], make_context(model), [drawn(2, 12, 32, seed=7, spread=0.0)])


def shared_products(mesh: Mesh) -> list[Tensor]:
    """Return this rank's results of products whose operands are sharded over tensor ranks."""
    group = mesh.group("tensor")
    x, weight, dy = drawn(16, 32, seed=1), drawn(24, 32, seed=2), drawn(16, 24, seed=3)
    rows, columns = slice(group.rank * 12, group.rank * 12 + 12), slice(group.rank * 16, group.rank * 16 + 16)
    products = Fp8Products("tensorwise", group)
    return [
        products.output(x, weight[rows], None),
        products.weight_gradient(x, dy[:, rows]),
        products.input_gradient(dy, weight[:, columns]),
    ]


@pytest.mark.parametrize("backend", ["processes", "threads"])
def test_tensor_ranks_agree_on_scales(backend: str) -> None:
    """Then a rank's part of a product is the part of the whole one."""
    ranks = run_mesh({"tensor": 2}, shared_products, backend=backend)  # type: ignore[arg-type]
    x, weight, dy = drawn(16, 32, seed=1), drawn(24, 32, seed=2), drawn(16, 24, seed=3)
    alone = Fp8Products("tensorwise", SOLO)
    actual = [torch.cat([rank[part] for rank in ranks], dim) for part, dim in enumerate((1, 0, 1))]
    wanted = [alone.output(x, weight, None), alone.weight_gradient(x, dy), alone.input_gradient(dy, weight)]
    for ours, theirs in zip(actual, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))
