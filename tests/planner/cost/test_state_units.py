"""Every gather, reduction and update takes the time of its own state unit: its bytes over its links."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config.run import PretrainConfig
from megapipe.layout.stages import StageLayout
from megapipe.planner.cost.model import estimate, explain_stages, predict
from megapipe.schedules import Kind
from megapipe.schedules.simulation.costs import OF_STATES
from megapipe.spec.parameters import tied_names
from tests.planner.cost.runs import PLAIN, SMALL, config_of, machine
from tests.schedules.support import TRAINED

BANDWIDTH = 1e9
REPLICAS = 4
MODEL = replace(SMALL, num_layers=6, hidden_size=512, num_heads=8, num_experts=4, experts_per_token=2)


def run(
    name: str, pipeline: int, stage: int, experts: int | None, tied: bool = False, **groups: Any
) -> PretrainConfig:
    return config_of(
        replace(MODEL, tie_embeddings=tied),
        parallel={"pipeline": pipeline, "data": REPLICAS},
        schedule={"name": name},
        zero={"stage": stage, "expert_shard_size": experts},
        batch={"global_size": REPLICAS * 2 * pipeline},
        **groups,
    )


def unit_seconds(elements: int, shards: int, stage: int) -> dict[Kind, float]:
    """Rings on one node without latency: (n - 1) / n of the bytes, twice for an all-reduce; AdamW moves 38 bytes."""
    copies = REPLICAS // shards

    def ring(size: int, num_bytes: float) -> float:
        return (size - 1) / size * num_bytes / BANDWIDTH

    gather = ring(shards, 2 * elements)
    reduction = ring(shards, 4 * elements) + 2 * ring(copies, 4 * elements / shards)
    update = 38 * elements / shards / 2e12 + gather * (stage < 3)
    return {Kind.GATHER_WEIGHTS: gather, Kind.REDUCE_GRADIENTS: reduction, Kind.UPDATE: update}


def expected(config: PretrainConfig) -> dict[tuple[int, int, int], float]:
    """Seconds by kind, stage and state unit, without tied weights."""
    times, layout, zero = {}, StageLayout.of(config), config.zero
    tied = [name for names in tied_names(layout.layers) for name in names]
    for stage, members in enumerate(layout.ranges):
        units: list[tuple[int, int]] = []
        for layer in members:
            specs = [each for each in layout.layers[layer].parameters.values() if each.name not in tied]
            experts = sum(each.num_elements for each in specs if each.state_unit == "experts")
            whole = sum(each.num_elements for each in specs)
            apart = zero.expert_shard_size is not None and experts > 0
            units += [(whole - experts * apart, REPLICAS), *[(experts, zero.expert_shard_size or 1)] * apart]
        for unit, (elements, shards) in enumerate(units):
            for kind, seconds in unit_seconds(elements, shards, zero.stage).items():
                times[int(kind), stage, unit] = seconds
    return times


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(set(TRAINED) - {"zb_auto", "seq1f1b"})),
    pipeline=st.sampled_from([1, 2]),
    stage=st.integers(1, 3),
    experts=st.sampled_from([None, 1, 2, 4]),
    tied=st.booleans(),
)
def test_a_row_takes_the_time_of_its_own_bytes(
    name: str, pipeline: int, stage: int, experts: int | None, tied: bool
) -> None:
    clipping = {"optimizer": {"clip_norm": None}} if name == "pipedream" else {}
    tied = tied and name != "pipedream"
    config = run(name, pipeline, stage, experts, tied, **clipping)
    simulation = predict(config, machine(bandwidth=BANDWIDTH)).simulation
    table, seconds = simulation.table, expected(config)
    own = table.unit < table.num_states  # tied weights follow
    rows = np.flatnonzero(table.is_kind(*OF_STATES) & own)
    places = zip(table.kind[rows].tolist(), table.stage[rows].tolist(), table.unit[rows].tolist(), strict=True)
    assert simulation.durations[rows] == pytest.approx([seconds[place] for place in places], rel=0.02, abs=1e-7)
    updates = table.rows_with(Kind.UPDATE)
    for number, cost in enumerate(explain_stages(config, machine(bandwidth=BANDWIDTH))):
        mine = updates[table.stage[updates] == number]
        count = len(set(table.version[mine].tolist()))
        gathers = sum(seconds[Kind.GATHER_WEIGHTS, number, unit] for unit in range(int(table.num_states[mine[0]])))
        whole = cost["update"] + gathers * (stage < 3)
        assert simulation.durations[mine].sum() == pytest.approx(count * whole, rel=0.02, abs=1e-7)


@pytest.mark.parametrize("experts", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_estimate_knows_the_same_units(name: str, stage: int, experts: int) -> None:
    """State between steps is exact; whole weights and gradients are counted for layers, not for units."""
    config = run(name, 2, stage, experts)
    links = machine(bandwidth=20 * BANDWIDTH)
    closed = estimate(config, links, assumptions=PLAIN)
    exact = predict(config, links, assumptions=PLAIN).estimate
    assert closed.step_seconds == pytest.approx(exact.step_seconds, rel=0.13)
    for one, other in zip(closed.memory, exact.memory, strict=True):
        for part in ("weights", "master", "gradients", "moments"):
            assert getattr(one, part) == getattr(other, part)
        assert one.total == pytest.approx(other.total, rel=0.05)
