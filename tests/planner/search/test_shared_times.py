"""Times that layouts share, compared with those of each layout alone."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config.run import PretrainConfig
from megapipe.layout.stages import layers_of
from megapipe.planner.cost.layer_times import RooflineTimes, SharedRoofline, shared
from megapipe.planner.measured import MeasuredTimes
from megapipe.planner.search.space import Layouts, SearchSpace
from tests.planner.measured.machines import machine as measured_machine
from tests.planner.search.runs import machine, runs


@settings(max_examples=30, deadline=None)
@given(
    base=runs(),
    devices=st.sampled_from([2, 4, 8]),
    optimizer=st.sampled_from(["adamw", "muon"]),
    logits=st.booleans(),
    unfused=st.booleans(),
    numbers=st.randoms(use_true_random=False),
)
def test_shared_times_are_those_of_each_layout(
    base: PretrainConfig, devices: int, optimizer: str, logits: bool, unfused: bool, numbers: object
) -> None:
    base = replace(
        base,
        optimizer=replace(base.optimizer, name=optimizer),
        recompute=replace(base.recompute, logits=logits),
    )
    alone = RooflineTimes(machine().groups[0].device, unfused)
    together = shared(alone)
    assert isinstance(together, SharedRoofline)
    layouts = list(Layouts(base, devices, frozenset(), SearchSpace(max_context=2)))
    for layout in numbers.sample(layouts, min(30, len(layouts))):  # type: ignore[attr-defined]
        config = layout.applied(base)
        for layer in layers_of(config):
            assert together.of(config, layer) == alone.of(config, layer)


def test_measured_times_stay_as_they_are() -> None:
    times = MeasuredTimes(measured_machine())
    assert shared(times) is times
