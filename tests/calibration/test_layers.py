"""Layers measured by the engine: cells run what they say, every action has its time, and ranks wait for each other."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapipe.calibration.layers import (
    Cell,
    LayerRun,
    RandomSamples,
    cells,
    measure_cell,
    measure_shared,
    measured_config,
    samples_for,
    shared_cells,
    waits,
)
from megapipe.calibration.machine import on_ranks
from megapipe.config import ConfigError
from megapipe.config.bert import BertModelConfig, BertPretrainConfig
from megapipe.config.model import ModelConfig
from megapipe.config.parallel import MeshShape
from megapipe.config.run import PretrainConfig
from megapipe.engine.trace import HostClock
from megapipe.layout.hardware.description import MeasuredLayer
from megapipe.layout.stages import VOCABULARY_ALIGNMENT, layers_of
from megapipe.layout.units import Unit, UnitCosts
from megapipe.parallel.groups import SilentGroup
from megapipe.parallel.mesh import Mesh, silent_mesh
from megapipe.schedules.actions import Kind

CPU = torch.device("cpu")
CONFIG = PretrainConfig(
    model=ModelConfig(vocabulary_size=64, num_layers=9, hidden_size=32, num_heads=4, max_positions=16)
)
CONFIG.data.sequence_length = 16


@pytest.mark.parametrize("cell", cells([1, 2], [1, 2], [2]), ids=str)
def test_every_kind_of_layer_has_all_its_times(cell: Cell) -> None:
    rows, times = measure_cell(CONFIG, cell, CPU, steps=1)
    assert [row.kind for row in rows] == ["embedding", "block", "head"]
    assert {(row.tensor, row.context, row.micro_size) for row in rows} == {tuple(vars(cell).values())}
    assert min(min(row.forward, row.backward, row.backward_input, row.backward_weight) for row in rows) > 0.0
    assert [row.recompute > 0.0 for row in rows] == [False, True, False]
    assert times.update > 0.0


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_ranks_of_a_silent_group_have_their_weight_shards(tensor: int) -> None:
    run = LayerRun(CONFIG, Cell(tensor, 1, 1), CPU)
    config = measured_config(CONFIG, Cell(tensor, 1, 1), "whole")
    specs = {spec.name: spec for layer in layers_of(config) for spec in layer.parameters.values()}
    expected = UnitCosts(config, 1, VOCABULARY_ALIGNMENT).own_elements(Unit(tuple(specs.values())), 1)
    elements = run.times(1).elements
    assert elements == pytest.approx(expected, rel=0.01)  # each unit is rounded up by itself
    assert config.model.num_layers == 4


def test_halves_and_recomputation_are_the_schedules_own_actions() -> None:
    run = LayerRun(CONFIG, Cell(1, 1, 2), CPU, "apart")
    kinds = {action.kind for action in run.replica.schedule.actions("body", 0)}
    assert {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE} <= kinds
    assert Kind.BACKWARD not in kinds


def test_layer_options_are_kept_and_layout_is_dropped() -> None:
    config = replace(CONFIG, recompute=replace(CONFIG.recompute, method="selective"))
    config.parallel = replace(config.parallel, pipeline=4, data=2, sequence=True, tensor=2)
    config.zero = replace(config.zero, stage=3)
    alone = measured_config(config, Cell(1, 1, 2), "apart")
    assert (alone.recompute.method, alone.parallel.pipeline, alone.parallel.sequence) == ("selective", 1, False)
    assert (alone.zero.stage, alone.batch.global_size) == (0, 4)
    assert measured_config(config, Cell(2, 1, 2), "whole").parallel.sequence


def test_random_samples_are_functions_of_their_numbers() -> None:
    samples = RandomSamples(8, 50)
    tokens = samples.tokens([[3, 4], [4, 3]])
    assert tokens.shape == (2, 2, 9)
    assert (tokens[0] == tokens[1][::-1]).all()
    assert tokens.min() >= 0
    assert tokens.max() < 50
    assert samples.num_labels([1, 2]).tolist() == [8, 8]
    assert [each.tolist() for each in samples.boundaries([1])] == [[4]]


def test_sequence_parallel_layers_and_separate_documents_can_be_measured() -> None:
    config = replace(CONFIG, parallel=replace(CONFIG.parallel, sequence=True, tensor=2))
    config.data = replace(CONFIG.data, isolate_documents=True)
    rows, _ = measure_cell(config, Cell(2, 1, 1), CPU, steps=1)
    assert rows[1].forward > 0.0


def test_a_bert_needs_data() -> None:
    with pytest.raises(ConfigError, match=r"data\.prefix is empty, and masked pairs for a BERT"):
        samples_for(BertPretrainConfig(model=BertModelConfig()))


def test_silent_groups_return_the_shapes_of_real_ones() -> None:
    group = silent_mesh(MeshShape({"tensor": 2, "context": 1}), 0, CPU).group("tensor")
    assert isinstance(group, SilentGroup)
    x = torch.arange(6.0).reshape(2, 3)
    assert group.all_gather(x).shape == (2, 2, 3)
    assert group.reduce_scatter(x).tolist() == [0.0, 1.0, 2.0]
    whole = torch.zeros(4)
    group.gather_into(whole, torch.tensor([1.0, 2.0])).wait()
    assert whole.tolist() == [1.0, 2.0, 1.0, 2.0]
    into = torch.zeros(2, 3)
    group.shift(x, into).wait()
    assert torch.equal(into, x)
    assert group.all_gather_object(7) == [7, 7]


SECONDS = st.floats(0.0, 10.0)


def by_a_clock_of_sums(mesh: Mesh, config: PretrainConfig, wanted: Sequence[Cell], steps: int) -> list[MeasuredLayer]:
    """`measure_shared` by a clock that only sums of tensor ranks advance, each by a second."""
    now, start = 0, torch.ops._c10d_functional.all_reduce

    def timed(*given: Any) -> Any:
        nonlocal now
        now += 10**9
        return start(*given)

    torch.ops._c10d_functional.all_reduce = timed
    HostClock.mark = lambda _: now  # type: ignore[method-assign]
    return measure_shared(mesh, config, wanted, steps)


@pytest.mark.slow
def test_layers_take_the_time_of_their_sums() -> None:
    """A block of two tensor ranks sums twice in its forward, and twice in the input half of its backward; one of two
    context ranks sums nothing."""
    rows, others = on_ranks(2, "cpu", by_a_clock_of_sums, CONFIG, [Cell(2, 1, 1), Cell(1, 2, 1)], 3)
    assert rows == others
    assert [(row.kind, row.tensor, row.context) for row in rows] == [
        (kind, *shared) for shared in ((2, 1), (1, 2)) for kind in ("embedding", "block", "head")
    ]
    for row, sums in ((rows[1], 2), (rows[4], 0)):
        assert (row.forward, row.backward, row.backward_input, row.backward_weight) == (sums, sums, sums, 0)


@given(
    alone=st.lists(SECONDS, min_size=5, max_size=5), beyond=st.lists(st.floats(-10.0, 10.0), min_size=5, max_size=5)
)
def test_what_is_beyond_the_same_work_alone_is_waiting(alone: list[float], beyond: list[float]) -> None:
    """None where ranks together took less."""
    together = [1.5 * max(0.0, own + more) for own, more in zip(alone, beyond, strict=True)]
    one, both = (MeasuredLayer("block", 2, 1, 4, *seconds) for seconds in (alone, together))
    (layer,) = waits([MeasuredLayer("head", 2, 1, 4, *[9.0] * 5), one], [both], 1.5)
    assert (layer.kind, layer.tensor, layer.context, layer.micro_size) == ("block", 2, 1, 4)
    seconds = (layer.forward, layer.backward, layer.backward_input, layer.backward_weight)
    assert min(seconds) >= 0.0
    assert seconds == pytest.approx([max(0.0, more) for more in beyond[:4]], abs=1e-9)


def test_layers_are_shared_by_the_number_of_ranks() -> None:
    shared = shared_cells(cells([1, 2, 4], [1, 2], [1]), 4)
    assert shared == {2: [Cell(1, 2, 1), Cell(2, 1, 1)], 4: [Cell(2, 2, 1), Cell(4, 1, 1)]}
    assert shared_cells(cells([1, 2], [1], [1]), 1) == {}
