"""Stochastic rounding: unbiased, the same bits however a tensor is cut, and able to learn where rounding to
nearest does not change the weights."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config import ConfigError
from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.run import PretrainConfig
from megapipe.kernels.reference.optimizer import Elements, stochastic_rounding
from megapipe.optim.muon import make_optimizer
from megapipe.optim.optimizer import round_weights
from megapipe.parallel.unit_state import UnitState
from megapipe.random.bits import rounding_key, rounding_words
from megapipe.spec.parameters import Init, ParameterSpec
from megapipe.training.validation import validate

WHOLE = Elements(0, 1, 1)


def rounded(source: torch.Tensor, key: int, elements: Elements = WHOLE, block: int = 1 << 16) -> torch.Tensor:
    target = torch.zeros(source.numel(), dtype=torch.bfloat16)
    stochastic_rounding(target, source, key, elements, block)
    return target


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=64),
    *(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 2**32 - 1)),
)
def test_the_reference_words_decide_between_neighbours(
    values: list[float], seed: int, first: int, update: int
) -> None:
    """A word's low half is added to the 16 bits that go, and may carry into those that stay; also with 1 + k / 65536
    units in the last place, for every k that a word decides."""
    key = rounding_key(seed, "blocks.3.mlp.up.weight", update)
    fractions = torch.ones(64).view(torch.int32) | torch.arange(64, dtype=torch.int32) * 1024
    source = torch.cat([torch.tensor(values, dtype=torch.float32), fractions.view(torch.float32)])
    words = rounding_words(key, np.arange(first, first + len(source), dtype=np.uint64)) & 0xFFFF
    carried = (source.view(torch.int32).numpy() + words.astype(np.int32)) & ~0xFFFF
    expected = torch.where(source.isfinite(), torch.from_numpy(carried).view(torch.float32), source)
    actual = rounded(source, key, Elements(first, 1, 1)).float()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_the_mean_over_many_draws_is_the_number() -> None:
    """Each element's mean over n updates is off by at most 5 standard errors of its own two-point distribution."""
    draws = 4000
    source = torch.randn(256, generator=torch.Generator().manual_seed(3)) * 10.0 ** torch.linspace(-20, 20, 256)
    total, total_square = torch.zeros(256, dtype=torch.float64), torch.zeros(256, dtype=torch.float64)
    for update in range(draws):
        draw = rounded(source, rounding_key(11, "weight", update)).double()
        total += draw
        total_square += (draw - source.double()) ** 2
    spacing = (rounded(source, 0).abs().double() * 2.0**-7).clamp(min=1e-38)
    error = (total / draws - source.double()).abs()
    assert (error <= 5 * spacing / (2 * draws**0.5)).all()
    assert (total_square / draws <= spacing**2).all()
    across = ((total / draws - source.double()) / spacing).mean()
    assert abs(float(across)) < 5 / (2 * (draws * 256) ** 0.5)


@given(st.integers(1, 4), st.integers(0, 2), st.integers(1, 3), st.integers(1, 50))
def test_the_same_bits_however_a_tensor_is_cut(ranks: int, axis: int, inner: int, block: int) -> None:
    shape = [2, 3, inner]
    shape[axis] *= ranks
    spec = ParameterSpec("w", tuple(shape), axis, Init("normal", 1.0), decay=True, matrix=True)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = rounded(values.flatten(), rounding_key(5, "w", 7), block=block).view(shape)
    for rank in range(ranks):
        state = UnitState(
            "u", [spec], compute_dtype=torch.bfloat16, tensor_rank=rank, tensor_size=ranks, master_weights=False
        )
        segment = state.table["w"]
        box = tuple(slice(*each) for each in zip(segment.box.starts, segment.box.stops, strict=True))
        wide = torch.zeros(state.table.num_elements)
        state.owned_view(wide, segment).copy_(values[box])
        round_weights(state, wide, seed=5, update=7)
        assert torch.equal(state.owned_view(state.master, segment), expected[box])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_updates_too_small_for_bf16_add_up(name: str) -> None:
    """400 steps of 2^-14 from 1, where neighbours are 2^-7 apart: to nearest, nothing would ever move."""
    spec = ParameterSpec("w", (4096,), None, Init("ones"), decay=False, matrix=False)
    state = UnitState("u", [spec], compute_dtype=torch.bfloat16, num_versions=2, master_weights=False)
    state.initialize(0)
    config = OptimizerConfig(name=name, weight_decay=0.0)  # type: ignore[arg-type]
    optimizer = make_optimizer(config, seed=1)
    for _ in range(400):
        state.gradients[0].fill_(1.0)
        optimizer.update([state], state.newest + 1, 2.0**-14, torch.tensor(1.0))
    assert state.master.dtype == torch.bfloat16
    assert all(moment.dtype == torch.float32 for moment in state.moments.values())
    assert float(state.master.double().mean()) == pytest.approx(1 - 400 * 2.0**-14, abs=2e-4)


def test_bf16_moments_stay_close_to_fp32_ones() -> None:
    spec = ParameterSpec("w", (512,), None, Init("normal", 1.0), decay=True, matrix=False)
    states = {}
    for dtype in ("fp32", "bf16"):
        state = UnitState("u", [spec])
        state.initialize(0)
        optimizer = make_optimizer(OptimizerConfig(moment_dtype=dtype))  # type: ignore[arg-type]
        for step in range(20):
            state.gradients[0].copy_(torch.randn(512, generator=torch.Generator().manual_seed(step)))
            optimizer.update([state], step + 1, 1e-2, torch.tensor(1.0))
        states[dtype] = state
    first = states["bf16"].moments["first_moment"]
    assert first.dtype == torch.bfloat16
    torch.testing.assert_close(first.float(), states["fp32"].moments["first_moment"], atol=0.01, rtol=0.05)
    torch.testing.assert_close(states["bf16"].master, states["fp32"].master, atol=0.01, rtol=0)


def test_incompatible_options_are_refused() -> None:
    config = PretrainConfig()
    config.training.master_weights = False
    config.optimizer = OptimizerConfig(moment_dtype="bf16", betas=(0.9, 0.999))
    refusal = r"master_weights is false but training.precision is fp32(?s:.*)at most 0.996"
    with pytest.raises(ConfigError, match=refusal):
        validate(config, 1)
