"""UnitState: segments, initial weights, versions, per-use gradients, and the canonical norm."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megapipe.engine.reductions import squared_norms
from megapipe.kernels.reference.optimizer import BLOCK, gradient_norm
from megapipe.parallel.segments import SEGMENT_ALIGNMENT, SegmentTable, Sharding
from megapipe.parallel.unit_state import UnitState
from megapipe.spec.parameters import Init, ParameterSpec

TABLE = ParameterSpec("table", (10, 3), 0, Init("normal", 1.0), decay=True, matrix=False, padded=True)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(30, 20, device="meta"))
        self.bias = nn.Parameter(torch.empty(30, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t() + self.bias


PARAMETERS = {
    "weight": ParameterSpec("unit.weight", (30, 20), 0, Init("normal", 0.5), decay=True, matrix=True),
    "bias": ParameterSpec("unit.bias", (30,), None, Init("zeros"), decay=False, matrix=False),
}


@given(
    sizes=st.lists(st.tuples(st.integers(1, 200), st.booleans()), min_size=1, max_size=8),
    tensor_size=st.integers(1, 4),
    alignment=st.sampled_from([1, 8, 64]),
)
@settings(max_examples=50, deadline=None)
def test_segments_are_disjoint_aligned_and_grouped(
    sizes: list[tuple[int, bool]], tensor_size: int, alignment: int
) -> None:
    specs = [
        ParameterSpec(f"p{i}", (rows, 3), 0, Init("ones"), decay=decay, matrix=False, padded=True)
        for i, (rows, decay) in enumerate(sizes)
    ]
    owned = dict.fromkeys((spec.name for spec in specs), 0)
    for rank in range(tensor_size):
        segments = SegmentTable(specs, tensor_rank=rank, tensor_size=tensor_size, alignment=alignment)
        position = 0
        for segment in segments:
            assert segment.start >= position
            assert segment.start % SEGMENT_ALIGNMENT == 0
            assert segment.owned <= segment.stop - segment.start
            assert (segment.stop <= segments.decayed.stop) == segment.spec.decay
            position = segment.stop
            owned[segment.spec.name] += segment.owned
        assert position <= segments.num_elements
    assert owned == {spec.name: spec.num_elements for spec in specs}


@pytest.mark.parametrize("tensor_size", [1, 2, 3, 4])
def test_shards_of_every_size_initialize_the_same_tensor(tensor_size: int) -> None:
    whole = UnitState("u", [TABLE])
    whole.initialize(seed=7)
    expected = whole.owned_view(whole.master, whole.table["table"])
    parts = []
    for rank in range(tensor_size):
        state = UnitState("u", [TABLE], tensor_rank=rank, tensor_size=tensor_size, alignment=4)
        state.initialize(seed=7)
        segment = state.table["table"]
        parts.append(state.owned_view(state.master, segment))
        padding = state.master[segment.start + segment.owned : segment.stop]
        assert not padding.any()
    assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_backward_accumulates_into_the_flat_buffer(dtype: torch.dtype) -> None:
    state = UnitState("u", PARAMETERS.values(), compute_dtype=dtype)
    state.initialize(seed=1)
    module = Linear()
    state.bind(module, PARAMETERS)
    inputs = torch.randn(4, 20, dtype=dtype)
    expected = torch.zeros(30, 20, dtype=state.accumulate_dtype)
    for _ in range(3):
        module(inputs).sum().backward()
        expected += (torch.ones(4, 30, dtype=dtype).t() @ inputs).to(expected.dtype)
    weight = state.view(state.gradients[0], state.table["unit.weight"])
    assert module.weight.grad is not None
    assert module.weight.grad.data_ptr() == weight.data_ptr()
    assert weight.dtype == state.accumulate_dtype
    assert torch.equal(weight, expected)
    assert torch.equal(module.weight.grad, expected)


def test_versions_advance_by_one_reusing_the_oldest_buffer() -> None:
    state = UnitState("u", PARAMETERS.values(), num_versions=2)
    state.initialize(seed=3)
    for version in (2, 3, 4):
        before = state.master.clone()
        state.begin_update(version).add_(1.0)
        assert state.master is state.weights[version % 2]
        assert torch.equal(state.master, before + 1.0)
    with pytest.raises(ValueError, match="version 7 does not follow version 4"):
        state.begin_update(7)


def test_mixed_precision_keeps_one_master_and_casts_on_publish() -> None:
    state = UnitState("u", PARAMETERS.values(), num_versions=2, compute_dtype=torch.bfloat16)
    state.initialize(seed=3)
    master = state.begin_update(2)
    master.add_(1e-4)
    state.publish()
    assert master.dtype == torch.float32
    assert torch.equal(state.weights[0], master.bfloat16())
    assert state.master is master


def test_uses_of_a_tied_weight_are_summed_in_order() -> None:
    state = UnitState("u", [TABLE], num_uses=2)
    state.gradients[0].fill_(1.0)
    state.gradients[1].fill_(2.0)
    state.sum_uses()
    assert torch.equal(state.gradients[0], torch.full_like(state.gradients[0], 3.0))


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 17])
def test_a_squared_norm_is_the_sum_over_its_blocks(size: int) -> None:
    values = torch.from_numpy(np.random.default_rng(size).normal(size=size)).float()
    blocks = [torch.linalg.vector_norm(block).double().square() for block in values.split(BLOCK) if len(block)]
    whole = blocks[: size // BLOCK]
    expected = torch.stack(whole).sum() if whole else torch.zeros((), dtype=torch.float64)
    assert torch.equal(gradient_norm(values), expected + sum(blocks[size // BLOCK :]))
    # Accurate where fp32 sums are not.
    assert float(gradient_norm(values)) == pytest.approx(float(values.double().square().sum()), rel=1e-6)


@pytest.mark.parametrize(
    "parts",
    [
        [{"tensor_rank": rank, "tensor_size": 2} for rank in range(2)],
        [{"sharding": Sharding(1, index, 4)} for index in range(4)],
    ],
    ids=["tensor ranks", "shards"],
)
def test_squares_of_parts_add_up(parts: list[dict[str, Any]]) -> None:
    """Parameters that tensor ranks replicate count once."""
    totals = {"unit.weight": 0.0, "unit.bias": 0.0}
    for part in parts:
        state = UnitState("unit", PARAMETERS.values(), **part)
        for segment in state.table:
            state.owned_view(state.gradients[0], segment).fill_(2.0)
        for name, square in squared_norms([state]).items():
            totals[name] += float(square)
    assert totals == {"unit.weight": pytest.approx(4 * 600), "unit.bias": pytest.approx(4 * 30)}
